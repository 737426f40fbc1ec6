"""SIGINT and SIGTERM: a resumable checkpoint, all of the update finished, and an exit code that is not 0."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import lightning
import pytest
import torch
from tiny_runs import Snapshots, assert_same, ema_of, images, module_of, saver_of, trainer_of, write_images

from lit_sd.callbacks import Interrupted, InterruptHandler


@pytest.fixture
def root(tmp_path):
    return write_images(tmp_path / "images", 7)


class SignalsItself(Snapshots):
    """Sends a signal to this process within a forward pass."""

    def __init__(self, signum, batch):
        super().__init__()
        self.signum, self.batch, self.count = signum, batch, 0

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        self.count += 1
        if self.count == self.batch:
            os.kill(os.getpid(), self.signum)


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])
def test_stops_after_the_update_and_resumes_bit_for_bit(tiny_model, tmp_path, root, signum):
    before = [signal.getsignal(s) for s in (signal.SIGINT, signal.SIGTERM)]

    def run(name, *callbacks, ckpt=None):
        watch, saver = Snapshots(), saver_of(tmp_path / name, every_n_steps=0)
        # the handler comes first, and the average last: the order in a config must not matter
        extra = [InterruptHandler(), *callbacks, watch, ema_of(0.9)]
        options = {"max_steps": 6, "accumulate_grad_batches": 2, "checkpointing": True}
        trainer = trainer_of(tmp_path, *extra, saver, **options)
        return watch, saver, lambda: trainer.fit(module_of(tiny_model()), images(root), ckpt_path=ckpt)

    whole, whole_saver, fit = run("whole")
    fit()
    _, saver, fit = run("first", SignalsItself(signum, batch=5))  # the first half of the third update
    with pytest.raises(Interrupted) as caught:
        fit()
    assert caught.value.code == 128 + signum
    assert [signal.getsignal(s) for s in (signal.SIGINT, signal.SIGTERM)] == before
    assert torch.load(saver.last, weights_only=True)["global_step"] == 3
    rest, rest_saver, fit = run("rest", ckpt=saver.last)
    fit()
    assert_same(rest.steps, {step: state for step, state in whole.steps.items() if step > 3})
    ends = [torch.load(s.last, weights_only=True) for s in (whole_saver, rest_saver)]
    for key in ("state_dict", "ema", "optimizer_states", "random"):
        assert_same(ends[0][key], ends[1][key], key)


def test_a_second_signal_stops_at_once(tiny_model, tmp_path, root):
    class Twice(lightning.Callback):
        def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
            os.kill(os.getpid(), signal.SIGINT)
            os.kill(os.getpid(), signal.SIGINT)
            raise AssertionError("the second signal was ignored")

    with pytest.raises(SystemExit):  # Lightning makes an exit out of KeyboardInterrupt
        trainer_of(tmp_path, Twice(), InterruptHandler(), max_steps=2).fit(
            module_of(tiny_model()), images(root)
        )


SCRIPT = """
import faulthandler, sys
faulthandler.dump_traceback_later(160, exit=True)  # if it hangs, say where
sys.path.insert(0, sys.argv[1])
import lightning
from lit_sd.callbacks import InterruptHandler
from lit_sd.models.loading import load
from tiny_runs import images, module_of, saver_of, trainer_of

class Tell(lightning.Callback):
    def on_train_batch_end(self, trainer, *args):
        if trainer.global_step == 2:
            print("two updates", flush=True)

out = sys.argv[4]
saver = saver_of(out, every_n_steps=0)
options = {"max_steps": 100000, "checkpointing": True, "num_sanity_val_steps": 1}
trainer = trainer_of(out, InterruptHandler(), Tell(), saver, **options)
trainer.fit(module_of(load(sys.argv[2])), images(sys.argv[3], val_share=0.2))
"""


def test_exit_codes_of_a_process(tiny_model_dir, tmp_path, root):
    here = str(Path(__file__).parents[1])
    signals = (signal.SIGINT, signal.SIGTERM)
    processes = [
        subprocess.Popen(
            [
                sys.executable,
                "-c",
                SCRIPT,
                here,
                str(tiny_model_dir("sd15")),
                str(root),
                str(tmp_path / signum.name),
            ],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
        for signum in signals
    ]
    for process, signum in zip(processes, signals, strict=True):
        assert process.stdout is not None
        for line in process.stdout:
            if "two updates" in line:
                break
        process.send_signal(signum)
        _, errors = process.communicate(timeout=180)
        assert process.returncode == 128 + signum, errors[-2000:]
        assert f"resume with ckpt={tmp_path / signum.name}" in errors
        saved = torch.load(tmp_path / signum.name / "last.ckpt", weights_only=True)
        assert 2 <= saved["global_step"] < 100000
