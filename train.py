"""Train: `python train.py experiment=dreambooth_cat`, every option in conf/.

The command line is checked before torch, Lightning or a model is imported, so that a misspelt word costs a
second.
"""

import sys
from pathlib import Path

import hydra
from omegaconf import DictConfig

from lit_sd.command_line import check_command_line
from lit_sd.refusal import refusing

CONF = Path(__file__).resolve().parent / "conf"


@hydra.main(version_base="1.3", config_path="conf", config_name="train")
def main(cfg: DictConfig) -> dict[str, float]:
    """One training job; returns its last metrics, for sweepers."""
    with refusing():
        from lit_sd.run import fit, prepare  # imports torch, so only after the check

        run = prepare(cfg)
    return fit(run)


if __name__ == "__main__":
    sys.argv[1:] = check_command_line(CONF, "train", sys.argv[1:])
    main()
