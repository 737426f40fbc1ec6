"""The latents that a run may ask for, and the cache on disk that has them."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

import numpy as np
from jaxtyping import Int

from lit_sd.data.buckets import Buckets
from lit_sd.data.caches.digests import Facts, gather_facts
from lit_sd.data.caches.latents import FORMS, KIND, LatentReader, Recipe, Variant
from lit_sd.data.caches.parts import Parts
from lit_sd.data.caches.progress import CacheProgress
from lit_sd.data.caches.pruning import prune_facts, prune_parts
from lit_sd.data.caches.writer import KEY
from lit_sd.data.source import Source
from lit_sd.data.transforms import Size, Where
from lit_sd.together import Together

DIGESTS = "digests"
CHUNK = 1 << 16
"""Variants that are looked up at once."""
WANTED = np.dtype([("key", KEY), ("request", "<u2"), ("row", "<i8"), ("shape", "<i4", (2,)), ("flip", "?")])
"""A variant that is missing: its key, request and picture, and which of its forms."""


@dataclass(frozen=True)
class Request:
    """Variants of a source's pictures that a run may ask for.

    Attributes:
        source: of the pictures.
        shapes: all that each may be cropped to; or the buckets that give each its own.
        crop: where they are cropped.
        flips: whether they are mirrored, or both.
        rows: those pictures alone, in order; None is all.
        aside: sorted indexes of pictures that are left out.
    """

    source: Source
    shapes: Sequence[Size] | Buckets
    crop: Where
    flips: tuple[bool, ...]
    rows: Sequence[int] | None = None
    aside: Sequence[int] = ()

    def chunks(self) -> Iterator[Int[np.ndarray, " n"]]:
        """The pictures, some at a time."""
        total = len(self.source) if self.rows is None else len(self.rows)
        shapes = 1 if isinstance(self.shapes, Buckets) else len(self.shapes)
        step = max(1, CHUNK // (shapes * len(self.flips)))
        for start in range(0, total, step):
            stop = min(start + step, total)
            some = np.arange(start, stop) if self.rows is None else np.asarray(self.rows[start:stop])
            yield some[~np.isin(some, self.aside)]

    def covers(self, row: int) -> bool:
        """Whether a picture is among them."""
        return (self.rows is None or row in self._rows) and row not in self._aside

    @cached_property
    def _rows(self) -> frozenset[int]:
        return frozenset(self.rows or ())

    @cached_property
    def _aside(self) -> frozenset[int]:
        return frozenset(self.aside)

    def shapes_of(self, sizes: Int[np.ndarray, "n 2"]) -> Int[np.ndarray, "n k 2"]:
        """The shapes of each picture."""
        if isinstance(self.shapes, Buckets):
            return np.asarray(self.shapes.assign(sizes))[:, None]
        return np.broadcast_to(np.array(self.shapes), (len(sizes), len(self.shapes), 2))


class LatentCache:
    """A cache's latents, for the sources of a run.

    Args:
        folder: of the cache.
        recipe: what the latents depend on; where pictures are cropped, though, each request says.

    Attributes:
        wanted: variants that the run may ask for.
        encoded: those that had to be encoded, by all ranks together.
        notes: lines for the report of what trains.
    """

    def __init__(self, folder: Path, recipe: Recipe) -> None:
        self.folder, self.recipe = folder, recipe
        self.parts = Parts(folder / KIND, KIND)
        self.wanted = self.encoded = 0
        self.notes: list[str] = []
        self._facts: list[tuple[Source, Facts]] = []

    def facts(self, source: Source) -> Facts:
        """The facts of a source that was gathered."""
        return next(facts for known, facts in self._facts if known is source)

    def gather(self, sources: Iterable[Source], together: Together) -> None:
        """Reads the facts of sources, as `gather_facts`."""
        for source in sources:
            if all(known is not source for known, _ in self._facts):
                share, first = len(together.share(len(source))), together.rank == 0
                with CacheProgress(f"reading {source.name}", share, shown=first, kept=False) as bar:
                    facts = gather_facts(source, self.folder / DIGESTS, together, bar.advance)
                self._facts.append((source, facts))

    def reader(self, sources: Mapping[str, Source], crop: Where) -> LatentReader:
        """Reads what draws from these sources ask for."""
        facts = {name: self.facts(source) for name, source in sources.items()}
        alpha = frozenset(name for name, source in sources.items() if source.alpha_mask)
        return LatentReader(self.parts, replace(self.recipe, crop=crop), facts, alpha)

    def recipe_of(self, request: Request) -> Recipe:
        """What the latents of a request depend on."""
        return replace(self.recipe, crop=request.crop)

    def forms(self, request: Request) -> Iterator[tuple[Int[np.ndarray, " n"], np.ndarray]]:
        """All variants that a request may ask for, some at a time: the index of each one's picture, and an
        array `n` of `FORMS`; those of a picture and shape side by side.
        """
        facts = self.facts(request.source)
        for rows in request.chunks():
            sizes = facts.sizes(rows)
            shapes = request.shapes_of(sizes)
            forms = np.zeros((*shapes.shape[:2], len(request.flips)), FORMS)
            forms["digest"], forms["size"] = facts.digests(rows)[:, None, None], sizes[:, None, None]
            forms["target"], forms["flip"] = shapes[:, :, None], request.flips
            forms["alpha"] = request.source.alpha_mask
            yield np.repeat(rows, forms[:1].size), forms.reshape(-1)

    def variants_of(self, request: Request, row: int) -> list[Variant]:
        """Those of one of its pictures."""
        digest, size = self.facts(request.source)[row]
        return [
            Variant(digest, size, (height, width), flip, request.source.alpha_mask)
            for height, width in request.shapes_of(np.array([size]))[0].tolist()
            for flip in request.flips
        ]

    def prune(self, requests: Sequence[Request]) -> int:
        """Drops latents that these requests don't ask for, and what is known of images of other sources than
        were gathered; see `lit_sd.data.caches.pruning`. Returns how many latents were dropped.
        """
        keys = [
            self.recipe_of(request).keys(forms) for request in requests for _, forms in self.forms(request)
        ]
        prune_facts(self.folder / DIGESTS, [facts for _, facts in self._facts])
        return prune_parts(self.folder / KIND, KIND, np.concatenate([np.zeros(0, KEY), *keys]))

    def missing(self, requests: Sequence[Request]) -> np.ndarray:
        """What there is no latent of yet, each once: a table of `WANTED`, in the requests' order."""
        found, self.wanted = [np.zeros(0, WANTED)], 0
        for number, request in enumerate(requests):
            recipe = self.recipe_of(request)
            for rows, forms in self.forms(request):
                keys = recipe.keys(forms)
                lacking = np.flatnonzero(~self.parts.has(keys))
                table = np.zeros(len(lacking), WANTED)
                table["key"], table["request"], table["row"] = keys[lacking], number, rows[lacking]
                table["shape"], table["flip"] = forms["target"][lacking], forms["flip"][lacking]
                found.append(table)
                self.wanted += len(forms)
        table = np.concatenate(found)
        return table[np.sort(np.unique(table["key"], return_index=True)[1])]
