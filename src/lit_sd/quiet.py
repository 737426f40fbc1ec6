"""Lightning's messages, once each and without those that tell nothing here."""

import logging
import warnings

NOISE = ("Tip:", "`Trainer(limit_", "TPU available")
WARNINGS = (
    "Total length of `list` across ranks is zero",  # there are no validation images; the plan says so
    "The number of training batches",  # an epoch may well be shorter than the logging interval
    r"`isinstance\(treespec, LeafSpec\)` is deprecated",  # Lightning's own call
)


def quieten_lightning() -> None:
    """Messages through the root logger that Hydra sets up, and no longer beside it; calling it again changes
    nothing.
    """
    for name in ("lightning", "lightning.pytorch", "lightning.fabric"):
        logging.getLogger(name).handlers.clear()
    logging.getLogger("lightning.pytorch.trainer.connectors.checkpoint_connector").setLevel(logging.WARNING)
    logging.getLogger("lightning.pytorch.utilities.rank_zero").addFilter(is_news)
    for message in WARNINGS:
        warnings.filterwarnings("ignore", message=message)


def is_news(record: logging.LogRecord) -> bool:
    """Whether a message says something about this run."""
    return not any(word in record.getMessage() for word in NOISE)
