"""What processes that were killed left behind in a cache on disk."""

import shutil
import time
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

ABANDONED_S = 8 * 24 * 3600
"""Ranks wait for each other for seven days (`lit_sd.together.Together`): what is older is nobody's."""


def sweep(paths: Iterable[Path]) -> None:
    """Deletes those files and folders aside whose writers are no more, told by their age."""
    for path in paths:
        with suppress(FileNotFoundError):  # another process swept it
            if time.time() - path.stat().st_mtime < ABANDONED_S:
                continue
            if path.is_dir():
                shutil.rmtree(path, ignore_errors=True)
            else:
                path.unlink()
