"""Seconds per optimizer step of the trainer, of a bare PyTorch loop, and of diffusers' parts used by hand.

    python benchmarks/step.py openmoji
    python benchmarks/step.py sd15 --rounds 3 --steps 12
    python benchmarks/step.py openmoji --batch-size 64 --allocator --rounds 2

All three train the same network on the same batch with the same precision, clipping and optimizer, each in
a process of its own, one after another, round after round; what is printed are medians over all steps after
the warm-up. Nothing is cached: each step encodes its picture and caption. The trainer reads each picture from
its file, the loops have them in memory. `--cached` adds the trainer and the bare loop with latents and text
states kept. `--allocator` repeats the trainer's runs without keeping freed memory (see `lit_sd.allocator`).
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
SHAPES: dict[str, list[str]] = {
    "openmoji": [
        "model=openmoji",
        "model.init=random",
        "model.architecture=openmoji",
        "strategy=full",
        "data.batch_size=16",
        "data.resolution=128",
    ],
    "sd15": [
        "model=sd15",
        "model.init=random",
        "model.dtype=bfloat16",
        "strategy=lora",
        "adapter.rank=8",
        "data.batch_size=1",
        "data.resolution=256",
    ],
}
KINDS = ("trainer", "bare", "diffusers")


def make_run(shape: str, folder: Path, steps: int, cached: bool, batch_size: int | None) -> Any:
    """The run that `train.py` would make: data, module and trainer, on 32 pictures of noise."""
    import numpy as np
    from hydra import compose, initialize_config_dir
    from PIL import Image

    from lit_sd.run import build
    from lit_sd.settled import settle

    images = folder / "images"
    if not images.exists():
        images.mkdir()
        for i in range(32):
            pixels = np.random.default_rng(i).integers(0, 256, (256, 256, 3), dtype=np.uint8)
            Image.fromarray(pixels).save(images / f"{i}.png")
    overrides = [
        *SHAPES[shape],
        *([f"data.batch_size={batch_size}"] if batch_size else []),
        f"data.root={images}",
        "data.repeats=4",
        "data.prompt='a photo of noise'",
        "data.num_workers=0",
        f"trainer.max_steps={steps}",
        "trainer.accelerator=cpu",
        f"paths.output_dir={folder / 'run'}",
        "callbacks.checkpoint.every_n_steps=0",
        "callbacks.export=null",
        f"data.cache={'memory' if cached else 'off'}",
        "data.cache_mb=1024",
    ]
    with initialize_config_dir(str(ROOT / "conf"), version_base="1.3"):
        return build(settle(compose("train", overrides)))


def time_trainer(run: Any) -> list[float]:
    """Seconds of each step inside `Trainer.fit`, from the end of one batch to the end of the next."""
    from lightning import Callback

    ends = [time.perf_counter()]

    class Clock(Callback):
        def on_train_batch_end(self, *args: Any) -> None:
            ends.append(time.perf_counter())

    run.trainer.callbacks.append(Clock())
    run.trainer.fit(run.module, datamodule=run.datamodule)
    return [after - before for before, after in pairwise(ends)]


def time_loop(run: Any, steps: int, by_hand: bool, cached: bool) -> list[float]:
    """Seconds of each step of a plain loop; `by_hand` with diffusers' scheduler and encoders called
    directly.
    """
    import torch
    import torch.nn.functional as F

    model, module = run.module.model, run.module
    run.datamodule.setup("fit")
    batches = iter(list(run.datamodule.train_dataloader()) * steps)
    trained = [p for p in module.parameters() if p.requires_grad]
    optimizer = module.make_optimizer(trained)
    schedule, scheduler = model.noise_schedule(), model.scheduler
    generator = torch.Generator().manual_seed(0)
    kept: Any = None
    seconds = []
    for _ in range(steps):
        begin = time.perf_counter()
        batch = next(batches)
        with torch.autocast("cpu", torch.bfloat16):
            if kept is None or not cached:
                with torch.no_grad():
                    kept = encode_by_hand(model, batch) if by_hand else encode_bare(model, batch, generator)
            latents, hidden = kept
            noise = torch.randn(latents.shape, generator=generator)
            t = torch.randint(1000, (len(latents),), generator=generator)
            if by_hand:
                noisy = scheduler.add_noise(latents, noise, t)
                velocity = scheduler.config.prediction_type == "v_prediction"
                target = scheduler.get_velocity(latents, noise, t) if velocity else noise
            else:
                abar = schedule.abar[t].float().view(-1, 1, 1, 1)
                noisy = abar.sqrt() * latents + (1 - abar).sqrt() * noise
                target = noise
                if schedule.prediction == "v_prediction":
                    target = abar.sqrt() * noise - (1 - abar).sqrt() * latents
            output = model.unet(noisy.to(model.unet.dtype), t, encoder_hidden_states=hidden).sample
            loss = F.mse_loss(output.float(), target.float())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        seconds.append(time.perf_counter() - begin)
    return seconds


def encode_bare(model: Any, batch: Any, generator: Any) -> tuple[Any, Any]:
    """Latents and text states through the model's own methods."""
    return model.encode_images(batch["pixels"], generator), model.encode_text(batch["captions"]).hidden


def encode_by_hand(model: Any, batch: Any) -> tuple[Any, Any]:
    """Latents and text states as diffusers' example scripts make them."""
    latents = (
        model.vae.encode(batch["pixels"].to(model.vae.dtype)).latent_dist.sample()
        * model.vae.config.scaling_factor
    )
    tokens = model.tokenizer(
        batch["captions"],
        padding="max_length",
        truncation=True,
        max_length=model.tokenizer.model_max_length,
        return_tensors="pt",
    )
    return latents.float(), model.text_encoder(tokens.input_ids)[0]


def worker(args: argparse.Namespace) -> None:
    """One process's measurement, as JSON on its last line."""
    if args.keep_memory:
        from lit_sd.allocator import keep_freed_memory

        keep_freed_memory()
    with tempfile.TemporaryDirectory() as folder:
        run = make_run(args.shape, Path(folder), args.steps, args.worker_cached, args.batch_size)
        if args.worker == "trainer":
            seconds = time_trainer(run)
        else:
            seconds = time_loop(run, args.steps, args.worker == "diffusers", args.worker_cached)
    print(json.dumps(seconds[args.warmup :]))


def measure(args: argparse.Namespace) -> dict[str, list[float]]:
    """All kinds in turn, `rounds` times; seconds per step by kind."""
    variants = [(kind, False, True) for kind in KINDS]
    if args.cached:
        variants += [("trainer", True, True), ("bare", True, True)]
    if args.allocator:
        variants += [("trainer", False, False)]
    found: dict[str, list[float]] = {}
    for _ in range(args.rounds):
        for kind, cached, keep in variants:
            name = kind + (" cached" if cached else "") + ("" if keep else " without kept memory")
            command = [sys.executable, __file__, args.shape, "--worker", kind, "--steps", str(args.steps)]
            command += (
                ["--warmup", str(args.warmup)] + ["--worker-cached"] * cached + ["--keep-memory"] * keep
            )
            env = {k: v for k, v in os.environ.items() if not k.startswith("MALLOC_")}
            command += ["--batch-size", str(args.batch_size)] if args.batch_size else []
            output = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=env)
            if output.returncode:
                raise SystemExit(output.stderr)
            found.setdefault(name, []).extend(json.loads(output.stdout.splitlines()[-1]))
            print(f"{name}: {statistics.median(found[name]):.4f} s so far", flush=True)
    return found


def main() -> None:
    """Parse the command line, measure, and print a table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("shape", choices=SHAPES)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=15)
    parser.add_argument("--warmup", type=int, default=3)
    parser.add_argument("--batch-size", type=int, help="instead of the shape's own")
    parser.add_argument("--cached", action="store_true")
    parser.add_argument("--allocator", action="store_true")
    parser.add_argument("--worker", choices=KINDS, help=argparse.SUPPRESS)
    parser.add_argument("--worker-cached", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--keep-memory", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        worker(args)
        return
    found = measure(args)
    print(f"\n{args.shape}: seconds per step, {len(found['bare'])} steps in {args.rounds} processes each")
    for name, seconds in found.items():
        base = statistics.median(found["bare cached" if "cached" in name else "bare"])
        middle = statistics.median(seconds)
        low, high = min(seconds), max(seconds)
        print(f"  {name:28} {middle:8.4f}   ({low:.4f} to {high:.4f})   {middle / base:6.3f} x bare")


if __name__ == "__main__":
    main()
