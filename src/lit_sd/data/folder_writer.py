"""Writes examples as an image folder that `lit_sd.data.folder.FolderSource` reads back as they were."""

import hashlib
import io
import itertools
import json
import os
import posixpath
import re
import unicodedata
from pathlib import Path
from types import TracebackType
from typing import Any

from PIL import Image

from lit_sd.data.captions import COLUMNS, PARTNERS, SIDECARS
from lit_sd.data.folder import EXTENSIONS
from lit_sd.data.source import Record
from lit_sd.data.transforms import Size

TABLE = "metadata.jsonl"
LOGS = {False: ".written.jsonl", True: ".written-beside.jsonl"}
"""What was written so far, by `caption_files`; hidden, so that no reader takes it for the table."""

FOLDERS = {"mask": "masks", "control": "controls"}
LONGEST = 150
"""Bytes of a name; file systems take 255, and more may be put behind."""

_RESERVED = {"file_name", "id", "weight", *PARTNERS, *COLUMNS}
_UNSAFE = re.compile(r'[\x00-\x1f\x7f<>:"|?*\\]')
_DEVICE = re.compile(r"(con|prn|aux|nul|com\d|lpt\d)(\..*)?", re.IGNORECASE)


class FolderWriter:
    """An image folder in the making: `OUT.partial`, which becomes `OUT` when it is closed.

    Each image lies under its id as path, with an extension where the id has none. Ids that would lead out of
    the folder, would be hidden, or differ from another only by upper case get another path. `metadata.jsonl`
    says the rest: captions, weights, masks, control images, and the id where it isn't the path.

    Attributes:
        written: examples that an earlier, killed writer left; go on after these.
    """

    def __init__(self, out: Path, *, resume: bool = False, caption_files: bool = False) -> None:
        """
        Args:
            out: the folder to be.
            resume: go on with what an earlier writer left of it; there need not be any.
            caption_files: captions go into `.txt` files beside the images, one in a line; the table holds
                only what these can't.

        Raises:
            FileExistsError: the folder is there; or an unfinished one is, and it isn't to be resumed, or was
                begun with another `caption_files`.
        """
        self.out, self.caption_files = Path(out).expanduser().absolute(), caption_files
        self.partial = self.out.with_name(f"{self.out.name}.partial")
        self.written = 0
        self._taken: set[int] = set()
        if self.out.exists() and not (self.out.is_dir() and not any(self.out.iterdir())):
            raise FileExistsError(f"{self.out} is there already; remove it, or give another name")
        if self.partial.exists() and not resume:
            raise FileExistsError(f"{self.partial} is there, unfinished; resume it, or remove it")
        if (self.partial / LOGS[not caption_files]).exists():
            raise FileExistsError(
                f"{self.partial} was begun with caption_files={not caption_files}; resume it so, or remove it"
            )
        self.partial.mkdir(parents=True, exist_ok=True)
        self._log_path = self.partial / LOGS[caption_files]
        self._log = self._log_path.open("ab+")
        self._take(TABLE)
        self._go_on()

    def write(self, record: Record, size: Size) -> None:
        """Adds an example; `size` is in the image's own header."""
        stem, extension = posixpath.splitext(record.id)
        if extension.lower() not in EXTENSIONS:
            known = record.suffix.lower() in EXTENSIONS
            stem, extension = record.id, record.suffix if known else _suffix_of(record.image)
        path = self._claim(stem, extension, record.id)
        row: dict[str, Any] = {"file_name": path, "text": _plain_captions(record)}
        if path != record.id:
            row["id"] = record.id
        if record.weight != 1:
            row["weight"] = record.weight
        self._put(path, record.image)
        for kind, data in (("mask", record.mask), ("control", record.control)):
            if data is not None:
                partner = f"{FOLDERS[kind]}/{posixpath.splitext(path)[0]}"
                row[kind] = self._claim(partner, _suffix_of(data), record.id)
                self._put(row[kind], data)
        row |= {key: value for key, value in record.extra.items() if key not in _RESERVED}
        if self.caption_files and record.captions:
            lines = "".join(f"{' '.join(caption.text.split())}\n" for caption in record.captions)
            self._put(posixpath.splitext(path)[0] + SIDECARS[0], lines.encode("utf-8", "replace"))
        self._log.write(_line(row))  # last: what has a line is whole
        self._log.flush()

    def close(self) -> None:
        """Writes the table and gives the folder its name; later calls do nothing."""
        if self._log.closed:
            return
        os.fsync(self._log.fileno())
        self._log.close()
        self._write_table()
        if self.out.is_dir():
            self.out.rmdir()  # it is empty, as was seen at the start
        self.partial.rename(self.out)
        (self.out / self._log_path.name).unlink()

    def __enter__(self) -> "FolderWriter":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            self.close()
        self._log.close()

    def _go_on(self) -> None:
        """Counts the examples that are whole, and cuts the log off behind them."""
        self._log.seek(0)
        end = 0
        for line in self._log:
            try:
                row = json.loads(line) if line.endswith(b"\n") else {}
            except ValueError:
                break
            files = [row[key] for key in ("file_name", *PARTNERS) if key in row]
            if not files or not all(self._is_whole(name) for name in files):
                break
            for name in files:
                self._take(name)
            self.written += 1
            end += len(line)
        self._log.truncate(end)
        self._log.seek(end)

    def _is_whole(self, name: str) -> bool:
        try:
            return (self.partial / name).stat().st_size > 0
        except OSError:
            return False

    def _write_table(self) -> None:
        aside = self.partial / f".{TABLE}.tmp"
        empty = True
        with self._log_path.open("rb") as log, aside.open("wb") as table:
            for line in log:
                if self.caption_files:
                    row = json.loads(line)
                    if not isinstance(row["text"], list):
                        row["text"] = None
                    if row["text"] is None and len(row) == 2:
                        continue
                    line = _line(row)
                table.write(line)
                empty = False
            table.flush()
            os.fsync(table.fileno())
        if empty:
            aside.unlink()
        else:
            aside.replace(self.partial / TABLE)

    def _put(self, name: str, data: bytes) -> None:
        path = self.partial / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)

    def _claim(self, stem: str, extension: str, id: str) -> str:
        """A path of this name that no other file has, whatever the case of its letters."""
        path = safe_path(stem, extension)
        stem = path.removesuffix(extension)
        if any(_key("file", folder) in self._taken for folder in _folders(path)):
            stem = _safe_part(stem.replace("/", "_"))
        digest = hashlib.blake2b(id.encode("utf-8", "replace"), digest_size=4).hexdigest()
        more = (f"{stem}-{digest}{f'-{n}' if n else ''}{extension}" for n in itertools.count())
        path = next(each for each in itertools.chain([path], more) if not self._clashes(each))
        self._take(path)
        return path

    def _clashes(self, path: str) -> bool:
        others = {_key("folder", path), *(_key("file", folder) for folder in _folders(path))}
        return bool(self._taken & (self._own(path) | others))

    def _take(self, path: str) -> None:
        self._taken |= self._own(path) | {_key("folder", folder) for folder in _folders(path)}

    def _own(self, path: str) -> set[int]:
        files = [path, posixpath.splitext(path)[0] + SIDECARS[0]] if self.caption_files else [path]
        return {_key("file", name) for name in files}


def safe_path(stem: str, extension: str) -> str:
    """A relative path that any system takes and no reader passes over; as it is given, where that is one."""
    *folders, name = stem.encode("utf-8", "replace").decode().split("/")
    parts = [part for folder in folders if (part := _safe_part(folder))]
    path = "/".join([*parts, (_safe_part(name) or "_") + extension])
    return path if len(path.encode()) < 1000 else path.rpartition("/")[2]


def _safe_part(name: str) -> str:
    name = _UNSAFE.sub("_", name).strip(" .")
    if name == "__MACOSX" or _DEVICE.fullmatch(name):
        name = f"_{name.strip('_')}"
    return name.encode()[:LONGEST].decode("utf-8", "ignore")


def _folders(path: str) -> list[str]:
    parts = path.split("/")
    return ["/".join(parts[:end]) for end in range(1, len(parts))]


def _key(kind: str, path: str) -> int:
    # 64 bits instead of the path: a million files take some 70 MB so; equal ones only cost another name
    folded = unicodedata.normalize("NFC", path).casefold()
    return int.from_bytes(hashlib.blake2b(f"{kind}:{folded}".encode(), digest_size=8).digest())


def _plain_captions(record: Record) -> str | list[dict[str, Any]] | None:
    match record.captions:
        case ():
            return None
        case (only,) if only.weight == 1:
            return only.text
    return [{"text": caption.text, "weight": caption.weight} for caption in record.captions]


def _line(row: dict[str, Any]) -> bytes:
    return json.dumps(row, ensure_ascii=False).encode("utf-8", "replace") + b"\n"


def _suffix_of(data: bytes) -> str:
    try:
        with Image.open(io.BytesIO(data)) as image:
            kind = image.format or ""
    except Exception:  # what can't be read is for the reader to tell
        return ".png"
    suffix = {"JPEG": ".jpg", "MPO": ".jpg", "JPEG2000": ".jp2"}.get(kind, f".{kind.lower()}")
    return suffix if suffix in EXTENSIONS else ".png"
