"""How fast data comes: `python benchmarks/data.py loading|latents|draft|planning|prepare`.

Every figure is measured beside what it is compared with, in one run and by turns, since a machine's speed
changes from minute to minute. Pictures are generated once, in a folder that is given back.
"""

import argparse
import io
import multiprocessing
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import numpy as np
import simplejpeg
import torch
from PIL import Image

from lit_sd.allocator import keep_freed_memory
from lit_sd.data.batching import MixedBatchSampler
from lit_sd.data.buckets import Buckets
from lit_sd.data.caches.filling import fill_latents
from lit_sd.data.caches.latent_cache import LatentCache, Request
from lit_sd.data.caches.latents import Recipe
from lit_sd.data.caption_rules import Caption
from lit_sd.data.datamodule import SDDataModule
from lit_sd.data.decoding import decode
from lit_sd.data.folder import FolderSource
from lit_sd.data.folder_writer import FolderWriter
from lit_sd.data.lmdb import LmdbSource, LmdbWriter
from lit_sd.data.loading import to_floats
from lit_sd.data.pools import Pool
from lit_sd.data.shards.index import Entry, ShardIndex, save_index
from lit_sd.data.shards.members import Reading
from lit_sd.data.shards.store import IndexFolder
from lit_sd.data.source import Record, Source
from lit_sd.data.transforms import Size, cover_size, scale_to
from lit_sd.data.webdataset import ShardSource, ShardWriter
from lit_sd.together import Together

SIDE, BATCH = 512, 16


def photograph(seed: int, height: int, width: int, quality: int = 90) -> bytes:
    """A JPEG with slopes, edges and grain, of about the bytes that a photograph has."""
    rng = np.random.default_rng(seed)
    coarse = Image.fromarray(rng.integers(0, 256, (height // 32 + 2, width // 32 + 2, 3), np.uint8))
    pixels = np.asarray(coarse.resize((width, height), Image.Resampling.BICUBIC)).astype(np.int16)
    pixels = pixels + rng.integers(-6, 7, (height, width, 1), np.int16)
    out = io.BytesIO()
    Image.fromarray(pixels.clip(0, 255).astype(np.uint8)).save(out, "JPEG", quality=quality)
    return out.getvalue()


def pack(root: Path, count: int, height: int, width: int) -> dict[str, Source]:
    """The same pictures in all three forms."""
    with (
        FolderWriter(root / "folder") as folder,
        LmdbWriter(root / "lmdb") as lmdb,
        ShardWriter(root / "shards") as shards,
    ):
        for i in range(count):
            caption = Caption(f"picture number {i}")
            record = Record(f"{i:06}.jpg", photograph(i, height, width), ".jpg", (caption,))
            for writer in (folder, lmdb, shards):
                writer.write(record, (height, width))
    return {
        "folder": FolderSource(root / "folder", name="folder"),
        "lmdb": LmdbSource(root / "lmdb", name="lmdb"),
        "webdataset": ShardSource(str(root / "shards"), name="webdataset"),
    }


def with_pillow(paths: list[Path]) -> int:
    """What scripts do without a loader: read, decode, scale, crop, all of it by Pillow."""
    for path in paths:
        with Image.open(io.BytesIO(path.read_bytes())) as image:
            rgb = image.convert("RGB")
            height, width = cover_size((rgb.height, rgb.width), (SIDE, SIDE))
            if rgb.size != (width, height):
                rgb = rgb.resize((width, height), Image.Resampling.LANCZOS)
            top, left = (height - SIDE) // 2, (width - SIDE) // 2
            np.asarray(rgb.crop((left, top, left + SIDE, top + SIDE)))
    return len(paths)


def decode_only(paths: list[Path]) -> int:
    """What no loader can do without: the same, where nothing is scaled by the quickest decoder there is."""
    for path in paths:
        data = path.read_bytes()
        height, width, *_ = simplejpeg.decode_jpeg_header(data)
        if cover_size((height, width), (SIDE, SIDE)) == (height, width):
            pixels = simplejpeg.decode_jpeg(data)
            top, left = (height - SIDE) // 2, (width - SIDE) // 2
            np.ascontiguousarray(pixels[top : top + SIDE, left : left + SIDE])
        else:
            with_pillow([path])
    return len(paths)


def rate(images: int, work: Callable[[], object]) -> float:
    """Images per second of some work."""
    start = time.perf_counter()
    work()
    return images / (time.perf_counter() - start)


def epochs(source: Source, workers: int, cache: LatentCache | None = None) -> Iterator[Callable[[], object]]:
    """An endless stream of ways to load one epoch of a source; its workers stay."""
    data = SDDataModule(
        {source.name: source},
        batch_size=BATCH,
        resolution=SIDE,
        flip=False,
        num_workers=workers,
        decoded_mb=0,
        seed=0,
    )
    data.fill_cache = lambda: cache
    data.setup("fit")
    loader = data.train_dataloader()
    take = to_floats if cache is not None else len
    while True:
        yield lambda: [take(batch) for batch in loader]


def loading(args: argparse.Namespace) -> None:
    """Images/s of each form, beside loops that only decode, scale and crop in as many processes: an epoch of
    the one, an epoch of the others, turn by turn; the ratios are the medians of the turns' own.
    """
    keep_freed_memory()  # for the loops too
    with tempfile.TemporaryDirectory() as temporary:
        sources = pack(Path(temporary), args.images, args.height, args.width)
        paths = sorted((Path(temporary) / "folder").rglob("*.jpg"))
        size = sum(path.stat().st_size for path in paths) / len(paths)
        print(f"{len(paths)} JPEGs of {args.height}x{args.width}, {size / 1024:.0f} KiB each, batch {BATCH}")
        print(
            f"{'':12}{'workers':>8}{'images/s':>10}{'decode only':>13}{'ratio':>7}{'Pillow':>9}{'ratio':>7}"
        )
        for workers in args.workers:
            for name, source in sources.items():
                found, *bounds = compare(source, paths, workers, args.turns)
                print(f"{name:12}{workers:8}{statistics.median(found):10.1f}", end="")
                for width, bound in zip((13, 9), bounds, strict=True):
                    ratio = statistics.median(a / b for a, b in zip(found, bound, strict=True))
                    print(f"{statistics.median(bound):{width}.1f}{ratio:7.2f}", end="")
                print(flush=True)


def compare(source: Source, paths: list[Path], workers: int, turns: int) -> list[list[float]]:
    """Images/s of loading, of decoding only and of Pillow's decoding only, by turns; the first one, for
    warming up, is left out.
    """
    run, processes = epochs(source, workers), max(1, workers)
    parts = [paths[i::processes] for i in range(processes)]
    found = []
    with multiprocessing.get_context("fork").Pool(processes, keep_freed_memory) as pool:
        for _ in range(turns + 1):
            turn = [rate(len(paths), next(run))]
            for bound in (decode_only, with_pillow):
                work = partial(pool.map, bound, parts) if workers else partial(bound, paths)
                turn.append(rate(len(paths), work))
            found.append(turn)
    return [list(rates) for rates in zip(*found[1:], strict=True)]


def latents(args: argparse.Namespace) -> None:
    """Images/s of latents from a cache on disk, beside the same folder's images, turn by turn: an epoch of
    images, ten of latents. What is in the latents costs nothing here; that they are read and become floats
    does.
    """
    with tempfile.TemporaryDirectory() as temporary:
        root = Path(temporary)
        source = pack(root, args.images, SIDE, SIDE)["folder"]
        images = epochs(source, 0)
        print(f"{len(source)} JPEGs of {SIDE}x{SIDE}, batch {BATCH}, 0 workers")
        print(f"{'':12}{'latents/s':>10}{'images/s':>10}{'ratio':>7}")
        for dtype in ("float32", "float16"):
            cache = LatentCache(root / dtype, Recipe("benchmark", dtype))
            request = Request(source, [(SIDE, SIDE)], "random", (False,))
            fill_latents(cache, [request], noise_of, Together(), batch=BATCH)
            run = epochs(source, 0, cache)
            turns = []
            for _ in range(args.turns + 1):
                ten = rate(10 * args.images, lambda run=run: [next(run)() for _ in range(10)])
                turns.append((ten, rate(args.images, next(images))))
            found, bound = (list(rates) for rates in zip(*turns[1:], strict=True))
            ratio = statistics.median(a / b for a, b in turns[1:])
            print(f"{dtype:12}{statistics.median(found):10.0f}{statistics.median(bound):10.1f}{ratio:7.1f}")


def noise_of(pictures: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Stands in for a VAE: moments of the right shape."""
    shape = (len(pictures), 4, pictures.shape[1] // 8, pictures.shape[2] // 8)
    return torch.randn(shape), torch.rand(shape)


def draft(args: argparse.Namespace) -> None:
    """What decoding large JPEGs at a fraction of their size gains, and what it changes."""
    print(f"{'pixels':>12}{'whole/s':>10}{'scaled/s':>10}{'gain':>7}{'mean':>7}{'largest difference':>20}")
    for height, width in ((1200, 1600), (2400, 3200), (3000, 4000)):
        data = [photograph(i, height, width) for i in range(4)]
        pixels: dict[bool, list[np.ndarray]] = {}
        rates: dict[bool, list[float]] = {True: [], False: []}
        for _ in range(args.turns):
            for scaled in (True, False):
                pixels[scaled] = []
                work = partial(decode_all, data, (SIDE, SIDE), scaled, pixels[scaled])
                rates[scaled].append(rate(len(data), work))
        away = [
            np.abs(a.astype(int) - b.astype(int)) for a, b in zip(pixels[True], pixels[False], strict=True)
        ]
        whole, scaled_rate = (statistics.median(rates[key]) for key in (False, True))
        print(
            f"{height}x{width:<7}{whole:10.1f}{scaled_rate:10.1f}{scaled_rate / whole:7.2f}"
            f"{np.mean([d.mean() for d in away]):7.2f}{max(d.max() for d in away):20}"
        )


def decode_all(data: list[bytes], target: Size, scaled: bool, into: list[np.ndarray]) -> None:
    """Decodes and scales images, `scaled` by decoding them at a fraction of their size."""
    for encoded in data:
        image = decode(encoded, "", target if scaled else None)
        into.append(np.asarray(scale_to(image.image, cover_size(image.size, target))))


class Counted(Source):
    """Shards of which only the number of examples is known, as planning sees them."""

    def __init__(self, shards: int, each: int) -> None:
        super().__init__("counted")
        self.shards, self.each = shards, each

    def check(self) -> None: ...

    def __len__(self) -> int:
        return self.shards * self.each

    def ids(self) -> range:  # type: ignore[override]
        return range(len(self))

    def identity(self) -> str:
        return "counted"

    def sizes(self, start: int = 0, stop: int | None = None) -> np.ndarray:
        return np.full((len(range(len(self))[start:stop]), 2), SIDE, np.int32)

    def record(self, index: int) -> Record:
        raise NotImplementedError

    def blocks(self) -> np.ndarray:
        return np.arange(self.shards + 1) * self.each


def planning(args: argparse.Namespace) -> None:
    """Time and memory of one rank's plan of an epoch, over many shards and ranks: of shards of which only the
    number of examples is known, and with `--indexed` of as many indexed ones, squares and buckets, the first
    time and when it was counted before.
    """
    print(f"{args.shards:,} shards of 1,000 examples, {args.ranks} ranks, of which {args.tried} are tried")
    planned("counts alone", lambda: Counted(args.shards, 1000), args, None)
    if not args.indexed:
        return
    with tempfile.TemporaryDirectory(dir=args.folder) as temporary:
        index_shards(Path(temporary), args.shards)
        buckets = Buckets([512], 64, 2)
        for told, rule in (("squares", None), ("buckets, first", buckets), ("buckets, again", buckets)):
            planned(told, lambda: ShardSource(temporary, name="shards"), args, rule)


def planned(what: str, make: Callable[[], Source], args: argparse.Namespace, buckets: Buckets | None) -> None:
    """Prints what it takes to open a source and to come to the first batch, as some ranks."""
    resource_before = peak_rss()
    start = time.perf_counter()
    source = make()
    source.check()
    pool = Pool("shards", [source], BATCH, buckets=buckets, square=(SIDE, SIDE), shuffle_shards=8)
    opened, slowest = time.perf_counter() - start, 0.0
    for rank in np.linspace(0, args.ranks - 1, args.tried).round().astype(int).tolist():
        start = time.perf_counter()
        sampler = MixedBatchSampler([pool], rank=rank, world_size=args.ranks)
        sampler.set_epoch(rank, len(sampler) // 2)
        next(iter(sampler))
        slowest = max(slowest, time.perf_counter() - start)
    print(
        f"{what:16}{opened:8.2f} s to open and count, {slowest:6.3f} s more from the middle of an epoch to "
        f"its next batch, at most; memory grew by {peak_rss() - resource_before:.0f} MiB",
        flush=True,
    )


def peak_rss() -> float:
    """Peak memory of this process so far, in MiB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def index_shards(folder: Path, shards: int) -> None:
    """Shards that are holes in a disk, with the indexes that real ones would have: a hundred different ones,
    linked again and again.
    """
    rng, rows, size = np.random.default_rng(0), 1000, 10**8
    entry = Entry(rows, rows, 0, False, 0, 0, "", size, None, True, "")
    indexes = IndexFolder(folder / "shard-index", Reading())
    originals = []
    for number in range(100):
        starts = np.cumsum(rng.integers(30_000, 130_000, (rows, 5)).ravel()).reshape(rows, 5)
        spans = np.stack([starts, rng.integers(20_000, 120_000, (rows, 5))], -1)
        sizes = rng.integers(400, 1200, (rows, 2)).astype(np.int32)
        names = [f"{i:09}.jpg" for i in range(rows)]
        ones = np.ones(rows)
        index = ShardIndex(entry, spans, sizes, ones, ones.astype(bool), names, [""] * rows, {}, {})
        originals.append(indexes.path(f"original{number}"))
        save_index(originals[-1], index)
    for number in range(shards):
        with open(folder / f"{number:06}.tar", "wb") as file:
            file.truncate(size)
        indexes.path(f"{number:06}").hardlink_to(originals[number % 100])
    indexes.write_entries({f"{number:06}": entry for number in range(shards)})


def prepare(args: argparse.Namespace) -> None:
    """Images/s and peak memory of `lit-sd prepare` over growing folders."""
    print(f"{'images':>8}{'seconds':>9}{'images/s':>10}{'peak MiB':>10}")
    with tempfile.TemporaryDirectory() as temporary:
        root = Path(temporary)
        for count in args.counts:
            folder = root / f"in{count}"
            folder.mkdir()
            for i in range(count):
                (folder / f"{i:06}.jpg").write_bytes(photograph(i, 288, 320))
                (folder / f"{i:06}.txt").write_text(f"a picture, number {i}, colour {i % 97}")
            command = [sys.executable, "-c", "from lit_sd.cli import app; app()", "prepare", str(folder)]
            command += ["--to", "lmdb", str(root / f"out{count}"), *args.options]
            start = time.perf_counter()
            with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE) as process:
                peak = watch(process)
                said = process.stderr.read().decode() if process.stderr else ""
            if process.returncode:
                raise SystemExit(f"lit-sd prepare failed:\n{said}")
            seconds = time.perf_counter() - start
            print(f"{count:8}{seconds:9.1f}{count / seconds:10.1f}{peak:10.0f}", flush=True)


def watch(process: subprocess.Popen) -> float:
    """Largest sum of a process's and its children's proportional memory, in MiB, until it ends."""
    import psutil

    peak, parent = 0.0, psutil.Process(process.pid)
    while process.poll() is None:
        total = 0
        for one in [parent, *parent.children(recursive=True)]:
            try:
                total += one.memory_full_info().pss
            except psutil.Error:
                continue
        peak = max(peak, total / 2**20)
        time.sleep(0.2)
    return peak


def main() -> None:
    """Reads the command line and measures."""
    parser = argparse.ArgumentParser(description=__doc__)
    kinds = parser.add_subparsers(required=True)
    for work in (loading, latents, draft, planning, prepare):
        kind = kinds.add_parser(work.__name__, help=work.__doc__)
        kind.set_defaults(work=work)
        kind.add_argument("--turns", type=int, default=9)
        if work in (loading, latents):
            kind.add_argument("--images", type=int, default=512)
        if work is loading:
            kind.add_argument("--height", type=int, default=512)
            kind.add_argument("--width", type=int, default=512)
            kind.add_argument("--workers", type=int, nargs="+", default=[0, 1, 2])
        if work is planning:
            kind.add_argument("--shards", type=int, default=100_000)
            kind.add_argument("--ranks", type=int, default=1024)
            kind.add_argument("--tried", type=int, default=16)
            kind.add_argument("--indexed", action="store_true")
            kind.add_argument("--folder", help="where the shards go; none of them takes room")
        if work is prepare:
            kind.add_argument("--counts", type=int, nargs="+", default=[1000, 10_000, 50_000])
            kind.add_argument("--options", nargs="*", default=[])
    args = parser.parse_args()
    args.work(args)


if __name__ == "__main__":
    main()
