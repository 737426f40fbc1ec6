r"""How well `experiment=dreambooth_cat` learns its subject, and what it does to the class, in the shipped
CLIP's image space.

    python train.py experiment=dreambooth_cat paths.output_dir=logs/cat
    python train.py experiment=dreambooth_cat paths.output_dir=logs/cat_alone \
        data.prior_weight=0 data.batch_size=8 data.repeats=8
    python benchmarks/dreambooth.py logs/cat logs/cat_alone --sheet docs/images/dreambooth_cat.png

Subject fidelity is the mean cosine between 16 pictures of the instance prompt and the photos that were
trained on. Drift is the same for pictures of the class prompt: what prior preservation should keep where it
was before training.
"""

import argparse
import json
from collections.abc import Sequence
from importlib.resources import files
from pathlib import Path

from PIL import Image

from lit_sd.data.folder import FolderSource
from lit_sd.generate import generate
from lit_sd.metrics import ClipFeatures, mean_cosine
from lit_sd.models.loading import load
from lit_sd.models.stable_diffusion import StableDiffusion
from lit_sd.pretrain.card import SIZE, sheet
from lit_sd.run import rebuild

COUNT, STEPS, GUIDANCE = 16, 25, 3.0
OTHERS = ("smiling face with halo", "red heart")
"""Prompts that the training has nothing to do with."""


def pictures(model: StableDiffusion, prompt: str, count: int = COUNT) -> list[Image.Image]:
    """`count` pictures of a prompt, seeds from 0."""
    seeds = range(count)
    return generate(model, [prompt] * count, list(seeds), steps=STEPS, guidance=GUIDANCE, batch_size=count)


def measure(
    model: StableDiffusion, features: ClipFeatures, photos: Sequence[Image.Image], instance: str, kind: str
) -> tuple[dict[str, float], list[list[Image.Image]]]:
    """Figures and pictures of one state of the model."""
    subject, others = pictures(model, instance), pictures(model, kind)
    seen = features.pictures(photos)
    figures = {
        "subject": mean_cosine(features.pictures(subject), seen),
        "class": mean_cosine(features.pictures(others), seen),
    }
    kept = [pictures(model, prompt, 4) for prompt in OTHERS]
    for prompt, drawn in zip(OTHERS, kept, strict=True):
        figures[prompt] = mean_cosine(features.pictures(drawn), features.captions([prompt]))
    return figures, [subject[:8], others[:8], [picture for drawn in kept for picture in drawn]]


def main() -> None:
    """Measure the base and each run; print a table, write the sheet."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("runs", nargs="+", type=Path, help="with prior preservation first")
    parser.add_argument("--sheet", type=Path)
    args = parser.parse_args()
    features = ClipFeatures.from_folder(Path(str(files("lit_sd").joinpath("assets/openmoji/clip"))))
    runs = {run.name: rebuild(run / "checkpoints" / "last.ckpt") for run in args.runs}
    cfg = next(iter(runs.values())).cfg
    source = FolderSource(cfg.data.root, prompt=cfg.data.prompt)
    photos = [Image.fromarray(source.load(i).image) for i in range(len(source))]
    models = {"before": load(cfg.model.path)} | {name: found.module.model for name, found in runs.items()}
    rows: list[list[Image.Image]] = [
        [photo.resize((SIZE, SIZE), Image.Resampling.LANCZOS) for photo in photos]
    ]
    labels, table = ["the photos"], {}
    for name, model in models.items():
        table[name], drawn = measure(model, features, photos, cfg.data.prompt, cfg.data.class_prompt)
        rows += drawn
        labels += [f"{name}\ninstance", f"{name}\nclass", f"{name}\nothers"]
    print(json.dumps(table, indent=1))
    if args.sheet:
        args.sheet.parent.mkdir(parents=True, exist_ok=True)
        sheet(rows, labels).save(args.sheet, optimize=True)


if __name__ == "__main__":
    main()
