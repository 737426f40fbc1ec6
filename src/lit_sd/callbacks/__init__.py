"""Lightning callbacks; all but `Samples` and `Export` work with any `lit_sd.trainable.Trainable`."""

from lit_sd.callbacks.checkpoint import Checkpoints
from lit_sd.callbacks.checks import GradientCheck, NonFiniteCheck, NonFiniteError
from lit_sd.callbacks.ema import EMA, averaged_weights
from lit_sd.callbacks.export import Export
from lit_sd.callbacks.interrupt import Interrupted, InterruptHandler
from lit_sd.callbacks.plan import Plan
from lit_sd.callbacks.progress import Meters, Progress
from lit_sd.callbacks.samples import Samples

__all__ = [
    "EMA",
    "Checkpoints",
    "Export",
    "GradientCheck",
    "InterruptHandler",
    "Interrupted",
    "Meters",
    "NonFiniteCheck",
    "NonFiniteError",
    "Plan",
    "Progress",
    "Samples",
    "averaged_weights",
]
