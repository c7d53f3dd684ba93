"""How much goes into one gRPC message: what is sent in batches is cut by bytes, so that no batch is too large."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from spo.rpc.client import MAX_MESSAGE_BYTES

# An answer may be some times as long as its question, and is one message too.
CHUNK_BYTES = MAX_MESSAGE_BYTES // 4
# A trajectory travels alone in the worst case, with what is added to it on the way.
MAX_TRAJECTORY_BYTES = MAX_MESSAGE_BYTES // 2
# Of a sampled token: its id, its log-prob and its text.
TOKEN_BYTES = 16


def chunks_by_bytes(sizes: Sequence[int], most_bytes: int = CHUNK_BYTES) -> Iterator[slice]:
    """Slices in order, each of at most so many bytes; what is larger by itself is alone."""
    start, held = 0, 0
    for at, size in enumerate(sizes):
        if at > start and held + size > most_bytes:
            yield slice(start, at)
            start, held = at, 0
        held += size
    if start < len(sizes):
        yield slice(start, len(sizes))


def samples_per_message(tokens: int) -> int:
    """How many samples of so many tokens, prompt and response together, an answer can hold; at least one."""
    return max(1, CHUNK_BYTES // (TOKEN_BYTES * tokens))
