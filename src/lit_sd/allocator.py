"""Keep freed memory for the next tensor, where training runs on the CPU.

glibc hands each large block back to the system at once, and the next one is paged in anew: on Linux that
makes fresh tensors several times slower to write than reused ones (`benchmarks/step.py --allocator`
measures it).
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
