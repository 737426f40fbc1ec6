"""Loggers that need more than a constructor call."""

import netrc
import os
import socket
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from lightning.pytorch.loggers import WandbLogger
from lightning.pytorch.utilities import rank_zero_info


def wandb(
    save_dir: str | Path,
    *,
    project: str,
    name: str | None,
    offline: bool | None,
    tags: Sequence[str],
    group: str | None,
) -> WandbLogger:
    """A W&B logger with a run of its own, offline where there is no key or no network.

    Args:
        save_dir: where its files go.
        project: W&B's project.
        name: of the run; None for the name of `save_dir`.
        offline: None decides by `WANDB_MODE`, else by the key and the network.
        tags: labels of the run.
        group: name under which runs are shown together.
    """
    mode = mode_of(offline)
    if mode == "offline" and offline is None and not os.environ.get("WANDB_MODE"):
        runs = Path(save_dir) / "wandb" / "offline-run-*"
        rank_zero_info(f"W&B: no key or no network, logging offline; later: wandb sync {runs}")
    _finish_earlier_run()
    Path(save_dir).mkdir(parents=True, exist_ok=True)
    return WandbLogger(
        name=name or Path(save_dir).resolve().name,
        save_dir=save_dir,
        project=project,
        offline=mode == "offline",
        # Lightning says it through the environment, which a library that is set up already no longer reads.
        mode=mode,
        tags=list(tags),
        group=group,
    )


def mode_of(offline: bool | None) -> str:
    """W&B's mode: what the config says, else what `WANDB_MODE` says, else online where that can be."""
    if offline is not None:
        return "offline" if offline else "online"
    asked = os.environ.get("WANDB_MODE")
    if asked:
        return "offline" if asked == "dryrun" else asked  # dryrun: its older name
    return "online" if reachable() else "offline"


def reachable(timeout_s: float = 2.0) -> bool:
    """Whether runs can be sent to W&B at once: a key, and a server that answers."""
    import wandb as library

    settings = library.setup().settings
    server = urlsplit(os.environ.get("WANDB_BASE_URL") or settings.base_url)
    if not (os.environ.get("WANDB_API_KEY") or settings.api_key or _in_netrc(server.hostname or "")):
        return False
    try:
        socket.create_connection((server.hostname or "", server.port or 443), timeout_s).close()
    except OSError:
        return False
    return True


def _in_netrc(host: str) -> bool:
    """Whether `wandb login` left a key for this host."""
    places = [os.environ.get("NETRC"), Path("~/.netrc").expanduser(), Path("~/_netrc").expanduser()]
    for place in places:
        if place and Path(place).is_file():
            try:
                return netrc.netrc(str(place)).authenticators(host) is not None
            except (netrc.NetrcParseError, OSError):
                return False
    return False


def _finish_earlier_run() -> None:
    """The jobs of a sweep share a process, and W&B would go on with the first one's run."""
    library: Any = sys.modules.get("wandb")
    if library is not None and getattr(library, "run", None) is not None:
        library.finish()
