"""That large blocks come from the heap afterwards, seen in a process of its own."""

import subprocess
import sys

import pytest

PROBE = """
import ctypes, sys
from lit_sd.allocator import keep_freed_memory
if sys.argv[1] == "yes":
    assert keep_freed_memory()
malloc, free = ctypes.CDLL(None).malloc, ctypes.CDLL(None).free
malloc.restype, free.argtypes = ctypes.c_void_p, [ctypes.c_void_p]
block = malloc(ctypes.c_size_t(256 * 2**20))
heap = [line for line in open("/proc/self/maps") if line.rstrip().endswith("[heap]")]
start, end = (int(x, 16) for x in heap[0].split()[0].split("-"))
print(start <= block < end)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="asks Linux where the heap lies")
@pytest.mark.parametrize(("done", "in_heap"), [("no", "False"), ("yes", "True")])
def test_large_blocks_come_from_the_heap_once_asked(done, in_heap):
    import os

    env = {k: v for k, v in os.environ.items() if not k.startswith("MALLOC_")}
    found = subprocess.run(
        [sys.executable, "-c", PROBE, done], capture_output=True, text=True, check=True, env=env
    )
    assert found.stdout.strip() == in_heap
