"""What Redis holds per trajectory, job, event and step, beside the figures that docs/operations_at_scale.md adds up.

The sums of that page are right while every row is within 20 % of what the page says.
"""

from __future__ import annotations

import random
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

from benchmarks.frame import Row, run
from benchmarks.soak import redis_at
from services.orchestrator.job_records import report_writes
from services.orchestrator.jobs import JobStore
from services.replay_buffer.store import ReplayStore
from spo import redis_keys
from spo.messaging.redis_client import RedisClient, connect
from spo.spec.job_spec import parse_job_spec, spec_to_json
from spo.v1.prompt_pb2 import SOURCE_ONLINE
from spo.v1.trajectory_pb2 import Trajectory
from spo.v1.verdict_pb2 import OUTCOME_ACCEPTED, Verdict

RUN = "job_MEMORY"
PROMPT_TOKENS, RESPONSE_TOKENS = 500, 1500
TRAJECTORIES, JOBS, EVENTS, STEPS = 2000, 200, 1000, 1000
# What the page says, bytes.
DOCUMENTED = {"trajectory of 2,000 tokens": 29_000, "job": 7_700, "event": 90, "step of metrics": 590}
TOLERANCE = 0.2


def measure() -> list[Row]:
    """A row for each figure of the page: bytes measured, bytes documented."""
    with tempfile.TemporaryDirectory(prefix="spo-memory-") as folder, redis_at(Path(folder)) as url:
        client = connect(url)
        jobs = JobStore(client)
        model = {"path": "/models/pi0", "max_prompt_tokens": PROMPT_TOKENS, "max_response_tokens": RESPONSE_TOKENS}
        spec = parse_job_spec({"model": model, "tasks": {"kind": "toy"}, "name": "a job of a team"})
        client.set(redis_keys.run_spec(RUN), spec_to_json(spec))
        store = ReplayStore(client)
        found = {
            "trajectory of 2,000 tokens": _each(client, TRAJECTORIES, lambda number: _append(store, number)),
            "job": _each(client, JOBS, lambda _: jobs.submit(spec)),
        }
        job_id = jobs.submit(spec)
        metrics = {f"name_of_a_metric_{index}": random.Random(index).random() for index in range(12)}
        found["event"] = _each(
            client, EVENTS, lambda number: jobs.append(job_id, "progress", {"stage": "running", "done": number})
        )
        found["step of metrics"] = _each(
            client, STEPS, lambda step: jobs.append(job_id, "", {}, report_writes(job_id, [(step, metrics)]))
        )
    return [_row(name, value) for name, value in found.items()]


def _each(client: RedisClient, count: int, write: Callable[[int], object]) -> float:
    """Bytes of memory per write, after one that pays for the key."""
    write(0)
    before = int(client.info("memory")["used_memory"])
    for number in range(1, count + 1):
        write(number)
    return (int(client.info("memory")["used_memory"]) - before) / count


def _row(name: str, value: float) -> Row:
    documented = DOCUMENTED[name]
    ratio = min(value, documented) / max(value, documented)
    return Row(name, value, "bytes", "documented", documented, ratio, 1 - TOLERANCE, ratio >= 1 - TOLERANCE)


def _append(store: ReplayStore, number: int) -> None:
    rng = random.Random(number)
    trajectory = Trajectory(
        trajectory_id=redis_keys.trajectory_id(RUN, f"{RUN}-{number // 8}", number % 8, 0, 1),
        group_id=f"{RUN}-{number // 8}",
        run_id=RUN,
        prompt_id=f"{number // 8:064x}",
        sample_index=number % 8,
        source=SOURCE_ONLINE,
        prompt_token_ids=[rng.randrange(150_000) for _ in range(PROMPT_TOKENS)],
        response_token_ids=[rng.randrange(150_000) for _ in range(RESPONSE_TOKENS)],
        sampling_logprobs=[-rng.random() for _ in range(RESPONSE_TOKENS)],
        reference_logprobs=[-rng.random() for _ in range(RESPONSE_TOKENS)],
        # About four characters a token.
        response_text="".join(rng.choices("abcdefghij (=)\n", k=4 * RESPONSE_TOKENS)),
        verdict=Verdict(outcome=OUTCOME_ACCEPTED),
        reward=0.0,
        policy_version_first=1,
        policy_version_last=1,
        created_unix_ms=1_700_000_000_000 + number,
        reference_hash="f" * 64,
    )
    store.append(RUN, [trajectory])


SMOKE: dict[str, object] = {"TRAJECTORIES": 20, "JOBS": 5, "EVENTS": 20, "STEPS": 20}


if __name__ == "__main__":
    sys.exit(run("memory", measure, smoke=SMOKE))
