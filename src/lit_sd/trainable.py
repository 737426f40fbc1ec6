"""What every LightningModule here has in common: only part of it trains, and it must resume bit for bit.

`Trainable` gives optimizer and schedule, checkpoints that hold the trainable tensors alone and load strictly,
the identity of the base they belong to, and random streams that restart with the step. The diffusion module
and the stages that make the shipped base build on it.
"""

import warnings
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch
from jaxtyping import Bool, Float
from lightning import LightningModule
from lightning.pytorch.plugins.precision import MixedPrecision, Precision
from lightning.pytorch.utilities import GradClipAlgorithmType
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from lit_sd.randomness import Draws

Groups = list[dict[str, Any]]
"""Parameter groups as torch's optimizers take them; each with a `name`."""


@dataclass
class StepRecord:
    """What a training step leaves for messages about it. All tensors are detached and may still be in flight.

    Attributes:
        ids: names of the batch's examples.
        losses: loss of each example, ` b`.
        timesteps: timestep of each example, ` b`, where there are any.
        parts: by name (`pixels`, `latents`, ...), whether each example's intermediate result is finite, ` b`,
            to tell where a NaN began. Not the results themselves: many records may wait to be looked at.
    """

    ids: list[str]
    losses: Tensor
    timesteps: Tensor | None
    parts: dict[str, Tensor]


def all_finite(values: Float[Tensor, "b ..."]) -> Bool[Tensor, " b"]:
    """Whether all of each example's values are finite."""
    return values.detach().flatten(1).isfinite().all(1)


class Trainable(LightningModule):
    """A LightningModule of which only the parameters with `requires_grad` train and are saved.

    Args:
        optimizer: `parameter groups -> Optimizer`, usually a partial.
        scheduler: `(optimizer, updates) -> LRScheduler`, stepped once per optimizer update; None for a
            constant rate.
        seed: root of every random stream of the training.

    Attributes:
        draws: the current step's random streams. torch's global generator is seeded from them too at each
            step (dropout uses it), so neither validation nor sampling nor a restart can move what training
            draws.
        record: what the last step left for error messages, or None.
        config: the run's resolved config as plain data, for the checkpoint.
    """

    def __init__(
        self,
        optimizer: Callable[..., Optimizer],
        scheduler: Callable[..., LRScheduler] | None = None,
        seed: int = 0,
    ) -> None:
        super().__init__()
        self.make_optimizer = optimizer
        self.make_scheduler = scheduler
        self.seed = seed
        self.micro_step = 0
        self.draws = Draws(seed, 0, 0)
        self.record: StepRecord | None = None
        self.config: dict[str, Any] | None = None
        # Lightning's strictness asks for frozen tensors too; `on_load_checkpoint` is strict on what trains.
        self.strict_loading = False

    def base_identity(self) -> str | None:
        """Content hash of the frozen weights that a checkpoint belongs to; None where nothing is frozen."""
        return None

    def networks(self) -> Iterable[nn.Module]:
        """What is in training or in evaluation mode as a whole."""
        return self.children()

    def parameter_groups(self) -> Groups:
        """What the optimizer gets: by default one group of all that trains."""
        return [{"name": "all", "params": [p for p in self.parameters() if p.requires_grad]}]

    def configure_optimizers(self) -> Any:
        groups = self.parameter_groups()
        if not any(group["params"] for group in groups):
            raise ValueError(
                "nothing trains: every parameter is frozen. Which adapter was attached, and to what?"
            )
        optimizer = self.make_optimizer(groups)
        if self.make_scheduler is None:
            return optimizer
        scheduler = self.make_scheduler(optimizer, updates=self.trainer.estimated_stepping_batches)
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": scheduler, "interval": "step", "frequency": 1},
        }

    def configure_gradient_clipping(
        self,
        optimizer: Optimizer,
        gradient_clip_val: int | float | None = None,
        gradient_clip_algorithm: str | None = None,
    ) -> None:
        """Clips as Lightning does, also for fused optimizers, which it refuses under any mixed precision.

        Those undo the loss scaling of 16-mixed within their step; for clipping it has to be undone before,
        which the step then sees. bf16-mixed scales nothing.
        """
        plugin = self.trainer.precision_plugin
        if type(plugin) is not MixedPrecision:
            self.clip_gradients(optimizer, gradient_clip_val, gradient_clip_algorithm)
            return
        if gradient_clip_val and plugin.scaler is not None and unscales_itself(optimizer):
            plugin.scaler.unscale_(optimizer)
        algorithm = GradClipAlgorithmType(gradient_clip_algorithm or GradClipAlgorithmType.NORM)
        Precision.clip_gradients(plugin, optimizer, gradient_clip_val or 0.0, algorithm)

    def on_fit_start(self) -> None:
        """Training mode for networks of which something trains, evaluation mode for frozen ones."""
        # Lightning warns of any module in evaluation mode; here the frozen ones are meant to be.
        warnings.filterwarnings("ignore", message=r"Found \d+ module\(s\) in eval mode")
        for network in self.networks():
            network.train(any(p.requires_grad for p in network.parameters()))

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.draws = Draws(self.seed, self.micro_step, self.global_rank)
        torch.manual_seed(self.draws.seed_of("global"))
        self.micro_step += 1
        self._count_epoch()

    def _count_epoch(self) -> None:
        """Lightning does not count the epoch that it enters when it resumes right at the border of two; a
        checkpoint at the next border would then run an epoch too many.
        """
        epochs: Any = self.trainer.fit_loop.epoch_progress
        for count in (epochs.current, epochs.total):
            count.ready = count.started = count.processed + 1

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        full = checkpoint["state_dict"]
        checkpoint["state_dict"] = {name: full[name] for name in trainable_state(self)}
        checkpoint["base"] = self.base_identity()
        checkpoint["random"] = {"seed": self.seed, "micro_step": self.micro_step}
        checkpoint["config"] = plain(self.config)

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Refuses what does not fit exactly; Lightning loads the tensors afterwards.

        Raises:
            ValueError: the checkpoint is of another base model, or its tensors are not those that train here.
        """
        check_base(checkpoint, self.base_identity())
        check_tensors(checkpoint["state_dict"], trainable_state(self))
        random = checkpoint.get("random", {})
        self.micro_step = random.get("micro_step", 0)
        if random.get("seed", self.seed) != self.seed:
            warnings.warn(
                f"resuming a run of seed={random['seed']} with seed={self.seed}: other noise follows",
                stacklevel=2,
            )


def unscales_itself(optimizer: Optimizer) -> bool:
    """Whether the optimizer undoes the loss scaling in its step, as fused ones do; else Lightning has done it
    before the clipping.
    """
    return getattr(optimizer, "_step_supports_amp_scaling", False)


def trainable_state(module: nn.Module) -> dict[str, Tensor]:
    """The tensors that training changes, by their `state_dict` names, as live references.

    These are the parameters with `requires_grad`, and the saved buffers that sit in the same submodule as one
    of them (running statistics).
    """
    owners = [
        prefix
        for prefix, child in module.named_modules()
        if any(p.requires_grad for p in child.parameters(recurse=False))
    ]
    moving = {
        f"{prefix}.{name}" if prefix else name
        for prefix in owners
        for name, _ in module.get_submodule(prefix).named_buffers(recurse=False)
    }
    return {
        name: tensor
        for name, tensor in module.state_dict(keep_vars=True).items()
        if isinstance(tensor, Tensor) and (tensor.requires_grad or name in moving)
    }


def check_base(checkpoint: Mapping[str, Any], identity: str | None) -> None:
    """Raises ValueError where the checkpoint was trained on other frozen weights than `identity`."""
    saved = checkpoint.get("base")
    if saved is not None and identity is not None and saved != identity:
        raise ValueError(
            f"this checkpoint was trained on the base model {saved}, but model.path loaded {identity}. "
            "Point model.path at the base that it was trained on, or start a new run"
        )


def check_tensors(saved: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> None:
    """Strict comparison of names and shapes.

    Raises:
        ValueError: names one missing and one unexpected tensor, or one of another shape.
    """
    missing, unexpected = sorted(expected.keys() - saved.keys()), sorted(saved.keys() - expected.keys())
    if missing or unexpected:
        parts = [
            f"{len(names)} {kind} (such as {names[0]})"
            for kind, names in (("missing", missing), ("unexpected", unexpected))
            if names
        ]
        raise ValueError(
            f"the checkpoint's tensors are not those that train here: {', '.join(parts)}. "
            "Resume with the strategy, adapter and model that it was written with"
        )
    for name, tensor in expected.items():
        if saved[name].shape != tensor.shape:
            raise ValueError(
                f"{name} has shape {tuple(saved[name].shape)} in the checkpoint and {tuple(tensor.shape)} "
                "here. Resume with the adapter settings (such as adapter.rank) that it was written with"
            )


def plain(value: Any, at: str = "config") -> Any:
    """A copy of nested dicts and lists of scalars, which `torch.load(weights_only=True)` reads.

    Raises:
        TypeError: names the place of anything else.
    """
    if value is None or type(value) in (bool, int, float, str):
        return value
    if type(value) is dict:
        return {str(key): plain(item, f"{at}.{key}") for key, item in value.items()}
    if type(value) in (list, tuple):
        return [plain(item, f"{at}[{i}]") for i, item in enumerate(value)]
    raise TypeError(
        f"{at} is a {type(value).__module__}.{type(value).__name__}; a checkpoint's config holds plain data "
        "only. Pass OmegaConf.to_container(config, resolve=True)"
    )


def read_checkpoint(path: str | Path, mapped: bool = False) -> dict[str, Any]:
    """A checkpoint's content on the CPU, read without unpickling anything but tensors and plain data.

    Args:
        path: the file.
        mapped: leave the tensors on disk until they are used.

    Raises:
        ValueError: the file is no checkpoint, or a damaged one, or reading it would run code.
    """
    try:
        checkpoint = torch.load(path, map_location="cpu", weights_only=True, mmap=mapped)
    except (UnpicklingError, RuntimeError, EOFError) as error:
        raise ValueError(
            f"{path} can't be read as a checkpoint: it is another kind of file, or damaged, or holds more "
            "than tensors and plain data. Expected the .ckpt of a run of this project"
        ) from error
    if not isinstance(checkpoint, dict):
        raise ValueError(f"{path} is no checkpoint of a run; expected the .ckpt of a run of this project")
    return checkpoint


def restore(module: Trainable, checkpoint: dict[str, Any], averaged: bool = True) -> None:
    """Load a checkpoint's weights outside of a Trainer, as strictly as one.

    Args:
        module: built from the checkpoint's config.
        checkpoint: what `read_checkpoint` gave.
        averaged: take the averaged weights where the run kept any (`EMA`).

    Raises:
        ValueError: as `Trainable.on_load_checkpoint`.
    """
    module.on_load_checkpoint(checkpoint)
    state = dict(checkpoint["state_dict"])
    if averaged and checkpoint.get("ema"):
        state |= checkpoint["ema"]["average"]
    module.load_state_dict(state, strict=False)
