"""DreamBooth's class images, made by the base model before training: only those that are missing, shared over
the ranks.

A picture's file carries its seed, so that every rank knows its own names. `manifest.json` beside them says of
which prompt and which base they are; when either has changed, what was made here is made again. Other
people's files are never touched.
"""

import json
import re
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from PIL import Image
from rich.progress import Progress

from lit_sd.aside import write_aside
from lit_sd.data.class_images import MANIFEST
from lit_sd.data.folder import list_folder
from lit_sd.together import Together

Generate = Callable[[list[str], list[int]], Sequence[Image.Image]]
"""`(prompts, seeds) -> pictures`, one for each."""

STRIDE = 1_000_003
"""Between the seeds of one picture's tries; odd, so that what ails every second seed is left behind."""

_OURS = re.compile(r"prior-(\d{12})\.png")


def make_prior_images(
    generate: Generate,
    folder: Path,
    prompt: str,
    count: int,
    identity: str,
    *,
    rank: int = 0,
    world_size: int = 1,
    batch_size: int = 4,
    acceptable: Callable[[Image.Image], bool] | None = None,
    max_tries: int = 10,
) -> list[Path]:
    """Makes sure of `count` class images; every rank has to call it. All ranks need to see the same folder.

    Args:
        generate: draws pictures.
        folder: where they go; made where it is missing. Images that are there already count.
        prompt: what they show.
        count: how many there should be.
        identity: of the base model, and of whatever else they depend on.
        rank: this process.
        world_size: number of processes; above 1 they have to be able to talk to each other.
        batch_size: pictures drawn at a time.
        acceptable: says which pictures to keep; None throws away black ones, which is what safety filters
            leave.
        max_tries: how often to draw a picture before giving up.

    Returns:
        `count` images, by name, the same on each rank.

    Raises:
        RuntimeError: pictures were refused `max_tries` times, another rank failed, or ranks can't talk or
            share the folder.
    """
    together = Together(rank, world_size)
    slots = together.run(
        "looking for class images",
        lambda: _prepare(folder, prompt, count, identity) if rank == 0 else None,
    )[0]
    assert slots is not None
    make = partial(_make, generate, folder, prompt, slots[rank::world_size])
    keep = acceptable or is_not_black
    together.run(
        "making class images",
        lambda: make(batch_size=batch_size, keep=keep, max_tries=max_tries, show=rank == 0),
    )
    # together once more: a rank that went ahead could already be clearing the folder for another prompt
    return together.run("looking for class images", lambda: _see(folder, count, rank))[rank]


def is_not_black(image: Image.Image) -> bool:
    """Whether any pixel is brighter than 2 of 255."""
    return image.convert("L").point(lambda value: value > 2).getbbox() is not None


def _prepare(folder: Path, prompt: str, count: int, identity: str) -> list[int]:
    """Removes what no longer fits, writes the manifest and returns the numbers of the missing pictures."""
    folder.mkdir(parents=True, exist_ok=True)
    manifest = {"prompt": prompt, "identity": identity}
    for stale in folder.glob(".prior-*.png.*"):  # of a run that was killed while writing
        stale.unlink(missing_ok=True)
    ours = {path: int(match[1]) for path in folder.iterdir() if (match := _OURS.fullmatch(path.name))}
    if _read_manifest(folder) not in (None, manifest):
        for path in ours:
            path.unlink()
        ours = {}
    write_aside(folder / MANIFEST, lambda file: file.write(json.dumps(manifest, indent=2).encode()))
    others = len(list_folder(folder).images) - len(ours)
    have = {seed % STRIDE for seed in ours.values()}
    missing = max(0, count - others - len(ours))
    return [slot for slot in range(count) if slot not in have][:missing]


def _see(folder: Path, count: int, rank: int) -> list[Path]:
    there = list_folder(folder).images
    if len(there) < count:
        raise RuntimeError(
            f"rank {rank} sees {len(there)} of {count} class images in {folder}; "
            "the folder has to be on a storage that all ranks share"
        )
    return [folder / name for name in there[:count]]


def _read_manifest(folder: Path) -> dict[str, Any] | None:
    try:
        return json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except ValueError:  # torn by something else than this program: of unknown origin, so made again
        return {}


def _make(
    generate: Generate,
    folder: Path,
    prompt: str,
    slots: Sequence[int],
    *,
    batch_size: int,
    keep: Callable[[Image.Image], bool],
    max_tries: int,
    show: bool,
) -> None:
    waiting = [(slot, 0) for slot in slots]
    with Progress(disable=not show or not waiting) as progress:
        bar = progress.add_task(f"class images: {prompt}", total=len(waiting))
        while waiting:
            batch, waiting = waiting[:batch_size], waiting[batch_size:]
            seeds = [slot + attempt * STRIDE for slot, attempt in batch]
            pictures = generate([prompt] * len(seeds), seeds)
            if len(pictures) != len(seeds):
                raise RuntimeError(f"asked for {len(seeds)} class images, got {len(pictures)}")
            for (slot, attempt), seed, picture in zip(batch, seeds, pictures, strict=True):
                if keep(picture):
                    write_aside(folder / f"prior-{seed:012d}.png", partial(picture.save, format="PNG"))
                    progress.advance(bar)
                elif attempt + 1 < max_tries:
                    waiting.append((slot, attempt + 1))
                else:
                    raise RuntimeError(
                        f"class image {slot} of {prompt!r} came out black or was refused {max_tries} times; "
                        "change data.class_prompt, or put images of your own into data.class_root"
                    )
