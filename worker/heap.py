"""Makes the heap of this process keep what is freed, for the next tensor of that size.

glibc maps memory for a large tensor from the system and gives it back with the tensor. The next
one then begins with new pages, each of which costs a fault and is zeroed by the kernel: for a
gradient of 8 MiB as much time again as it takes to copy it. A stage needs the same sizes batch
after batch, so that what is kept is what is used next.
"""

from __future__ import annotations

import ctypes
import os

__all__ = ["keep_freed_memory"]

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_ARENA_MAX = -1, -3, -8

_KEPT_BYTES = 1 << 30
"""That may lie free at the end of the heap."""

_LARGEST_KEPT_BYTES = 32 << 20
"""The largest tensor that comes from the heap; more than this glibc does not allow."""


def keep_freed_memory() -> None:
    """Tell glibc, unless the user has; to be called before any thread starts."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:  # another C library
        return
    if any(name.startswith(("MALLOC_", "GLIBC_TUNABLES")) for name in os.environ):
        return
    # One heap for all threads: what the stream's thread allocates, the loop's thread frees.
    mallopt(_M_ARENA_MAX, 1)
    mallopt(_M_MMAP_THRESHOLD, _LARGEST_KEPT_BYTES)
    mallopt(_M_TRIM_THRESHOLD, _KEPT_BYTES)
