"""Every Redis key of one run, found from its own indices: deleting a job costs what it left, not what all left."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import get_args

from services.orchestrator import redis_keys as own_keys
from spo import redis_keys
from spo.messaging.redis_client import RedisClient
from spo.spec.job_spec import SourceName

IDS_PER_READ = 1000
_OF_A_RUN = ("run_id", "job_id")


def keys_of(client: RedisClient, run_id: str) -> Iterator[list[str]]:
    """Chunks of keys, indices last: whoever is cut short finds the rest again."""
    for chunk in _ids(client, redis_keys.replay_ids(run_id)):
        yield [redis_keys.replay_trajectory(run_id, trajectory_id) for trajectory_id in chunk]
    for chunk in _ids(client, redis_keys.replay_batch_log(run_id)):
        yield [redis_keys.replay_batch(run_id, int(step)) for step in chunk]
    prompts = {*_fields(client, redis_keys.run_prompts(run_id)), *_fields(client, redis_keys.run_values(run_id))}
    prompts |= {raw.decode() for raw in client.smembers(redis_keys.prompts_in_progress(run_id))}
    yield [redis_keys.value_progress(run_id, prompt_id) for prompt_id in sorted(prompts)]
    versions = _fields(client, own_keys.job_weights(run_id))
    yield [redis_keys.run_values_under(run_id, int(version)) for version in versions]
    yield [redis_keys.replay_source(run_id, source) for source in get_args(SourceName)]
    of_prompts = (
        redis_keys.dead_letters,
        redis_keys.dead_letter_payloads,
        redis_keys.dead_letter_totals,
        redis_keys.lone_deliveries,
        redis_keys.stream_clock,
    )
    yield [key(redis_keys.prompts(run_id)) for key in of_prompts]
    yield [key(run_id) for key in single_keys(redis_keys, own_keys)]


def single_keys(*modules: ModuleType) -> list[Callable[[str], str]]:
    """The functions that name one key of a run."""
    return [key for key in _functions(*modules) if tuple(inspect.signature(key).parameters) in ONLY_A_RUN]


def families(*modules: ModuleType) -> set[str]:
    """The names of the functions that name one of many keys of a run."""
    many = [key for key in _functions(*modules) if next(iter(inspect.signature(key).parameters), "") in _OF_A_RUN]
    return {key.__name__ for key in many} - {key.__name__ for key in single_keys(*modules)}


ONLY_A_RUN = tuple((name,) for name in _OF_A_RUN)


def _functions(*modules: ModuleType) -> list[Callable[[str], str]]:
    return [
        function
        for module in modules
        for _, function in inspect.getmembers(module, inspect.isfunction)
        if function.__module__ == module.__name__
    ]


def _ids(client: RedisClient, key: str) -> Iterator[list[str]]:
    start = 0
    while True:
        found = client.zrange(key, start, start + IDS_PER_READ - 1)
        if not found:
            return
        yield [raw.decode() for raw in found]
        start += len(found)


def _fields(client: RedisClient, key: str) -> list[str]:
    found = client.hkeys(key)
    return [raw.decode() for raw in found]
