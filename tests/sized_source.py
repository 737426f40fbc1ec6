"""A source of grey images of given sizes, for tests of order and shape."""

from collections.abc import Sequence

import numpy as np

from lit_sd.data.caption_rules import Caption
from lit_sd.data.source import Picture, Record, Source
from lit_sd.data.transforms import cover_size


class SizedSource(Source):
    """Images of these (height, width), each of one grey that tells its index; read in parts that begin at
    `starts`.
    """

    def __init__(
        self,
        sizes: Sequence[tuple[int, int]] | int,
        *,
        name: str = "images",
        starts: Sequence[int] = (0,),
        weights: Sequence[float] | None = None,
        repeats: int = 1,
        weight: float = 1.0,
    ) -> None:
        super().__init__(name, weight=weight, repeats=repeats)
        self.all = np.array([(16, 16)] * sizes if isinstance(sizes, int) else sizes, np.int32)
        self.starts, self.weights = [*starts, len(self.all)], weights
        self.asked: list[tuple[int, int]] = []

    def check(self) -> None: ...

    def __len__(self) -> int:
        return len(self.all)

    def ids(self) -> list[str]:
        return [f"{self.name}{i}" for i in range(len(self))]

    def sizes(self, start: int = 0, stop: int | None = None) -> np.ndarray:
        self.asked.append((start, len(self) if stop is None else stop))
        return self.all[start:stop]

    def draw_weights(self, start: int = 0, stop: int | None = None) -> np.ndarray | None:
        return None if self.weights is None else np.asarray(self.weights, float)[start:stop]

    def blocks(self) -> np.ndarray:
        return np.array(self.starts)

    def record(self, index: int) -> Record:
        raise NotImplementedError

    def load(self, index: int, cover: tuple[int, int] | None = None, into: object = None) -> Picture:
        height, width = self.all[index].tolist()
        shape = (height, width) if cover is None else cover_size((height, width), cover)
        grey = np.full((*shape, 3), index % 256, np.uint8)
        return Picture(grey, (height, width), (Caption(f"number {index}"),))
