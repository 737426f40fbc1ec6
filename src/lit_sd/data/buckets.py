"""Aspect-ratio buckets: batches of one shape each, so that portraits and landscapes keep most of their
pixels.

All sizes are (height, width).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from jaxtyping import Float, Int

from lit_sd.data.transforms import Size

SHOWN = 20
"""Names in one message."""


def make_buckets(resolution: int, step: int, max_ratio: int | float) -> list[Size]:
    """Shapes of at most `resolution`² pixels, with sides that are multiples of `step`, as large as fit; the
    square one first.

    Raises:
        ValueError: `resolution` is no multiple of `step`, or `max_ratio` is below 1.
    """
    if step < 8 or step % 8:
        raise ValueError(f"data.bucket_step={step}: expected a multiple of 8, the VAE's factor")
    if resolution % step:
        raise ValueError(
            f"data.resolution={resolution} is no multiple of data.bucket_step={step}; "
            f"set data.resolution={max(step, resolution // step * step)} or a smaller step"
        )
    if max_ratio < 1:
        raise ValueError(
            f"data.bucket_max_ratio={max_ratio}: expected the longer side over the shorter, 1 or more"
        )
    area = resolution * resolution
    tall = []
    for height in range(resolution + step, area // step + 1, step):
        width = area // height // step * step
        if height / width > max_ratio:
            break
        tall.append((height, width))
    return [(resolution, resolution), *tall, *((width, height) for height, width in tall)]


@dataclass(frozen=True)
class Buckets:
    """The rule by which an image gets the shape that it is trained in.

    Of each resolution the shape is taken whose aspect ratio is nearest; of these the largest that the image
    fills without being scaled up. An image too small for all of them is scaled up to the smallest, or, with
    `upscale=False`, keeps its size: the largest multiples of `step` within it.

    Attributes:
        resolutions: sides of the squares that the shapes' areas come from.
        step: sides are multiples of it.
        max_ratio: longer side over shorter, at most; 1 gives squares only.
        upscale: scale small images up.

    Raises:
        ValueError: an option is out of its range.
    """

    resolutions: Sequence[int]
    step: int
    max_ratio: int | float
    upscale: bool = True

    def __post_init__(self) -> None:
        if not self.resolutions or len(set(self.resolutions)) < len(self.resolutions):
            raise ValueError(
                f"data.resolution={list(self.resolutions)}: expected one size, or several different ones"
            )
        _ = self._by_resolution

    @cached_property
    def _by_resolution(self) -> list[list[Size]]:
        """Shapes of each resolution, the largest first."""
        return [
            make_buckets(side, self.step, self.max_ratio) for side in sorted(self.resolutions, reverse=True)
        ]

    @property
    def shapes(self) -> list[Size]:
        """All shapes but those that small images keep."""
        return [shape for shapes in self._by_resolution for shape in shapes]

    def notes(self) -> list[str]:
        """A line where the step is too large for any shape but squares."""
        smallest = min(self.resolutions)
        if self.max_ratio <= 1 or any(height != width for height, width in self.shapes):
            return []
        step = max(8, smallest // 64 * 8)
        return [
            f"data.buckets has squares alone: data.resolution={smallest} has no other shape of multiples of "
            f"data.bucket_step={self.step} up to data.bucket_max_ratio={self.max_ratio:g}; set "
            f"data.bucket_step={step}"
        ]

    def assign(self, sizes: Int[np.ndarray, "n 2"]) -> Int[np.ndarray, "n 2"]:
        """The shape of each image, of these sizes."""
        sizes = np.asarray(sizes, np.int64).reshape(-1, 2)
        ratios = np.log(sizes[:, 0] / sizes[:, 1])
        chosen = np.zeros_like(sizes)
        open_ = np.ones(len(sizes), bool)
        for shapes in self._by_resolution:
            nearest = nearest_shapes(ratios, shapes)
            fits = open_ & (nearest <= sizes).all(1)
            chosen[fits] = nearest[fits]
            open_ &= ~fits
        if self.upscale:
            chosen[open_] = nearest[open_]  # the smallest resolution's
        else:
            chosen[open_] = self._within(sizes[open_])
        return chosen

    def _within(self, sizes: Int[np.ndarray, "n 2"]) -> Int[np.ndarray, "n 2"]:
        longest = (sizes.min(1) // self.step * self.step * self.max_ratio)[:, None]
        inside = np.minimum(sizes, np.maximum(longest, self.step)).astype(np.int64)
        return np.maximum(inside // self.step * self.step, self.step)


def buckets_of(
    resolutions: Sequence[int], wanted: bool, step: int, max_ratio: int | float, upscale: bool
) -> Buckets | None:
    """The rule for `data.buckets`, and for several resolutions without it: squares; None for one square."""
    if not wanted and len(resolutions) == 1:
        return None
    return Buckets(resolutions, step, max_ratio, upscale) if wanted else Buckets(resolutions, 8, 1)


def nearest_shapes(ratios: Float[np.ndarray, " n"], shapes: Sequence[Size]) -> Int[np.ndarray, "n 2"]:
    """For each log of height over width, the shape whose own is nearest; of equally near ones the first of
    the list.
    """
    table = np.array(shapes)
    own = np.log(table[:, 0] / table[:, 1])
    order = np.argsort(own, kind="stable")
    above = np.searchsorted(own[order], ratios).clip(1, max(1, len(own) - 1))
    pair = np.stack([order[above - 1], order[np.minimum(above, len(own) - 1)]])
    away = np.abs(own[pair] - ratios).round(12)
    upper = (away[1] < away[0]) | ((away[1] == away[0]) & (pair[1] < pair[0]))
    return table[np.where(upper, pair[1], pair[0])]


def bucket_line(
    shape: Size, images: int, draws: int, steps: int, step_size: int, untrained: Sequence[str] = ()
) -> str:
    """What an epoch makes of a bucket: its steps, and what is drawn anew, left over or never trained on.

    Args:
        shape: the bucket.
        images: in it.
        draws: that an epoch may make of it.
        steps: that it makes.
        step_size: draws of a step.
        untrained: names of its images, where it makes no step.
    """
    line = f"bucket {shape[0]}x{shape[1]}: {images} images, {draws} draws = {steps} steps of {step_size}"
    spare = draws - steps * step_size
    if spare < 0:
        return f"{line}; {-spare} further draws fill up the last one"
    if not steps:
        return f"{line}; never trained on: {listed(untrained)}"
    return f"{line}; {spare} draws left over, other ones each epoch" if spare else line


def listed(names: Sequence[str], limit: int = SHOWN) -> str:
    """The names, joined; beyond `limit` only their number."""
    rest = len(names) - limit
    return ", ".join(names[i] for i in range(min(limit, len(names)))) + (
        f" and {rest} more" if rest > 0 else ""
    )
