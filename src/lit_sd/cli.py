"""The console script `lit-sd`: what one does with data before a run, and with the run once it has trained."""

import shlex
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from lit_sd.prepare.settings import RULES

if TYPE_CHECKING:
    from lit_sd.prepare.program import Request
    from lit_sd.prepare.settings import Settings

app = typer.Typer(add_completion=False, no_args_is_help=True, pretty_exceptions_enable=False)


@app.callback()
def main() -> None:
    """Stable Diffusion, fine-tuned with Lightning. Training is `python train.py`; this is for what
    comes before it and after.
    """


@app.command()
def generate(
    run: Annotated[Path, typer.Option(help="Folder of a run, or a checkpoint.", exists=True)],
    prompt: Annotated[list[str], typer.Option(help="What to draw; give it several times for several.")],
    negative: Annotated[str, typer.Option(help="What to steer away from.")] = "",
    seed: Annotated[int, typer.Option(help="Of the first picture; the next ones count up.", min=0)] = 0,
    steps: Annotated[
        int | None, typer.Option(help="Of the sampler; by default as the run drew.", min=1)
    ] = None,
    guidance: Annotated[float | None, typer.Option(help="1 is none; by default as the run drew.")] = None,
    count: Annotated[int, typer.Option(help="Pictures of each prompt.", min=1)] = 1,
    out: Annotated[
        Path | None,
        typer.Option(help="Folder for the pictures; by default RUN/generated.", file_okay=False),
    ] = None,
    height: Annotated[int | None, typer.Option(help="In pixels; by default the model's own.", min=8)] = None,
    width: Annotated[int | None, typer.Option(help="In pixels; by default the model's own.", min=8)] = None,
    batch_size: Annotated[int, typer.Option(help="Pictures drawn at once.", min=1)] = 4,
    model: Annotated[str | None, typer.Option(help="Where the base model lies now, if it has moved.")] = None,
    raw: Annotated[
        bool, typer.Option("--raw", help="The last weights, not their average, where the run kept one.")
    ] = False,
    trust: Annotated[
        bool, typer.Option("--trust", help="Let the run's config call code outside this project.")
    ] = False,
) -> None:
    """Draw pictures with a run's model, from its checkpoint alone."""
    from lit_sd.config import ConfigError
    from lit_sd.evaluation import draw_from_run  # imports torch, so not for --help

    options = {"negative": negative, "steps": steps, "guidance": guidance, "height": height, "width": width}
    given = {name: value for name, value in options.items() if value is not None} | {"batch_size": batch_size}
    seeds = range(seed, seed + count)
    try:
        paths = draw_from_run(run, prompt, seeds, given, out, model=model, averaged=not raw, trust=trust)
    except (FileNotFoundError, ValueError) as error:
        said = "; ".join(error.faults) if isinstance(error, ConfigError) else error
        typer.echo(f"lit-sd generate: {said}", err=True)
        raise typer.Exit(2) from error
    for path in paths:
        typer.echo(path)


def judging(text: str, **more: Any) -> Any:
    """An option of the rules."""
    return typer.Option(help=text, rich_help_panel="Rules", **more)


def captions(text: str) -> Any:
    """An option of captions and weights."""
    return typer.Option(help=text, rich_help_panel="Captions and weights")


def reading(*names: str, text: str, **more: Any) -> Any:
    """An option of how the data is read."""
    return typer.Option(*names, help=text, rich_help_panel="Reading", **more)


Data = Annotated[str, typer.Argument(help="Folder, packed data, shards, URL, or with --from hub a name.")]
Kind = Annotated[
    str | None, reading("--from", text="folder, lmdb, webdataset or hub; by default what lies there.")
]
Read = Annotated[
    list[str] | None,
    reading("--read", text="NAME=VALUE, an option of the reader, like caption_column=label; repeatable."),
]
MaskRoot = Annotated[
    str | None, reading(text="Of a folder: another one, of masks with the images' names; it may lie in DATA.")
]
ControlRoot = Annotated[str | None, reading(text="Likewise of control images.")]
RepeatFolders = Annotated[
    bool, reading("--repeat-folders", text="Of a folder: images in a subfolder like 10_cat weigh 10.")
]
Storage = Annotated[
    str | None, reading(text="Of fsspec's file systems, for shards elsewhere: JSON like '{\"anon\": true}'.")
]
Val = Annotated[str | None, judging("Rule leak: validation data; what it repeats is refused.")]
Off = Annotated[
    list[str] | None, judging(f"A rule that is not to judge; repeatable. There is {', '.join(RULES)}.")
]
MinSide = Annotated[int, judging("Rule too_small: pixels of the smaller side.")]
MaxAspect = Annotated[float, judging("Rule extreme_aspect: longer side over the shorter.")]
MinDeviation = Annotated[float, judging("Rule blank: levels of 255 by which pixels deviate.")]
MinCharacters = Annotated[int, judging("Rule caption_short, in bytes of UTF-8.")]
MinWords = Annotated[int, judging("Rule caption_short.")]
MinEntropy = Annotated[
    float, judging("Rule caption_repetitive: of the words, as a share of what different ones have.")
]
MaxTokens = Annotated[int | None, judging("Rule caption_long, which is off without it; CLIP reads 77.")]
Near = Annotated[int, judging("Rule near_duplicate: bits of 64 by which the hashes differ at most.")]
NearColour = Annotated[
    float, judging("And levels of 255 by which the colours do, on average; 255 looks at none.")
]
Normalise = Annotated[bool, captions("Repair and tidy captions: encodings, NFC, spaces, stray separators.")]
Tags = Annotated[str, captions("How captions fall into tags: comma, words, or auto.")]
Balance = Annotated[float, captions("Draw rare tags more often: 0 is off, 0.5 usual, 1 draws all alike.")]
BalanceMax = Annotated[float, captions("The largest weight; the mean is 1.")]
Emphasis = Annotated[
    str | None, captions("Template of the captions, like '{caption}, {rare}': the rarest tag.")
]
SpotCheck = Annotated[int, typer.Option(help="Make a page on which a person judges so many examples.")]
Answers = Annotated[Path | None, typer.Option(help="What that page saved; it counts more than the rules.")]
Workers = Annotated[
    int | None, typer.Option(help="Processes that read; by default one for each core.", min=0)
]
Work = Annotated[Path | None, typer.Option(help="Folder of the reports and of what was scanned.")]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Scan, decide and report only.")]
Overwrite = Annotated[bool, typer.Option("--overwrite", help="Replace what an earlier run wrote to OUT.")]
CacheWords = Annotated[
    str | None,
    typer.Option(help="Words for train.py, like 'strategy=lora model=sd15': fill that run's cache, too."),
]


@app.command()
def prepare(
    data: Data,
    out: Annotated[Path, typer.Argument(help="Where to write; its reports go to OUT.prepare, beside it.")],
    to: Annotated[str, typer.Option(help="folder, lmdb or webdataset.")],
    kind: Kind = None,
    read: Read = None,
    mask_root: MaskRoot = None,
    control_root: ControlRoot = None,
    repeat_folders: RepeatFolders = False,
    storage_options: Storage = None,
    val: Val = None,
    off: Off = None,
    min_side: MinSide = 256,
    max_aspect: MaxAspect = 3.0,
    min_deviation: MinDeviation = 3.0,
    min_characters: MinCharacters = 3,
    min_words: MinWords = 1,
    min_entropy: MinEntropy = 0.5,
    max_tokens: MaxTokens = None,
    near: Near = 4,
    near_colour: NearColour = 16.0,
    normalise: Normalise = True,
    tags: Tags = "auto",
    balance: Balance = 0.0,
    balance_max: BalanceMax = 10.0,
    emphasis: Emphasis = None,
    spot_check: SpotCheck = 0,
    answers: Answers = None,
    seed: Annotated[int, typer.Option(help="Of the spot check, and of what the report shows.")] = 0,
    workers: Workers = None,
    work: Work = None,
    dry_run: DryRun = False,
    overwrite: Overwrite = False,
    cache: CacheWords = None,
) -> None:
    """Clean data and pack it. Stopped and run again it goes on; other options use the same scan."""
    chosen = {name: value for name, value in locals().items() if value is not None}
    with explained("prepare", resumes=True):
        from lit_sd.prepare.program import prepare as run  # imports torch, so not for --help

        request, settings = asked(chosen, Path(f"{out}.prepare") if work is None else work)
        words = [f"data={to}", f"data.root='{out}'", *shlex.split(cache or "")]
        if cache is not None:
            from lit_sd.filling import checked

            checked(words)  # before hours of work
        run(request, out, to, settings, answers=answers, dry_run=dry_run, overwrite=overwrite, say=typer.echo)
        if cache is not None and not dry_run:
            from lit_sd.filling import fill_from_words

            fill_from_words(words)


def asked(chosen: Mapping[str, Any], work: Path) -> tuple["Request", "Settings"]:
    """What is to be read, and how it is judged, from a command's options."""
    from lit_sd.prepare.program import Request
    from lit_sd.prepare.settings import chosen_settings, reader_options, storage_options

    options = reader_options(chosen.get("read", ()))
    options |= {name: chosen[name] for name in ("mask_root", "control_root") if name in chosen}
    options |= {"repeat_folders": True} if chosen["repeat_folders"] else {}
    request = Request(
        chosen["data"],
        work,
        kind=chosen.get("kind"),
        read=options,
        val=chosen.get("val"),
        storage=storage_options(chosen.get("storage_options")),
        workers=chosen.get("workers"),
    )
    return request, chosen_settings(chosen)


@app.command()
def cache(
    words: Annotated[
        list[str], typer.Argument(help="As for train.py: strategy=lora data.root=images data.resolution=512")
    ],
    shards: Annotated[
        Path | None,
        typer.Option(help="Folder for the latents as webdataset's shards, for machines elsewhere."),
    ] = None,
    prune: Annotated[
        bool, typer.Option("--prune", help="Drop what these words don't ask for; no other run may read it.")
    ] = False,
) -> None:
    """Fill the cache on disk that `train.py` with the same words would fill, and train nothing."""
    with explained("cache", resumes=True):
        from lit_sd.filling import fill_from_words  # imports torch, so not for --help

        fill_from_words(words, shards, prune=prune)


@app.command()
def inspect(
    data: Data,
    kind: Kind = None,
    read: Read = None,
    mask_root: MaskRoot = None,
    control_root: ControlRoot = None,
    repeat_folders: RepeatFolders = False,
    storage_options: Storage = None,
    out: Annotated[
        Path | None, typer.Option(help="Folder of the report; by default NAME.inspect, here.")
    ] = None,
    resolution: Annotated[int, typer.Option(help="Of training, for the buckets.")] = 512,
    bucket_step: Annotated[int, typer.Option(help="Sides of buckets are multiples of it.")] = 64,
    bucket_max_ratio: Annotated[float, typer.Option(help="Of the longest bucket.")] = 2.0,
    off: Off = None,
    min_side: MinSide = 256,
    max_aspect: MaxAspect = 3.0,
    min_deviation: MinDeviation = 3.0,
    min_characters: MinCharacters = 3,
    min_words: MinWords = 1,
    min_entropy: MinEntropy = 0.5,
    max_tokens: MaxTokens = None,
    near: Near = 4,
    near_colour: NearColour = 16.0,
    tags: Tags = "auto",
    workers: Workers = None,
) -> None:
    """Say what is in data: is it complete, what would be refused, which buckets would it train in."""
    chosen = {name: value for name, value in locals().items() if value is not None}
    with explained("inspect", resumes=True):
        from lit_sd.prepare.program import inspect as run

        run(
            *asked(chosen, Path(f"{Path(data).name or 'data'}.inspect") if out is None else out),
            resolution=resolution,
            bucket_step=bucket_step,
            max_ratio=bucket_max_ratio,
            say=typer.echo,
        )


@contextmanager
def explained(command: str, resumes: bool = False) -> Iterator[None]:
    """Ends the command with one line where what was given can't be used, and where it is interrupted."""
    try:
        yield
    except (ValueError, OSError, ImportError) as error:
        typer.echo(f"lit-sd {command}: {' '.join(str(error).split())}", err=True)
        raise typer.Exit(2) from error
    except KeyboardInterrupt as error:
        more = "; run the same command again, and it goes on where it stopped" if resumes else ""
        typer.echo(f"lit-sd {command}: stopped{more}", err=True)
        raise typer.Exit(130) from error
