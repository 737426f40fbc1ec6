"""The third stage: what is kept streams into a writer, in the order of the data."""

import json
import os
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, Protocol, runtime_checkable

from lit_sd.data.caption_rules import Caption
from lit_sd.data.source import Record
from lit_sd.data.transforms import Size
from lit_sd.prepare.balance import Frequencies, emphasised, weight_of
from lit_sd.prepare.database import Database
from lit_sd.prepare.examples import Input, Unreadable
from lit_sd.prepare.progress import progress
from lit_sd.prepare.settings import Settings

Form = Literal["folder", "lmdb", "webdataset"]
KEPT = "FROM images WHERE key >= 0 AND key NOT IN (SELECT key FROM verdicts)"


@runtime_checkable
class Writer(Protocol):
    """What packs examples; see `lit_sd.data.packed.lmdb_writer.LmdbWriter`."""

    @property
    def written(self) -> int: ...

    def write(self, record: Record, size: Size) -> None: ...

    def __enter__(self) -> "Writer": ...

    def __exit__(self, *exception: Any) -> None: ...


def open_writer(form: Form, out: Path, resume: bool) -> Writer:
    """The writer of a form."""
    match form:
        case "lmdb":
            from lit_sd.data.packed.lmdb_writer import LmdbWriter

            return LmdbWriter(out, resume=resume)
        case "webdataset":
            from lit_sd.data.shards.writer import ShardWriter

            return ShardWriter(out, resume=resume)
    from lit_sd.data.folder_writer import FolderWriter

    return FolderWriter(out, resume=resume)


def is_finished(database: Database, out: Path, key: str, overwrite: bool) -> bool:
    """Whether `out` holds what these choices give.

    Raises:
        FileExistsError: it holds something else, which is not to be overwritten, or not by this.
    """
    if not out.exists() or (out.is_dir() and not any(out.iterdir())):
        return False
    begun = database.get("writing")
    if begun == [key, str(out)]:  # a writer renames its folder last
        return True
    if begun is None or begun[1] != str(out):
        raise FileExistsError(f"{out} is there already, of something else; give another name, or remove it")
    if overwrite:
        return False
    raise FileExistsError(
        f"{out} was made with other options, or of data that has changed since; give another name, or add "
        "--overwrite; what was scanned is used again"
    )


def write(database: Database, data: Input, form: Form, out: Path, settings: Settings, key: str) -> int:
    """Packs what is kept, after what an earlier run with the same choices has packed; how many there are.

    Args:
        database: what was decided.
        data: the examples.
        form: what to write.
        out: where.
        settings: what comes of captions and weights.
        key: tells these choices, and this data, from others.

    Raises:
        ValueError: nothing is kept.
        FileExistsError: `out` is there, or a part of it that other runs left.
        OSError: an example has changed since it was scanned, or can't be written.
    """
    total = database.one(f"SELECT count(*) {KEPT}")
    if not total:
        raise ValueError("no example is kept, so nothing was written; the report says why")
    begun = database.get("writing")
    resume = begun == [key, str(out)]
    partial = out.with_name(f"{out.name}.partial")
    if begun is not None and not resume and begun[1] == str(out):
        database.put("writing", ["removed", str(out)])  # what is half removed is not finished
        for ours in (partial, out):  # of other choices
            if ours.is_dir():
                shutil.rmtree(ours)
    if not resume and partial.exists():
        raise FileExistsError(f"{partial} is there, of another run; remove it, or give another name")
    database.put("writing", [key, str(out)])
    with open_writer(form, out, resume) as writer, progress("writing", total, writer.written) as advance:
        for record, size in kept_records(database, data, settings, writer.written):
            writer.write(record, size)
            advance(1)
    return total


def kept_records(
    database: Database, data: Input, settings: Settings, start: int
) -> Iterator[tuple[Record, Size]]:
    """Kept examples as they are written, with their sizes, from the `start`-th.

    Raises:
        OSError: an example has changed since it was scanned.
    """
    frequencies = Frequencies(database) if settings.emphasis is not None else None
    scale = database.get("weight scale", 1.0)
    rows = database.rows(
        "SELECT key, id, digest, height, width, (SELECT raw FROM weights WHERE weights.key = images.key) "
        f"{KEPT} ORDER BY key LIMIT -1 OFFSET ?",
        (start,),
    )
    for key, name, digest, height, width, raw in rows:
        found = next(iter(data.read(key, key + 1)))
        if isinstance(found, Unreadable) or found.digest != digest:
            why = found.error if isinstance(found, Unreadable) else "its content is another"
            raise OSError(f"{name} has changed since it was scanned ({why}); run again to scan anew")
        weight = found.weight if raw is None else found.weight * weight_of(raw, scale, settings.balance_max)
        captions = kept_captions(database, key, found.captions, settings)
        record = replace(found, captions=captions, weight=weight)
        if frequencies is not None and settings.emphasis is not None:
            record = stress(record, settings.emphasis, frequencies)
        yield record, (height, width)


def kept_captions(
    database: Database, key: int, captions: tuple[Caption, ...], settings: Settings
) -> tuple[Caption, ...]:
    """An example's captions, normalised where that is on, without those that a rule refused."""
    rows = database.all(
        "SELECT k, text FROM captions WHERE key = ?1 AND version IN (?2, 2) "
        "AND k NOT IN (SELECT k FROM faults WHERE key = ?1) ORDER BY k",
        (key, int(settings.normalise)),
    )
    return tuple(Caption(text, captions[k].weight) for k, text in rows)


def count_blank(database: Database, settings: Settings) -> int:
    """Kept examples that are written without a caption."""
    return database.one(
        f"SELECT count(*) {KEPT} AND NOT EXISTS (SELECT 1 FROM captions WHERE captions.key = images.key "
        "AND version IN (?, 2) AND k NOT IN (SELECT k FROM faults WHERE faults.key = images.key))",
        (int(settings.normalise),),
    )


def stress(record: Record, template: str, frequencies: Frequencies) -> Record:
    """The record with its rare tags stressed in its captions; these as they were are in `extra`."""
    stressed = tuple(
        caption._replace(text=emphasised(template, caption.text, frequencies)) for caption in record.captions
    )
    plain = [caption.text for caption in record.captions]
    return replace(record, captions=stressed, extra=record.extra | {"plain_captions": plain})


def write_decisions(database: Database, path: Path) -> None:
    """One line of JSON for each example: what became of it, by which rule, and what else is wrong with it."""
    new = path.with_suffix(".new")
    database.do("CREATE INDEX IF NOT EXISTS findings_key ON findings(key)")
    rows = database.rows(
        "SELECT images.key, id, verdicts.rule, detail, (SELECT json_group_array(rule) FROM findings "
        "WHERE findings.key = images.key AND rule IS NOT verdicts.rule), answers.keep FROM images "
        "LEFT JOIN verdicts USING (key) LEFT JOIN answers USING (key) WHERE images.key >= 0 "
        "ORDER BY images.key"
    )
    with new.open("w", encoding="utf-8") as file:
        for key, name, rule, detail, also, said in rows:
            row = {"index": key, "id": name, "kept": rule is None, "rule": rule}
            told = json.loads(detail or "{}")
            row["detail"] = {name: value for name, value in told.items() if name != "key"}
            row["also"] = json.loads(also)
            if said is not None:
                row["person"] = "keep" if said else "refuse"
            file.write(json.dumps(row, ensure_ascii=False) + "\n")
    os.replace(new, path)
