"""The console script `lit-sd`: what one does with data before a run, and with the run once it has trained."""

import shlex
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer

from lit_sd.prepare.settings import RULES

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


Data = Annotated[str, typer.Argument(help="Folder, packed data, shards, URL, or with --from hub a name.")]
Kind = Annotated[
    str | None, typer.Option("--from", help="folder, lmdb, webdataset or hub; by default what lies there.")
]
Read = Annotated[
    list[str] | None,
    typer.Option(
        "--read", help="NAME=VALUE, an option of the reader, like caption_column=label; repeatable."
    ),
]
JUDGING, CAPTIONS = "Rules", "Captions and weights"

Off = Annotated[
    list[str] | None,
    typer.Option(
        "--off",
        help=f"A rule that is not to judge; repeatable. There is {', '.join(RULES)}.",
        rich_help_panel=JUDGING,
    ),
]
MinSide = Annotated[
    int, typer.Option(help="Rule too_small: pixels of the smaller side.", rich_help_panel=JUDGING)
]
MaxAspect = Annotated[
    float, typer.Option(help="Rule extreme_aspect: longer side over the shorter.", rich_help_panel=JUDGING)
]
MinDeviation = Annotated[
    float, typer.Option(help="Rule blank: levels of 255 by which pixels deviate.", rich_help_panel=JUDGING)
]
MinCharacters = Annotated[
    int, typer.Option(help="Rule caption_short, in bytes of UTF-8.", rich_help_panel=JUDGING)
]
MinWords = Annotated[int, typer.Option(help="Rule caption_short.", rich_help_panel=JUDGING)]
MinEntropy = Annotated[
    float,
    typer.Option(
        help="Rule caption_repetitive: of the words, as a share of what different ones have.",
        rich_help_panel=JUDGING,
    ),
]
MaxTokens = Annotated[
    int | None,
    typer.Option(help="Rule caption_long, which is off without it; CLIP reads 77.", rich_help_panel=JUDGING),
]
Near = Annotated[
    int,
    typer.Option(
        help="Rule near_duplicate: bits of 64 by which the hashes differ at most.", rich_help_panel=JUDGING
    ),
]
NearColour = Annotated[
    float,
    typer.Option(
        help="And levels of 255 by which the colours do, on average; 255 looks at none.",
        rich_help_panel=JUDGING,
    ),
]
Tags = Annotated[
    str, typer.Option(help="How captions fall into tags: comma, words, or auto.", rich_help_panel=CAPTIONS)
]
Workers = Annotated[
    int | None, typer.Option(help="Processes that read; by default one for each core.", min=0)
]


@app.command()
def prepare(
    data: Data,
    out: Annotated[Path, typer.Argument(help="Where to write; its reports go to OUT.prepare, beside it.")],
    to: Annotated[str, typer.Option(help="folder, lmdb or webdataset.")],
    kind: Kind = None,
    read: Read = None,
    val: Annotated[
        str | None,
        typer.Option(help="Rule leak: validation data; what it repeats is refused.", rich_help_panel=JUDGING),
    ] = None,
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
    normalise: Annotated[
        bool,
        typer.Option(
            help="Repair and tidy captions: encodings, NFC, spaces, stray separators.",
            rich_help_panel=CAPTIONS,
        ),
    ] = True,
    tags: Tags = "auto",
    balance: Annotated[
        float,
        typer.Option(
            help="Draw rare tags more often: 0 is off, 0.5 usual, 1 draws all alike.",
            rich_help_panel=CAPTIONS,
        ),
    ] = 0.0,
    balance_max: Annotated[
        float, typer.Option(help="The largest weight; the mean is 1.", rich_help_panel=CAPTIONS)
    ] = 10.0,
    emphasis: Annotated[
        str | None,
        typer.Option(
            help="Template of the captions, like '{caption}, {rare}': the rarest tag.",
            rich_help_panel=CAPTIONS,
        ),
    ] = None,
    spot_check: Annotated[
        int, typer.Option(help="Make a page on which a person judges so many examples.")
    ] = 0,
    answers: Annotated[
        Path | None, typer.Option(help="What that page saved; it counts more than the rules.")
    ] = None,
    seed: Annotated[int, typer.Option(help="Of the spot check, and of what the report shows.")] = 0,
    workers: Workers = None,
    work: Annotated[Path | None, typer.Option(help="Folder of the reports and of what was scanned.")] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Scan, decide and report only.")] = False,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Replace what an earlier run wrote to OUT.")
    ] = False,
    cache: Annotated[
        str | None,
        typer.Option(help="Words for train.py, like 'strategy=lora model=sd15': fill that run's cache, too."),
    ] = None,
) -> None:
    """Clean data and pack it. Stopped and run again it goes on; other options use the same scan."""
    chosen = {name: value for name, value in locals().items() if value is not None}
    with explained("prepare", resumes=True):
        from lit_sd.prepare.program import Request  # imports torch, so not for --help
        from lit_sd.prepare.program import prepare as run
        from lit_sd.prepare.settings import Settings, chosen_settings, reader_options

        settings: Settings = chosen_settings(chosen)
        folder = Path(f"{out}.prepare") if work is None else work
        request = Request(data, folder, kind, reader_options(read or []), val, workers)
        run(request, out, to, settings, answers=answers, dry_run=dry_run, overwrite=overwrite, say=typer.echo)
        if cache is not None and not dry_run:
            from lit_sd.filling import fill_from_words

            fill_from_words([f"data={to}", f"data.root='{out}'", *shlex.split(cache)])


@app.command()
def cache(
    words: Annotated[
        list[str], typer.Argument(help="As for train.py: strategy=lora data.root=images data.resolution=512")
    ],
    shards: Annotated[
        Path | None,
        typer.Option(help="Folder for the latents as webdataset's shards, for machines elsewhere."),
    ] = None,
) -> None:
    """Fill the cache on disk that `train.py` with the same words would fill, and train nothing."""
    with explained("cache", resumes=True):
        from lit_sd.filling import fill_from_words  # imports torch, so not for --help

        fill_from_words(words, shards)


@app.command()
def inspect(
    data: Data,
    kind: Kind = None,
    read: Read = None,
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
        from lit_sd.prepare.program import Request
        from lit_sd.prepare.program import inspect as run
        from lit_sd.prepare.settings import chosen_settings, reader_options

        folder = Path(f"{Path(data).name or 'data'}.inspect") if out is None else out
        request = Request(data, folder, kind, reader_options(read or []), None, workers)
        run(
            request,
            chosen_settings(chosen),
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
