"""Batches that workers put into shared memory: right, and never written over while somebody looks at them."""

import gc

import numpy as np
import pytest
import torch
from sized_source import SizedSource
from torch.utils.data import DataLoader, Dataset

from lit_sd.data.batching import Draw, OrderedBatchSampler
from lit_sd.data.examples import Examples
from lit_sd.data.loading import ResumableLoader, load_batches
from lit_sd.data.slots import SLOTS, Placed, Slots

COUNT = 48


def loader_of(count: int = COUNT, workers: int = 2) -> ResumableLoader:
    """Batches of two of the grey pictures 0, 1, 2, …"""
    sampler = OrderedBatchSampler("val", range(count), (16, 16), batch_size=2)
    examples = Examples({"val": SizedSource(count, name="val")}, crop="center")
    return load_batches(examples, sampler, {"val": 1.0}, {"val": "val"}, num_workers=workers, seed=0)


def greys(batches: list[dict]) -> list[int]:
    return [int(picture.unique().item()) for batch in batches for picture in batch["pixels"]]


def test_batches_that_are_all_kept_are_not_written_over():
    """24 batches, many more than there are slots: what finds none free goes another way."""
    batches = list(loader_of())
    assert greys(batches) == list(range(COUNT))


def test_slots_are_used_again_once_nobody_looks():
    loader = loader_of()
    slots = loader.dataset.slots
    for _ in range(3):
        assert greys([{"pixels": batch["pixels"].clone()} for batch in loader]) == list(range(COUNT))
    del _
    gc.collect()
    assert slots._state.sum() == 0


def test_an_epoch_broken_off_leaves_the_slots_to_the_next():
    loader = loader_of()
    for _ in range(2 * SLOTS):
        next(iter(loader))
    iterator = iter(loader)
    assert greys([next(iterator)]) == [0, 1]
    assert loader.dataset.slots._state.sum() > 0  # what is under way lies in slots, still


def test_a_tensor_made_of_a_batch_keeps_its_slot():
    slots = Slots(1, 3 * 4)
    batch = slots.take({"placed": Placed(0, 0, (1, 2, 2, 3))}, pin=False)
    part = batch.pop("pixels")[:, :1].permute(0, 3, 1, 2)
    gc.collect()
    assert slots._state[0, 0] != 0
    del part
    gc.collect()
    assert slots._state[0, 0] == 0


def test_outside_of_a_worker_and_where_nothing_fits_memory_is_new():
    slots = Slots(1, 3 * 4)
    room = slots.room((1, 2, 2, 3))
    assert room.shape == (1, 2, 2, 3)
    assert slots.placed(room) is None
    assert Slots.where_they_fit(1, 2**62) is None


class Odd(Dataset):
    """Asks for more room than a slot has."""

    def __init__(self, slots: Slots) -> None:
        self.slots = slots

    def __getitem__(self, index: int) -> int:
        room = self.slots.room((1, 9, 9, 3))
        return int(self.slots.placed(room) is None and room.shape == (1, 9, 9, 3))

    def __len__(self) -> int:
        return 2


def test_a_batch_larger_than_a_slot_goes_another_way():
    assert torch.cat(list(DataLoader(Odd(Slots(1, 12)), num_workers=1))).tolist() == [1, 1]


@pytest.mark.parametrize("workers", [0, 1])
def test_pixels_are_those_of_a_single_example(workers):
    examples = Examples({"val": SizedSource(COUNT, name="val")}, crop="center")
    for number, batch in enumerate(loader_of(6, workers)):
        for row in range(2):
            alone, _ = examples[Draw("val", 2 * number + row, 0, 0, 16, 16)]
            assert np.array_equal(batch["pixels"][row].numpy(), alone["pixels"])
