"""From the members of a tar to examples: which files belong together, and what each of them is.

The layout is webdataset's: files with one key, the path up to the first dot of the file's name, are one
example. `KEY.jpg` (or another image), `KEY.txt` and `KEY.json` are what img2dataset writes; `KEY.mask.png`
and `KEY.control.png` are an image's mask and control image.
"""

import hashlib
import os
import re
import tarfile
from dataclasses import dataclass, field
from functools import lru_cache
from typing import BinaryIO, NamedTuple

from PIL import UnidentifiedImageError

from lit_sd.data.decoding import ImageFacts, inspect_bytes
from lit_sd.data.folder import EXTENSIONS
from lit_sd.data.shards.texts import captions_of, is_ours, parse_json, weight_of

ROLES = ("image", "text", "json", "mask", "control")
HEAD = 2**16
"""Bytes of a JPEG that hold its size, but for very few."""
BLOCK = 512
"""Bytes of a tar header, which stands right before what it tells of."""


class Span(NamedTuple):
    """Where a file lies in its shard."""

    start: int
    size: int


@dataclass(frozen=True)
class Reading:
    """How shards are read, as far as their index depends on it.

    Attributes:
        caption_key: suffix of the caption's file or key of it in the JSON; None takes `.txt`, `.caption`, or
            the usual keys.
        image_ext: what follows the key in the image's name, where an example has several.
        verify: decode each image once.
    """

    caption_key: str | None = None
    image_ext: str | None = None
    verify: bool = True

    @property
    def tag(self) -> str:
        """Part of the names of files that depend on it."""
        if self.caption_key is None and self.image_ext is None:
            return ""
        return "-" + hashlib.sha256(repr((self.caption_key, self.image_ext)).encode()).hexdigest()[:8]


class Row(NamedTuple):
    """An example, while its shard is indexed."""

    name: str
    id: str
    spans: list[tuple[int, int]]
    size: tuple[int, int]
    weight: float
    captioned: bool
    alpha: bool


@dataclass
class Group:
    """The files of one key, by what follows it; `fault` says why they are no example."""

    files: dict[str, tuple[str, Span]] = field(default_factory=dict)
    fault: str = ""
    scattered: bool = False


class Members(NamedTuple):
    """What a tar holds, and why it holds no more: "" where it ends as it should."""

    groups: dict[str, Group]
    broken: str


def split_name(path: str) -> tuple[str, str] | None:
    """(key, what follows the first dot, in lower case) of a member; None for hidden files and the like."""
    match = re.match(r"^((?:.*/|)[^./][^./]*)[.]([^/]*)$", path)
    if match is None or re.match(r"__[^/]*__($|/)|__MACOSX/", path):
        return None
    return match[1], match[2].lower()


def read_members(file: BinaryIO, size: int) -> Members:
    """The files of a tar by key, in the order of each key's first one.

    Args:
        file: the tar, which may be cut off.
        size: its bytes.
    """
    groups: dict[str, Group] = {}
    last = None
    end = 0
    try:
        with tarfile.open(fileobj=file, mode="r:") as tar:
            try:
                for member in tar:
                    end = member.offset
                    name = split_name(member.name) if member.isreg() else None
                    if name is not None:
                        _add(groups, name, member, size, last)
                        last = name[0]
                end = tar.offset
                file.seek(end)
                whole = file.read(BLOCK) == bytes(BLOCK)
            except (tarfile.TarError, ValueError, LookupError):
                whole = False
    except tarfile.TarError:
        return Members({}, "it is no tar file")
    if whole:
        return Members(groups, "")
    if last is not None:
        groups[last].fault = groups[last].fault or "the shard is cut off or damaged here"
    return Members(groups, f"it is cut off or damaged at byte {min(end, size)} of {size}")


def _add(
    groups: dict[str, Group], name: tuple[str, str], member: tarfile.TarInfo, size: int, last: str | None
) -> None:
    key, ext = name
    group = groups.setdefault(key, Group())
    group.scattered |= bool(group.files) and last != key
    if ext in group.files:
        group.fault = f"its .{ext} is there twice"
    if member.offset_data + member.size > size:
        group.fault = f"its .{ext} is cut off"
    group.files[ext] = (member.name, Span(member.offset_data, member.size))


def is_image(ext: str) -> bool:
    """Whether what follows a key names an image."""
    return f".{ext.rpartition('.')[2]}" in EXTENSIONS


def find_roles(group: Group, reading: Reading) -> tuple[str, dict[str, Span]] | None:
    """Name of an example's image and where its files lie, by role; None where the files are of no concern.

    Raises:
        ValueError: there is no image, or no telling which one it is.
    """
    if group.fault:
        raise ValueError(group.fault)
    files = group.files
    parts = {
        role: next((e for e in files if e.split(".")[0] == role and "." in e and is_image(e)), None)
        for role in ("mask", "control")
    }
    images = [ext for ext in files if is_image(ext) and ext not in parts.values()]
    if reading.image_ext is not None:
        images = [ext for ext in files if ext == reading.image_ext.lower().removeprefix(".")]
    images = [ext for ext in images if "." not in ext] or images
    texts = ("txt", "caption") if reading.caption_key is None else (reading.caption_key.lower(),)
    text = next((ext for ext in texts if ext in files), None)
    parts |= {"text": text, "json": "json" if "json" in files else None}
    if not images:
        if not any(parts.values()):
            return None
        raise ValueError(f"it has no image, only {', '.join('.' + ext for ext in files)}")
    if len(images) > 1:
        raise ValueError(
            f"it has {len(images)} images, {', '.join('.' + ext for ext in images)}; "
            f"set data.image_ext={images[0]}"
        )
    name, span = files[images[0]]
    return name, {"image": span} | {role: files[ext][1] for role, ext in parts.items() if ext is not None}


def read_example(descriptor: int, group: Group, reading: Reading) -> Row | None:
    """What set-up has to know of an example; None where its files are of no concern.

    Args:
        descriptor: of the open tar.
        group: the example's files.
        reading: how.

    Raises:
        ValueError: it can't be used; the message says why.
    """
    found = find_roles(group, reading)
    if found is None:
        return None
    name, spans = found
    if not _is_text(name):
        raise ValueError("its name is not UTF-8 text")

    def read(role: str) -> bytes | None:
        return os.pread(descriptor, spans[role].size, spans[role].start) if role in spans else None

    packed = read("json")
    content = None if packed is None else parse_json(packed)
    captions = captions_of(read("text"), content, reading.caption_key)
    ident = content["id"] if content is not None and is_ours(content) else ""
    if not isinstance(ident, str) or not _is_text(ident):
        raise ValueError(f"its id is {ident!r}; expected a string")
    facts = _facts(descriptor, spans["image"], reading.verify)
    if reading.verify:
        for role in ("mask", "control"):
            if (partner := read(role)) is not None:
                _inspect(partner, True, f"its {role}: ")
    where = [(spans[role].start, spans[role].size) if role in spans else (-1, -1) for role in ROLES]
    return Row(name, ident, where, facts.size, weight_of(content), bool(captions), facts.alpha)


def _is_text(name: str) -> bool:
    try:
        name.encode()
    except UnicodeEncodeError:
        return False
    return "\0" not in name


def _facts(descriptor: int, span: Span, verify: bool) -> ImageFacts:
    head = os.pread(descriptor, span.size if verify else min(span.size, HEAD), span.start)
    if len(head) < span.size:
        if head[:2] == b"\xff\xd8":  # a JPEG, whose first bytes tell all
            try:
                return _inspect(head, False)
            except ValueError:  # but for a few
                pass
        head = os.pread(descriptor, span.size, span.start)
    return _inspect(head, verify)


def _inspect(data: bytes, verify: bool, what: str = "") -> ImageFacts:
    """Facts of an image. Raises ValueError, whatever is wrong with it."""
    try:
        return inspect_bytes(data, verify)
    except UnidentifiedImageError as error:
        raise ValueError(f"{what}its content is no image") from error
    except Exception as error:
        raise ValueError(f"{what}{error or type(error).__name__}") from error


@lru_cache(64)  # an example asks several times
def name_of(path: str) -> tuple[str, str]:
    """(key, suffix with its dot in lower case) of an image's member."""
    split = split_name(path)
    assert split is not None
    return split[0], os.path.splitext(path)[1].lower()
