"""What the C library does with memory that is given back."""

from __future__ import annotations

import ctypes

# malloc.h
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3
# The most that glibc takes.
LARGEST_KEPT_BYTES = 32 << 20
MOST_KEPT_BYTES = 128 << 20


def keep_large_buffers() -> None:
    """Let a process of large messages use their memory again, so much per arena of malloc at most.

    Otherwise glibc may give each buffer back to the kernel, whose zeroed pages then cost more than the message does.
    Does nothing with another C library.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt:
        mallopt(M_MMAP_THRESHOLD, LARGEST_KEPT_BYTES)
        mallopt(M_TRIM_THRESHOLD, MOST_KEPT_BYTES)
