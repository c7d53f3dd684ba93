"""Seeds of draws, derived from the spec's seed so that equal specs ask for equal experiments."""

from __future__ import annotations

from spo import redis_keys


def seed_of(spec_seed: int, *purpose: object) -> int:
    """A 63-bit seed for one purpose, for example ("rollout", 17)."""
    return int(redis_keys.digest(str(spec_seed), *map(str, purpose))[:16], 16) >> 1
