"""Runs of different models share a value-estimation: they take turns, instead of reloading a model for each call."""

from __future__ import annotations

import threading
import time

import redis

from services.value_estimation.reference import Reference, References
from spo import redis_keys
from spo.spec.job_spec import ModelSpec, spec_to_json
from spo.testing.runs import toy_spec

LOAD_SECONDS = 0.3
CALLS = 40


class CountedReferences(References):
    """Loads nothing, in the time that a load takes."""

    def __init__(self, client: redis.Redis) -> None:
        super().__init__(client, 1, "cpu")
        self.loads: list[str] = []
        self.held_beside = 0

    def _load(self, model: ModelSpec) -> Reference:
        self.held_beside = max(self.held_beside, len(self._loaded))
        time.sleep(LOAD_SECONDS)
        self.loads.append(model.path)
        return Reference(None, None, model.path, 1, threading.Lock())  # type: ignore[arg-type]


def test_two_runs_of_different_models_are_served_in_turns(redis_client: redis.Redis) -> None:
    for name in ("a", "b"):
        spec = toy_spec({"model": {"path": f"/{name}"}})
        redis_client.set(redis_keys.run_spec(f"job_{name}"), spec_to_json(spec))
    references = CountedReferences(redis_client)
    served: list[str] = []

    def ask(name: str) -> None:
        for _ in range(CALLS):
            served.append(references.of(f"job_{name}").model_hash)
            time.sleep(0.01)

    threads = [threading.Thread(target=ask, args=(name,)) for name in ("a", "b") for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)

    assert sorted(served) == ["/a"] * 2 * CALLS + ["/b"] * 2 * CALLS, "everybody was served with its own model"
    # A load per call, as calls come in turn, would be 160.
    assert 2 <= len(references.loads) <= 16
    assert references.held_beside == 0, "the one before has gone when another is loaded"
