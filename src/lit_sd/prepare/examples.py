"""What is prepared, as all stages see it: examples by index, of which some may be broken."""

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass

from lit_sd.data.source import Record


@dataclass(frozen=True)
class Unreadable:
    """An example that can't be read, and why."""

    id: str
    error: str


class Input(ABC):
    """Examples by index, in a fixed order; may be forked and pickled.

    Attributes:
        kind: folder, lmdb, webdataset or hub.
        notes: what was found on the way.
        complete: whether all is there that a manifest lists; None where there is none.
    """

    kind: str
    notes: list[str]
    complete: bool | None = None

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def fingerprint(self) -> str:
        """Tells whether it holds the same as before."""

    @abstractmethod
    def read(self, start: int, stop: int) -> Iterator[Record | Unreadable]:
        """The examples of a range, one after the other."""
