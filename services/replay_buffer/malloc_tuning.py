"""Keeps freed large buffers in the process, by glibc's malloc options."""

from __future__ import annotations

import ctypes

# malloc.h
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3
# The most that glibc takes.
LARGEST_KEPT_BYTES = 32 << 20
MOST_KEPT_BYTES = 128 << 20


def keep_large_buffers() -> None:
    """Let the process reuse the memory of large messages, up to MOST_KEPT_BYTES per arena of malloc.

    Otherwise glibc may return each buffer to the kernel, and zeroing the next one's pages costs more than the message
    itself. Does nothing with another C library.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt:
        mallopt(M_MMAP_THRESHOLD, LARGEST_KEPT_BYTES)
        mallopt(M_TRIM_THRESHOLD, MOST_KEPT_BYTES)
