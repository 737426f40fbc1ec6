"""The console script `lit-sd`: what one does with a run once it has trained."""

from pathlib import Path
from typing import Annotated

import typer

app = typer.Typer(add_completion=False, no_args_is_help=True, pretty_exceptions_enable=False)


@app.callback()
def main() -> None:
    """Stable Diffusion, fine-tuned with Lightning. Training is `python train.py`; this is for afterwards."""


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
