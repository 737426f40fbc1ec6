"""Batches of examples, and the loader that makes them."""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader

from lit_sd.allocator import keep_freed_memory
from lit_sd.data.batching import MixedBatchSampler, OrderedBatchSampler
from lit_sd.data.caches.latents import floats_of, one_everywhere
from lit_sd.data.examples import Examples
from lit_sd.data.slots import AHEAD, Slots
from lit_sd.types import Batch, Sample


def collate(
    items: Sequence[tuple[Sample, bool]],
    weights: Mapping[str, float],
    pools: Mapping[str, str],
    slots: Slots | None = None,
) -> dict[str, Any]:
    """A batch, its pixels as they were decoded; an example weighs its source's weight over the number of its
    pool's examples in the batch, and padding 0.

    Args:
        items: examples, and whether each is padding.
        weights: of the sources.
        pools: name of the pool that each source belongs to.
        slots: where a worker may have put their pixels.

    Raises:
        ValueError: some of the examples have a control image, others have none.
    """
    samples = [sample for sample, _ in items]
    counted = [pools[sample["source"]] for sample, padding in items if not padding]
    weight = [
        0.0 if padding else weights[sample["source"]] / counted.count(pools[sample["source"]])
        for sample, padding in items
    ]
    batch: dict[str, Any] = {
        "ids": [sample["id"] for sample in samples],
        "source": [sample["source"] for sample in samples],
        "captions": [sample["caption"] for sample in samples],
        "weight": torch.tensor(weight, dtype=torch.float32),
        "original_size": torch.tensor([sample["original_size"] for sample in samples]),
        "crop_top_left": torch.tensor([sample["crop_top_left"] for sample in samples]),
        "target_size": torch.tensor([sample["target_size"] for sample in samples]),
    }
    arrays = arrays_of(samples)
    if slots is not None and "pixels" in arrays:
        placed = slots.placed(arrays["pixels"][0])
        if placed is not None:
            batch["placed"] = placed
            del arrays["pixels"]
    return batch | {name: stack(parts) for name, parts in arrays.items()}


def arrays_of(samples: Sequence[Sample]) -> dict[str, list[np.ndarray]]:
    """Pixels or moments, masks and control images of the examples of a batch."""
    columns: dict[str, list[Any]] = {
        name: [sample[name] for sample in samples if name in sample]
        for name in ("pixels", "moments", "mask", "control")
    }
    if columns["mask"]:
        whole = one_everywhere(columns["mask"][0])  # what has no mask counts in full
        columns["mask"] = [sample.get("mask", whole) for sample in samples]
    if 0 < len(columns["control"]) < len(samples):
        without = next(sample["id"] for sample in samples if "control" not in sample)
        raise ValueError(f"{without} has no control image, but others of its batch have; give all one")
    return {name: parts for name, parts in columns.items() if parts}


def stack(arrays: Sequence[np.ndarray]) -> Tensor:
    """A tensor of equal arrays; of those that lie side by side no copy is made."""
    whole = arrays[0].base
    shape = (len(arrays), *arrays[0].shape)
    if whole is None or whole.shape != shape or not all(array.base is whole for array in arrays):
        whole = np.stack(arrays)
    return torch.from_numpy(whole)


def to_floats(batch: dict[str, Any]) -> Batch:
    """The batch as `lit_sd.types.Batch` has it: `b h w c` in bytes becomes `b c h w` in floats, on the device
    where the bytes are; and what came out of a cache becomes the floats that it stands for.
    """
    made = dict(batch)
    for name in ("pixels", "mask", "control", "moments"):
        if name in batch and batch[name].dtype == torch.uint8:
            made[name] = batch[name].permute(0, 3, 1, 2).float().contiguous() / 255
        elif name in batch:
            made[name] = floats_of(batch[name])
    if "pixels" in batch:
        made["pixels"] = made["pixels"] * 2 - 1
    return made  # type: ignore[return-value]


class ResumableLoader(DataLoader):
    """A loader whose position the DataModule keeps; this tells Lightning that it can resume."""

    def __iter__(self) -> Any:
        slots = getattr(self.dataset, "slots", None)
        if slots is None:
            return super().__iter__()
        slots.begin()
        return map(partial(slots.take, pin=self.pin_memory), super().__iter__())

    def state_dict(self) -> dict[str, Any]:
        """Empty: see `lit_sd.data.datamodule.SDDataModule.state_dict`."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Nothing to do: see `lit_sd.data.datamodule.SDDataModule.state_dict`."""


def load_batches(
    examples: Examples,
    sampler: MixedBatchSampler | OrderedBatchSampler,
    weights: Mapping[str, float],
    pools: Mapping[str, str],
    *,
    num_workers: int,
    seed: int,
) -> ResumableLoader:
    """The loader of the sampler's batches; see `collate` for `weights` and `pools`."""
    if examples.latents is not None:
        num_workers = 0  # taking a batch of latents from a worker costs as much as reading it
    if num_workers:
        images, (height, width) = sampler.largest()
        examples.slots = Slots.where_they_fit(num_workers, images * height * width * 3)
    keep_freed_memory()
    own_stream = torch.Generator().manual_seed(seed)  # else each epoch takes from the global one
    return ResumableLoader(
        examples,
        batch_sampler=sampler,
        collate_fn=partial(collate, weights=weights, pools=pools, slots=examples.slots),
        num_workers=num_workers,
        persistent_workers=num_workers > 0,
        prefetch_factor=AHEAD if num_workers else None,
        worker_init_fn=start_worker,
        pin_memory=torch.cuda.is_available(),
        generator=own_stream,
    )


def start_worker(number: int) -> None:
    """Makes a worker ready: the memory of a decoded picture serves the next one."""
    keep_freed_memory()
