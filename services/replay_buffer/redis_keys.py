"""Redis keys that only the replay buffer knows; those of a run are in spo.redis_keys, where deletion finds them."""

from __future__ import annotations


def replay_unstored() -> str:
    """Set: ids of runs whose ledgers hold more than the experience store. Replay."""
    return "spo:replay-buffer:unstored"


def replay_untrimmed() -> str:
    """Set: ids of runs of which something may leave Redis later, or has not yet. Replay."""
    return "spo:replay-buffer:untrimmed"
