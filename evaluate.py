"""Evaluate a checkpoint: `python evaluate.py ckpt=logs/train/runs/…/checkpoints/last.ckpt`; settings in
conf/evaluate.yaml.
"""

import sys
from pathlib import Path

import hydra
from omegaconf import DictConfig

from lit_sd.command_line import check_command_line
from lit_sd.refusal import refusing

CONF = Path(__file__).resolve().parent / "conf"


@hydra.main(version_base="1.3", config_path="conf", config_name="evaluate")
def main(cfg: DictConfig) -> dict[str, float]:
    """One evaluation; returns its metrics."""
    with refusing():
        from lit_sd.evaluation import evaluate  # imports torch, so only after the check

        return evaluate(cfg)


if __name__ == "__main__":
    sys.argv[1:] = check_command_line(CONF, "evaluate", sys.argv[1:])
    main()
