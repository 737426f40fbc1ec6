"""Runs `prepare` and kills itself, as `kill -9` would, at a given call of a function of the stages.

python killed_run.py DATA OUT FORM WORKERS MODULE.FUNCTION CALL
"""

import importlib
import os
import signal
import sys
from pathlib import Path

from lit_sd.prepare import scan
from lit_sd.prepare.program import Request, prepare
from lit_sd.prepare.settings import Settings


def main(data: str, out: str, form: str, workers: str, where: str, call: str) -> None:
    scan.CHUNK = 4
    module, _, name = where.rpartition(".")
    owner = importlib.import_module(module)
    original, calls, me = getattr(owner, name), [0], os.getpid()

    def counted(*arguments):
        calls[0] += os.getpid() == me
        if calls[0] == int(call):
            os.kill(me, signal.SIGKILL)
        return original(*arguments)

    setattr(owner, name, counted)
    settings = Settings(min_side=32, balance=0.5)
    prepare(Request(data, Path(f"{out}.prepare"), workers=int(workers)), Path(out), form, settings)


if __name__ == "__main__":
    main(*sys.argv[1:])
