"""Keep freed memory for the next tensor, where training runs on the CPU.

glibc hands each block above 32 MiB (its highest M_MMAP_THRESHOLD) back to the system at once, and the next
one is paged in anew: on Linux that makes fresh tensors of this size several times slower to write than reused
ones. Large batches and large pictures have them (`benchmarks/step.py openmoji --batch-size 64 --allocator`).
"""

import ctypes
import sys

TRIM_THRESHOLD, TOP_PAD, MMAP_MAX = -1, -2, -4  # parameters of mallopt(3)


def keep_freed_memory(pad_bytes: int = 64 * 2**20) -> bool:
    """Tell glibc to serve large blocks from its heap and not to shrink that, for this process.

    Args:
        pad_bytes: how much the heap grows at a time.

    Returns:
        Whether it was done: False where the C library is not glibc.
    """
    if not sys.platform.startswith("linux"):
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return False
    largest = 2**31 - 1
    return all([mallopt(MMAP_MAX, 0), mallopt(TRIM_THRESHOLD, largest), mallopt(TOP_PAD, pad_bytes)])
