"""Random streams that depend on names and counters alone, never on how often something else drew."""

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

Key = str | int
"""One part of a stream's name."""


def seed_of(*key: Key) -> int:
    """A seed in [0, 2**63) that is the same for the same key on every machine, and unrelated for any other
    key.
    """
    digest = hashlib.blake2b(repr(key).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1


def generator_of(*key: Key, device: torch.device | str = "cpu") -> torch.Generator:
    """A generator on `device`, seeded by `seed_of(*key)`."""
    return torch.Generator(device).manual_seed(seed_of(*key))


@dataclass(frozen=True)
class Draws:
    """The random streams of one training step on one rank, told apart by name.

    With no state but counters, a resumed run draws what the uninterrupted one would have drawn.
    """

    seed: int
    micro_step: int
    rank: int

    def seed_of(self, stream: str) -> int:
        """The seed of the named stream."""
        return seed_of(stream, self.seed, self.micro_step, self.rank)

    def generator(self, stream: str, device: torch.device | str = "cpu") -> torch.Generator:
        """A fresh generator of the named stream; it draws on `device`, so that nothing has to be copied
        there.
        """
        return generator_of(stream, self.seed, self.micro_step, self.rank, device=device)


@contextmanager
def isolated() -> Iterator[None]:
    """Whatever is drawn inside leaves torch's global generators (CPU and the current accelerator) as they
    were.
    """
    with torch.random.fork_rng(
        devices=range(torch.cuda.device_count()) if torch.cuda.is_initialized() else ()
    ):
        yield
