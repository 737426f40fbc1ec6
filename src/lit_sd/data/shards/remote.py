"""Files of object stores and web servers, fetched whole into a folder that a machine's processes share."""

import hashlib
import os
import re
import shutil
import time
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from filelock import FileLock

Options = Mapping[str, Any]
"""What fsspec's file systems take: keys, endpoints, tokens."""

TRIES = 3
BACKOFF_S = 1.0
"""Wait before the second try; it doubles with each further one."""


def is_remote(url: str) -> bool:
    """Whether it has to be fetched: `s3://…`, `https://…`, `pipe:command`, but no path and no `file://…`."""
    return url.startswith("pipe:") or ("://" in url and not url.startswith("file://"))


def local_path(url: str) -> Path:
    """The path of a local file, which may be written as `file://…`."""
    return Path(url.removeprefix("file://")).expanduser().absolute()


_FETCHED = re.compile(r"[0-9a-f]{16}-.")
"""How the names begin that `file_name` gives."""


def file_name(url: str) -> str:
    """A name for the file that a URL or a command gives, which other ones do not get."""
    named = re.findall(r"[^\s/'\"?&=]+\.\w+", url.partition("?")[0]) or ["file"]
    clean = re.sub(r"[^\w.-]", "_", named[-1])[-80:]
    return f"{hashlib.sha256(url.encode()).hexdigest()[:16]}-{clean}"


def list_remote(url: str, ending: str, options: Options | None = None) -> list[str]:
    """URLs of the files below a folder, or that a pattern with `*` matches, that end so; sorted.

    Raises:
        OSError: the store can't be asked; the message names the URL.
        ValueError: there is no such kind of store.
    """
    try:
        system, path = _open_system(url, options)
        found = system.glob(path) if re.search(r"[*\[]", path) else system.find(path)
        urls = sorted(system.unstrip_protocol(name) for name in found)
    except (ImportError, ValueError):
        raise
    except Exception as error:
        raise OSError(f"{url}: its files can't be listed: {error or type(error).__name__}") from error
    return [name for name in urls if name.endswith(ending)]


def lock_in(folder: Path, name: str) -> FileLock:
    """A lock that processes share, for what they change in a folder, which is made. Its file stays: few names
    serve for many files.
    """
    locks = folder / ".locks"
    locks.mkdir(parents=True, exist_ok=True)
    return FileLock(locks / name)


def fetch(url: str, path: Path, options: Options | None = None) -> None:
    """Fetches a file to `path`, unless it is there; several processes may ask at once, and one fetches.

    Args:
        url: what fsspec opens, or `pipe:command`, whose output is the file.
        path: where it appears once it is whole.
        options: of fsspec's file system.

    Raises:
        FileNotFoundError: there is no such file.
        OSError: it could not be fetched in three tries; the message names it.
        ValueError: there is no such kind of store.
    """
    with lock_in(path.parent, hashlib.sha256(path.name.encode()).hexdigest()[:2]):
        if path.exists():
            return
        aside = path.with_name(f".{path.name}.part")
        try:
            _try_download(url, aside, options)
            os.replace(aside, path)
        finally:
            aside.unlink(missing_ok=True)


def _try_download(url: str, aside: Path, options: Options | None) -> None:
    download = partial(_download_pipe, url)
    if not url.startswith("pipe:"):
        download = partial(_download, *_open_system(url, options))
    for attempt in range(TRIES):
        try:
            return download(aside)
        except ImportError:
            raise
        except Exception as error:
            _raise_if_final(url, error)
            if attempt == TRIES - 1:
                raise OSError(
                    f"{url}: could not be fetched in {TRIES} tries: {error or type(error).__name__}; look "
                    "whether the store answers, and start again: what is fetched already is kept"
                ) from error
        time.sleep(BACKOFF_S * 2**attempt)
    return None


def _raise_if_final(url: str, error: Exception) -> None:
    """Raises where a further try gives the same."""
    status = getattr(error, "status", None)  # of an HTTP answer
    if isinstance(error, FileNotFoundError) or status in (404, 410):
        raise FileNotFoundError(f"{url}: there is no such file") from error
    if isinstance(error, PermissionError) or status in (401, 403):
        raise PermissionError(f"{url}: access is denied: {error}") from error


def _download(system: Any, path: str, aside: Path) -> None:
    system.get_file(path, str(aside))
    try:
        told = system.info(path).get("size")
    except Exception:  # some servers tell nothing without a download
        told = None
    got = aside.stat().st_size
    if told is not None and told != got:
        raise OSError(f"{got} bytes came of {told}")


def _download_pipe(url: str, aside: Path) -> None:
    try:
        from webdataset.gopen import gopen
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(f"{url} is run by webdataset: pip install 'lit-sd[data]'") from error
    with open(aside, "wb") as file, gopen(url) as stream:
        shutil.copyfileobj(stream, file, 2**20)


def _open_system(url: str, options: Options | None) -> tuple[Any, str]:
    """A file system, for this process alone, and the file's path in it.

    Raises:
        ValueError: there is no such kind of store.
        ModuleNotFoundError: its library isn't installed.
    """
    try:
        import fsspec
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(f"{url} is read through fsspec: pip install 'lit-sd[data]'") from error
    try:
        return fsspec.core.url_to_fs(url, **dict(options or {}))
    except ImportError as error:
        raise ModuleNotFoundError(f"{url}: {error}") from error
    except ValueError as error:
        raise ValueError(f"{url}: {error}") from error


class FetchedFiles:
    """Remote files, fetched when they are first opened.

    Args:
        folder: where they go.
        limit_gb: GB (10^9 bytes) that the folder may hold; beyond it those go that nobody opened for longest.
            A file that is being read stays readable until it is closed.
        options: of fsspec's file systems.

    Raises:
        ValueError: the limit is not positive.
    """

    def __init__(
        self, folder: Path, *, limit_gb: int | float | None = None, options: Options | None = None
    ) -> None:
        if limit_gb is not None and not limit_gb > 0:
            raise ValueError(f"data.cache_gb={limit_gb}: expected more than 0, or null for no limit")
        self.folder, self.options = folder, options
        self.limit = None if limit_gb is None else int(limit_gb * 1e9)

    def path(self, url: str) -> Path:
        """Where a file is once it is fetched."""
        return self.folder / file_name(url)

    def open(self, url: str) -> int:
        """A descriptor of the file, to be closed by the caller.

        Raises:
            OSError: it can't be fetched.
        """
        path = self.path(url)
        for _ in range(10):
            try:
                descriptor = os.open(path, os.O_RDONLY)
            except FileNotFoundError:
                fetch(url, path, self.options)
                self._make_room(path)
                continue
            os.utime(descriptor)  # the time of last use: many disks keep none of their own
            return descriptor
        raise OSError(f"{url}: others push it out of {self.folder} before it is read; raise data.cache_gb")

    def _make_room(self, newest: Path) -> None:
        if self.limit is None:
            return
        with lock_in(self.folder, "room"):
            files = []
            for path in self.folder.iterdir():
                if _FETCHED.match(path.name) and path.is_file():  # others' files are left alone
                    stat = path.stat()
                    files.append((path == newest, stat.st_mtime_ns, stat.st_size, path))
            held = sum(size for _, _, size, _ in files)
            for is_newest, _, size, path in sorted(files):
                if held <= self.limit or is_newest:
                    break
                path.unlink()
                held -= size
