"""Two processes on the CPU that fill a cache together."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from tiny_runs import write_images


@pytest.fixture(scope="module")
def done(tiny_model_dir, tmp_path_factory):
    """Folder of three runs of two processes (`two_ranks_caching.py`) over nine pictures."""
    folder = tmp_path_factory.mktemp("ranks")
    root = write_images(folder / "images", 9)
    script = Path(__file__).with_name("two_ranks_caching.py")
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    process = subprocess.Popen(
        [*launch, str(script), str(tiny_model_dir("sd15")), str(root), str(folder)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    try:
        output, _ = process.communicate(timeout=90)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)  # else the ranks outlive their launcher
        raise
    assert process.returncode == 0, output[-4000:]
    return folder


def ranks(folder, name):
    return [torch.load(folder / f"{name}{rank}.pt", weights_only=True) for rank in (0, 1)]


def test_each_encodes_half_and_nothing_twice(done):
    a, b = ranks(done, "first")
    assert (len(a["encoded"]), len(b["encoded"])) == (8, 10)  # both flips of four and of five pictures
    assert len({*a["encoded"], *b["encoded"]}) == 18
    assert (len(a["captions"]), len(b["captions"])) == (5, 5)
    assert len({*a["captions"], *b["captions"]}) == 10


def test_both_read_what_both_wrote(done):
    for name in ("first", "second"):
        assert [(rank["error"], rank["entries"], rank["steps"]) for rank in ranks(done, name)] == [
            ("", 18, 2)
        ] * 2


def test_a_second_run_encodes_nothing(done):
    assert [(rank["encoded"], rank["captions"]) for rank in ranks(done, "second")] == [([], [])] * 2


def test_what_fails_on_one_rank_ends_both_and_loses_nothing(done):
    a, b = ranks(done, "broken")
    assert b["error"].startswith("ValueError: ")
    assert "this rank's VAE broke" in b["error"]
    assert a["error"].startswith("RuntimeError: filling the cache of latents failed on rank 1: ")
    assert "this rank's VAE broke" in a["error"]
    assert (len(a["encoded"]), len(b["encoded"])) == (8, 0)
