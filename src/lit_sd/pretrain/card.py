"""The embedded base's figures, measured on the files that ship, and the model card that tells them.

python -m lit_sd.pretrain.card data/openmoji/base src/lit_sd/assets/openmoji
"""

import json
import os
import shutil
import sys
from collections.abc import Iterator, Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from PIL import Image, ImageDraw
from safetensors.torch import load_file, save_file
from torch import Tensor

from lit_sd.allocator import keep_freed_memory
from lit_sd.data.chelsea import CROPS, chelsea
from lit_sd.data.holdout import read_holdout
from lit_sd.data.openmoji import OpenMoji, photographs
from lit_sd.generate import generate, to_pictures
from lit_sd.metrics import ClipFeatures, frechet_distance, mean_cosine, recall_at, to_uint8
from lit_sd.models.loading import load
from lit_sd.models.saving import forget_origin
from lit_sd.models.stable_diffusion import StableDiffusion
from lit_sd.pretrain.autoencoder import psnr

SIZE = 128
STEPS, GUIDANCE = 25, 3.0
CROP = 0.6
"""Side of the crops of one photograph that are compared, as a share of its shorter side."""
PARTS = {
    "clip": "clip",
    **{part: f"pipeline/{part}" for part in ("scheduler", "text_encoder", "tokenizer", "unet", "vae")},
}
"""What ships, and where the stages leave it."""


def ship(base: Path, target: Path) -> None:
    """Copy a base's parts to `target`, weights in float16; each part appears whole or not at all.

    Raises:
        FileNotFoundError: a stage has not written its part yet.
    """
    missing = [source for source in PARTS.values() if not (base / source).is_dir()]
    if missing:
        raise FileNotFoundError(
            f"{base} lacks {', '.join(missing)}; run the stages openmoji_vae, _clip and _unet first"
        )
    target.mkdir(parents=True, exist_ok=True)
    for part, source in PARTS.items():
        aside = target / f".{part}.{os.getpid()}"
        shutil.copytree(base / source, aside)
        for weights in aside.glob("*.safetensors"):
            tensors = {k: v.half() if v.is_floating_point() else v for k, v in load_file(weights).items()}
            save_file(tensors, weights, {"format": "pt"})
        forget_origin(aside)
        shutil.rmtree(target / part, ignore_errors=True)
        aside.rename(target / part)
    shutil.copy2(base / "pipeline/model_index.json", target / "model_index.json")


def batched(items: Any, size: int) -> Iterator[Any]:
    """`items` in order, `size` at a time."""
    return (items[start : start + size] for start in range(0, len(items), size))


def to_pixels(pictures: Sequence[Image.Image]) -> Tensor:
    """`b 3 h w` in [-1, 1]."""
    return to_uint8(pictures).float() / 127.5 - 1


def cat_crops() -> list[Image.Image]:
    """The demo's crops of the cat, which no stage has seen, at the base's size."""
    return [chelsea().crop(box).resize((SIZE, SIZE), Image.Resampling.LANCZOS) for box in CROPS.values()]


def reconstruct(model: StableDiffusion, pictures: Sequence[Image.Image]) -> tuple[float, list[Image.Image]]:
    """Mean PSNR in dB of the VAE's reconstructions through the posterior's mean, and the reconstructions."""
    decibels, shown = [], []
    with torch.no_grad():
        for some in batched(pictures, 32):
            pixels = to_pixels(some)
            output = model.vae.decode(model.vae.encode(pixels).latent_dist.mode()).sample
            decibels.append(psnr(output, pixels))
            shown += to_pictures(output)
    return torch.cat(decibels).mean().item(), shown


def photograph_cosines(features: ClipFeatures, crops_each: int = 8) -> dict[str, float]:
    """Mean cosine between crops of one photograph, and of different ones; the cat is among them."""
    pictures = {**photographs(), "chelsea": np.asarray(chelsea())}
    vectors = {}
    for name, image in pictures.items():
        side = int(min(image.shape[:2]) * CROP)
        room = (image.shape[0] - side, image.shape[1] - side)
        places = [
            (room[0] * i // (crops_each - 1), room[1] * i // (crops_each - 1)) for i in range(crops_each)
        ]
        vectors[name] = features.pictures(
            Image.fromarray(np.ascontiguousarray(image[top : top + side, left : left + side]))
            for top, left in places
        )
    same = [(v @ v.T)[~torch.eye(crops_each, dtype=torch.bool)].mean().item() for v in vectors.values()]
    names = list(vectors)
    other = [mean_cosine(vectors[a], vectors[b]) for i, a in enumerate(names) for b in names[:i]]
    return {
        "clip_same_photograph": float(np.mean(same)),
        "clip_same_photograph_cat": same[names.index("chelsea")],
        "clip_different_photographs": float(np.mean(other)),
    }


def measure(folder: Path, cache: str, fid_images: int) -> tuple[dict[str, Any], dict[str, list[Image.Image]]]:
    """All figures of a shipped base, and the pictures for its sheets.

    Args:
        folder: the base in diffusers' layout with `clip/`.
        cache: folder of the drawn pictures.
        fid_images: generated pictures for the Fréchet distance.
    """
    model, features = load(str(folder)), ClipFeatures.from_folder(folder / "clip")
    held, train = OpenMoji("holdout", SIZE, cache), OpenMoji("train", SIZE, cache)
    real = [held.image(i) for i in range(len(held))]
    captions = held.captions()
    cat = cat_crops()
    figures: dict[str, Any] = {}
    figures["vae_psnr_holdout"], rebuilt = reconstruct(model, real)
    figures["vae_psnr_cat"], rebuilt_cat = reconstruct(model, cat)
    texts, seen = features.captions(captions), features.pictures(real)
    similarity = texts @ seen.T
    figures |= {f"clip_recall_at_{k}": recall_at(similarity, k) for k in (1, 10)}
    figures |= photograph_cosines(features)
    drawn = generate(model, captions, range(len(captions)), steps=STEPS, guidance=GUIDANCE, batch_size=50)
    vectors = features.pictures(drawn)
    figures["clip_score_real"] = similarity.diagonal().mean().item()
    figures["clip_score_generated"] = (texts * vectors).sum(1).mean().item()
    figures["clip_score_shuffled"] = mismatched(texts, vectors)
    figures["generated_recall_at_10"] = recall_at(texts @ vectors.T, 10)
    figures["fid_openmoji_clip"] = fid(model, features, train, fid_images)
    figures["fid_images"] = fid_images
    sheets = {
        "real": real,
        "generated": drawn,
        "rebuilt": rebuilt,
        "cat": cat,
        "rebuilt_cat": rebuilt_cat,
    }
    return figures, sheets


def mismatched(texts: Float[Tensor, "n d"], vectors: Float[Tensor, "n d"]) -> float:
    """Mean cosine of each picture with every caption but its own: what shuffling the captions gives on
    average.
    """
    cosines = texts @ vectors.T
    return ((cosines.sum() - cosines.diagonal().sum()) / (cosines.numel() - len(cosines))).item()


def fid(model: StableDiffusion, features: ClipFeatures, train: OpenMoji, count: int) -> float:
    """Fréchet distance in the shipped CLIP's image space: `count` pictures of seeded training captions
    against all of them.
    """
    captions = train.captions()
    chosen = np.random.default_rng(0).choice(len(captions), count, replace=False)
    drawn = (
        to_uint8(
            generate(
                model,
                [captions[i] for i in some],
                [int(i) for i in some],
                steps=STEPS,
                guidance=GUIDANCE,
                batch_size=len(some),
            )
        )
        for some in batched(chosen, 50)
    )
    real = (to_uint8([train.image(i) for i in some]) for some in batched(range(len(train)), 50))
    return frechet_distance(features, real, drawn)


def sheet(rows: Sequence[Sequence[Image.Image]], labels: Sequence[str]) -> Image.Image:
    """Rows of pictures of one size, each with its label on the left."""
    margin, columns = 96, max(len(row) for row in rows)
    page = Image.new("RGB", (margin + columns * SIZE, len(rows) * SIZE), "white")
    write = ImageDraw.Draw(page)
    for y, (row, label) in enumerate(zip(rows, labels, strict=True)):
        write.multiline_text((6, y * SIZE + SIZE // 2 - 8), label, fill="black")
        for x, picture in enumerate(row):
            page.paste(picture, (margin + x * SIZE, y * SIZE))
    return page


def draw_sheet(sheets: dict[str, list[Image.Image]], count: int = 40, columns: int = 10) -> Image.Image:
    """Held-out compositions, real above generated, then the VAE's reconstructions."""
    order = np.random.default_rng(0).permutation(len(sheets["real"]))[:count]
    rows, labels = [], []
    for some in batched(order, columns):
        rows += [[sheets[name][i] for i in some] for name in ("real", "generated")]
        labels += ["real", "generated"]
    rows += [[*sheets["cat"], *(sheets["real"][i] for i in order[: columns - 5])]]
    rows += [[*sheets["rebuilt_cat"], *(sheets["rebuilt"][i] for i in order[: columns - 5])]]
    return sheet(rows, [*labels, "real", "through\nthe VAE"])


def count_parameters(folder: Path) -> int:
    """Numbers in a part's weights."""
    return sum(t.numel() for path in folder.glob("*.safetensors") for t in load_file(path).values())


def write_card(folder: Path, figures: dict[str, Any]) -> None:
    """`README.md`, `metrics.json` and the attribution, beside the weights."""
    template = files("lit_sd").joinpath("assets/openmoji_card.md").read_text()
    size = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file()) / 2**20
    numbers = {
        name: f"{value:.3g}" if isinstance(value, float) else str(value) for name, value in figures.items()
    }
    parameters = {
        f"parameters_{part}": f"{count_parameters(folder / part) / 1e6:.1f}"
        for part in ("unet", "vae", "text_encoder", "clip")
    }
    text = template.format(
        **numbers,
        **parameters,
        size=f"{size:.0f}",
        steps=STEPS,
        guidance=GUIDANCE,
        holdout=len(read_holdout()),
        last_seed=len(read_holdout()) - 1,
    )
    (folder / "README.md").write_text(text)
    (folder / "metrics.json").write_text(json.dumps(figures, indent=1) + "\n")


def main(base: str, target: str, fid_images: str = "2000", cache: str = "data/openmoji") -> None:
    """Ship `base` to `target`, measure what was shipped, and write its card and sheet."""
    keep_freed_memory()
    folder = Path(target)
    ship(Path(base), folder)
    figures, sheets = measure(folder, cache, int(fid_images))
    draw_sheet(sheets).save(folder / "sheet.png", optimize=True)
    write_card(folder, figures)
    print(json.dumps(figures, indent=1))


if __name__ == "__main__":
    main(*sys.argv[1:])
