"""`lit-sd prepare` and `lit-sd inspect` from end to end: each stage goes on where a killed run stopped."""

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, get_args

from lit_sd.prepare.balance import count_tags, weigh
from lit_sd.prepare.database import Database
from lit_sd.prepare.examples import Input
from lit_sd.prepare.pages import LARGE, THUMBNAIL, write_report, write_spot_check
from lit_sd.prepare.progress import progress
from lit_sd.prepare.reading import open_input
from lit_sd.prepare.report import make_report
from lit_sd.prepare.rules import decide
from lit_sd.prepare.samples import Pictures
from lit_sd.prepare.scan import scan
from lit_sd.prepare.settings import Settings
from lit_sd.prepare.shapes import count_shapes
from lit_sd.prepare.spot_check import read_answers
from lit_sd.prepare.writing import Form, count_blank, is_finished, write, write_decisions
from lit_sd.spelling import hint

DATABASE = "facts.sqlite"
Say = Callable[[str], None]


@dataclass(frozen=True)
class Request:
    """What is to be read, and where its list, facts and pages go.

    Attributes:
        data: path, URL or name.
        work: the folder.
        kind: of the data; None looks.
        read: options of the reader.
        val: validation data, of any kind that can be seen from what lies there.
        storage: of fsspec's file systems, for shards that are elsewhere, of both.
        workers: processes; None takes one for each core.
    """

    data: str
    work: Path
    kind: str | None = None
    read: Mapping[str, Any] = field(default_factory=dict)
    val: str | None = None
    storage: Mapping[str, Any] | None = field(default=None, repr=False)  # there may be secrets in it
    workers: int | None = None

    @property
    def processes(self) -> int:
        if self.workers is not None:
            return self.workers
        return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@dataclass(frozen=True)
class Job:
    """A request that is being done.

    Attributes:
        request: what was asked for.
        settings: the rules and what comes of captions and weights.
        database: what is known so far.
        data: the examples.
        val: those of the validation data.
        say: is told what happens.
    """

    request: Request
    settings: Settings
    database: Database
    data: Input
    val: Input | None
    say: Say

    def key(self, *more: str) -> str:
        """Tells what these choices and this data give from what others do."""
        val = "" if self.val is None else self.val.identity()
        return self.settings.key(*more, self.data.identity(), val)


def prepare(
    request: Request,
    out: Path,
    form: str,
    settings: Settings,
    *,
    answers: Path | None = None,
    dry_run: bool = False,
    overwrite: bool = False,
    say: Say = print,
) -> None:
    """Scans, decides, reports and writes.

    Args:
        request: what to read.
        out: where to write.
        form: of `Form`.
        settings: the rules and what comes of captions and weights.
        answers: file of a person's answers from a spot check.
        dry_run: write nothing but the reports.
        overwrite: replace what an earlier run with the same work folder has written to `out`.
        say: is told what happens.

    Raises:
        ValueError: an option is out of its range, or data can't be used.
        OSError: what is needed is not there, or can't be read or written.
        ModuleNotFoundError: an extra isn't installed.
    """
    out = out.expanduser().absolute()
    refuse_form(form)
    refuse_inside(request, out)
    given = {} if answers is None else read_answers(answers)
    with opened(request, settings, say) as job:
        key = job.key(form, str(sorted(given.items())))
        finished = not dry_run and is_finished(job.database, out, key, overwrite)
        if finished and not settings.spot_check:
            say(f"{out} is finished, there is nothing to do; its report is {request.work / 'report.html'}")
            return
        stages(job, given, key)
        pages(job, out.name)
        if dry_run or finished:
            say(f"{out} is finished already" if finished else "a dry run: nothing else is written")
            return
        count = write(job.database, job.data, form, out, settings, key)  # type: ignore[arg-type]
        say(f"{count:,} examples are in {out}")
        if blank := count_blank(job.database, settings):
            say(f"{blank:,} of them have no caption: train with data.missing_captions=empty, or data.prompt")


def inspect(
    request: Request,
    settings: Settings,
    *,
    resolution: int,
    bucket_step: int,
    max_ratio: float,
    say: Say = print,
) -> None:
    """Scans and reports, also on the buckets of aspect-ratio training.

    Args:
        request: what to read; its reports go into the work folder.
        settings: the rules, of which is told what they would refuse.
        resolution: see `lit_sd.prepare.shapes.count_shapes`, also for `bucket_step` and `max_ratio`.
        say: is told what is there.

    Raises:
        ValueError, OSError, ModuleNotFoundError: as `prepare`.
    """
    refuse_inside(request, request.work)
    with opened(request, settings, say) as job:
        stages(job, {}, job.key("inspect"))
        path = request.work / "buckets.jsonl"
        buckets = count_shapes(job.database, resolution, bucket_step, max_ratio, path)
        pages(job, Path(request.data).name or request.data, buckets)


@contextmanager
def opened(request: Request, settings: Settings, say: Say) -> Iterator[Job]:
    """Opens the work folder and the data."""
    work = request.work
    if work.exists() and not work.is_dir():
        raise ValueError(f"{work} is a file; expected the work folder")
    work.mkdir(parents=True, exist_ok=True)
    with Database(work / DATABASE) as database:
        data = open_input(request.data, work, "data", request.kind, request.read, request.storage)
        val = None if request.val is None else open_input(request.val, work, "val", storage=request.storage)
        if request.storage is not None and "webdataset" not in (data.kind, val and val.kind):
            raise ValueError(f"--storage-options are for shards, but {request.data} is read as {data.kind}")
        yield Job(request, settings, database, data, val, say)


def stages(job: Job, answers: Mapping[str, bool], key: str) -> None:
    """Scans what is not scanned yet, and decides, where that was not done by the same choices."""
    database, processes = job.database, job.request.processes
    scan(database, job.data, "data", processes)
    if job.val is None:
        if database.get("val input") is not None:
            database.forget("val")
            database.do("DELETE FROM meta WHERE name = 'val input'")
    else:
        scan(database, job.val, "val", processes)
    if database.get("decided") == key:
        return
    database.put("decided", None)
    with progress("judging", 3) as advance:
        decide(database, job.settings, dict(answers), job.val is not None)
        advance(1)
        count_tags(database, job.settings)
        advance(1)
        if job.settings.balance:
            weigh(database, job.settings)
    database.put("decided", key)


def pages(job: Job, title: str, buckets: list[dict[str, int]] | None = None) -> None:
    """Writes the reports and the page of the spot check, and says what stands in them."""
    database, data, val, settings = job.database, job.data, job.val, job.settings
    work, say = job.request.work, job.say
    write_decisions(database, work / "decisions.jsonl")
    report = make_report(database, data, settings, buckets=buckets)
    write_report(report, database, Pictures(data, val, THUMBNAIL), settings, work, title)
    for line in summary(report):
        say(line)
    say(f"report: {work / 'report.html'}")
    if settings.spot_check:
        page = write_spot_check(database, Pictures(data, val, LARGE), settings, work, title)
        say(f"spot check: open {page}, then run again with --answers answers.json --overwrite")


def summary(report: Mapping[str, Any]) -> list[str]:
    """What the terminal shows of a report."""
    counts = report["counts"]
    complete = {True: ", complete by its manifest", False: ", NOT complete by its manifest", None: ""}
    lines = [
        f"{report['data']['kind']} of {counts['examples']:,} examples{complete[report['data']['complete']]}"
    ]
    lines += [f"  {note}" for note in report["data"]["notes"]]
    lines.append(f"kept {counts['kept']:,}, refused {counts['refused']:,}")
    lines += [
        f"  {rule:18} {told['refused']:>9,}" for rule, told in report["rules"].items() if told["refused"]
    ]
    if counts["captions_dropped"]:
        lines.append(f"{counts['captions_dropped']:,} captions of kept examples are left out")
    if over := report["captions"]["over_limit"]:
        lines.append(
            f"{over:,} captions are longer than 77 tokens, the longest has {report['captions']['longest']}"
        )
    for bucket in (report["buckets"] or [])[:12]:
        lines.append(f"  bucket {bucket['height']}x{bucket['width']}: {bucket['count']:,}")
    return lines


def refuse_form(form: str) -> None:
    """Raises ValueError where there is no such form to write; the message names the nearest."""
    if form not in get_args(Form):
        raise ValueError(f"--to {form}: there is no such form{hint(form, get_args(Form))}")


def refuse_inside(request: Request, out: Path) -> None:
    """Nothing is written into a folder that is read.

    Raises:
        ValueError: `out` or the work folder lies in the data.
    """
    partners = (request.read.get("mask_root"), request.read.get("control_root"))
    for name in (request.data, request.val, *partners):
        root = None if name is None else Path(name).expanduser().absolute()
        if root is None or not root.is_dir():
            continue
        for place in (out, request.work.absolute()):
            if root.resolve() == place.resolve() or root.resolve() in place.resolve().parents:
                raise ValueError(
                    f"{place} lies in {root}, which is read; nothing is written there: choose another"
                )
