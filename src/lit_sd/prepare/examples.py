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
        options: of the reader, as text: with others, the same files are other examples.
    """

    kind: str
    notes: list[str]
    complete: bool | None = None
    options: str = ""

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def fingerprint(self) -> str:
        """Tells whether the data is the same as before."""

    def identity(self) -> str:
        """Tells whether the examples are the same as before."""
        return f"{self.kind} {self.options} {self.fingerprint()}"

    @abstractmethod
    def read(self, start: int, stop: int) -> Iterator[Record | Unreadable]:
        """The examples of a range, one after the other."""
