"""Does Redis grow? A run of 2,000,000 trajectories through the real replay buffer and experience store.

Inserts, batches and checkpoints in this process, archiver and trimmer at their own pace in another, as in production;
the trajectories are small, so that it is their number that counts. Memory and every key family of the run are looked
at all the time: once window and ledger are full, nothing may grow. SPO_SOAK_TRAJECTORIES asks for another number,
SPO_SOAK_MINUTES ends it early, and what was done is what is reported.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import psutil
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TimeRemainingColumn

from benchmarks.frame import Row, run
from services.replay_buffer.archive import BATCHES_KEPT, ExperienceArchiver, WindowTrimmer
from services.replay_buffer.sampling import BatchSampler
from services.replay_buffer.settings import Settings
from services.replay_buffer.store import ReplayStore
from spo import redis_keys
from spo.experience.store import ExperienceStore
from spo.local.launcher import server_command
from spo.messaging.redis_client import RedisClient, connect
from spo.spec.job_spec import spec_to_json
from spo.testing.runs import toy_spec
from spo.v1.prompt_pb2 import SOURCE_ONLINE, Prompt
from spo.v1.replay_service_pb2 import SampleBatchRequest
from spo.v1.trajectory_pb2 import Trajectory
from spo.v1.value_pb2 import PromptValue
from spo.v1.verdict_pb2 import OUTCOME_ACCEPTED, OUTCOME_WRONG_ANSWER, Verdict

RUN = "job_SOAK"
TRAJECTORIES = int(os.environ.get("SPO_SOAK_TRAJECTORIES", "2000000"))
MINUTES = float(os.environ.get("SPO_SOAK_MINUTES", "60"))
WINDOW = 20_000
BATCH = 64
PROMPTS = 64
INSERTED_AT_ONCE = 512
STEPS_PER_CHECKPOINT = 25
CHECKPOINTS_KEPT = 2
RESPONSE_TOKENS = 16
# A backlog of the archiver would count as growth: real rollouts come at the pace of a GPU.
MOST_UNSTORED = 8192
LOOKS = 80
GROWTH = 1.1


@dataclass(frozen=True)
class Look:
    """Redis after so many trajectories; sizes are members, fields or entries by key family."""

    trajectories: int
    memory_bytes: int
    process_bytes: int
    sizes: dict[str, int]


def measure() -> list[Row]:
    """The soak, and a row for memory and for each key family: the largest value against that when all was full."""
    with tempfile.TemporaryDirectory(prefix="spo-soak-") as folder, redis_at(Path(folder)) as url:
        client = connect(url)
        _start_run(client)
        context = multiprocessing.get_context("spawn")
        child = context.Process(target=_archive, args=(url, f"{folder}/experience"), daemon=True)
        child.start()
        try:
            began = time.monotonic()
            looks = _insert_all(client, psutil.Process(child.pid))
            seconds = time.monotonic() - began
        finally:
            child.kill()
            child.join(10)
    return _rows(looks, seconds)


def _insert_all(client: RedisClient, child: psutil.Process) -> list[Look]:
    store = ReplayStore(client)
    sampler = BatchSampler(store)
    looks: list[Look] = []
    every = max(INSERTED_AT_ONCE, TRAJECTORIES // LOOKS)
    deadline = time.monotonic() + 60 * MINUTES
    columns = ("{task.description}", BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True)) as progress:
        task = progress.add_task("trajectories", total=TRAJECTORIES)
        for step, start in enumerate(range(0, TRAJECTORIES, INSERTED_AT_ONCE), start=1):
            store.append(RUN, [_trajectory(number) for number in range(start, start + INSERTED_AT_ONCE)])
            sampler.sample(SampleBatchRequest(run_id=RUN, batch_size=BATCH, step=step, policy_version=step))
            if step % STEPS_PER_CHECKPOINT == 0:
                _checkpoint(client, step)
            done = start + INSERTED_AT_ONCE
            progress.update(task, completed=done)
            if done // every > (looks[-1].trajectories if looks else 0) // every:
                looks.append(_look(client, done, child))
                progress.update(task, description=f"Redis {looks[-1].memory_bytes / 2**20:.0f} MiB")
            if time.monotonic() > deadline:
                break
            while done - _stored(client) > MOST_UNSTORED:
                if not child.is_running() or child.status() == psutil.STATUS_ZOMBIE:
                    raise RuntimeError("the archiver has ended")
                time.sleep(0.02)
    return looks


def _stored(client: RedisClient) -> int:
    return int(client.hget(redis_keys.replay_stored(RUN), "written") or 0)


def _checkpoint(client: RedisClient, step: int) -> None:
    """What the orchestrator records: the newest checkpoints."""
    key = redis_keys.job_checkpoints(RUN)
    client.hset(key, str(step), json.dumps({"step": step, "weight_version": step}))
    oldest = step - STEPS_PER_CHECKPOINT * CHECKPOINTS_KEPT
    if oldest > 0:
        with client.pipeline(transaction=True) as pipe:
            pipe.hdel(key, str(oldest))
            pipe.execute()


def _look(client: RedisClient, trajectories: int, child: psutil.Process) -> Look:
    with client.pipeline(transaction=False) as pipe:
        pipe.zcard(redis_keys.replay_ids(RUN))
        pipe.zcard(redis_keys.replay_source(RUN, "online"))
        pipe.zcard(redis_keys.replay_prompts(RUN))
        pipe.hlen(redis_keys.replay_facts(RUN))
        pipe.zcard(redis_keys.replay_batch_log(RUN))
        pipe.hlen(redis_keys.replay_counters(RUN))
        pipe.execute_command("DBSIZE")
        sizes = pipe.execute()
    names = ("ledger", "source online", "prompts", "facts", "batch log", "counters", "keys in all")
    memory = client.info("memory")["used_memory"]
    resident = psutil.Process().memory_info().rss + child.memory_info().rss
    return Look(trajectories, memory, resident, dict(zip(names, map(int, sizes), strict=True)))


def _rows(looks: list[Look], seconds: float) -> list[Row]:
    last = looks[-1].trajectories
    records = (BATCHES_KEPT + STEPS_PER_CHECKPOINT * (CHECKPOINTS_KEPT + 1)) * INSERTED_AT_ONCE
    full_at = min(max(Settings().ledger_trajectories, records) + WINDOW, last // 2)
    full = [look for look in looks if look.trajectories >= full_at]
    # What breathes with each pass of the trimmer is compared at its highest: of the first tenth, and of all after it.
    first = full[: max(2, len(full) // 10)]
    limit = 60 * MINUTES
    rows = [
        Row("trajectories", last, "in all", "asked", TRAJECTORIES, last / TRAJECTORIES, 1.0, last >= TRAJECTORIES),
        Row("seconds", seconds, "s", "limit", limit, limit / seconds, 1.0, seconds <= limit),
        _flat("Redis memory", "MiB", first, full, lambda look: look.memory_bytes / 2**20),
        _flat("memory of the processes", "MiB", first, full, lambda look: look.process_bytes / 2**20),
    ]
    for name in looks[0].sizes:
        rows.append(_flat(name, "members", first, full, lambda look: look.sizes[name]))  # noqa: B023
    return rows


def _flat(name: str, unit: str, first: list[Look], full: list[Look], size: Callable[[Look], float]) -> Row:
    """The most there ever was once all was full, against the most at its beginning."""
    most, before = max(map(size, full)), max(map(size, first))
    return Row(name, most, unit, "when full", before, before / most, 1 / GROWTH, most <= GROWTH * before)


def _archive(url: str, place: str) -> None:
    """What a replay-buffer process does beside its service."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    client, stop = connect(url), threading.Event()
    store, settings = ReplayStore(client), Settings()
    trimmer = WindowTrimmer(BatchSampler(store), settings)
    archiver = ExperienceArchiver(store, ExperienceStore(place), settings.stored_rows_per_file, settings.store_seconds)
    threading.Thread(target=archiver.run, args=(stop,), daemon=True).start()
    trimmer.run(stop)


def _start_run(client: RedisClient) -> None:
    replay = {
        "mix": [{"source": "online", "share": 1}],
        "online_capacity": WINDOW,
        "samples_per_insert": 1000,
        "error_buffer": 10**9,
    }
    spec = toy_spec({"model": {"path": "/pi0"}, "trainer": {"batch_size": BATCH}, "replay": replay})
    client.set(redis_keys.run_spec(RUN), spec_to_json(spec))
    client.set(redis_keys.run_state(RUN), "running")
    for number in range(PROMPTS):
        prompt_id = _prompt_id(number)
        value = PromptValue(prompt_id=prompt_id, samples=100, successes=number)
        client.hset(redis_keys.run_values(RUN), prompt_id, value.SerializeToString())
        prompt = Prompt(prompt_id=prompt_id, text=f"problem {number}", task_set="toy")
        client.hset(redis_keys.run_prompts(RUN), prompt_id, prompt.SerializeToString())


def _prompt_id(number: int) -> str:
    return f"{number % PROMPTS:064x}"


def _trajectory(number: int) -> Trajectory:
    right = number % 3 == 0
    return Trajectory(
        trajectory_id=redis_keys.trajectory_id(RUN, f"{RUN}-{number // 4}", number % 4, 0, 1),
        group_id=f"{RUN}-{number // 4}",
        run_id=RUN,
        prompt_id=_prompt_id(number // 4),
        sample_index=number % 4,
        source=SOURCE_ONLINE,
        prompt_token_ids=range(8),
        response_token_ids=range(number % 1000, number % 1000 + RESPONSE_TOKENS),
        sampling_logprobs=[-0.25] * RESPONSE_TOKENS,
        reference_logprobs=[-0.5] * RESPONSE_TOKENS,
        response_text=f"print({number})",
        verdict=Verdict(outcome=OUTCOME_ACCEPTED if right else OUTCOME_WRONG_ANSWER),
        reward=0.0 if right else -1.0,
        policy_version_first=number // INSERTED_AT_ONCE,
        policy_version_last=number // INSERTED_AT_ONCE,
        created_unix_ms=1_700_000_000_000 + number,
        reference_hash="f" * 64,
    )


@contextmanager
def redis_at(folder: Path) -> Iterator[str]:
    """The URL of a server of its own, with the settings of every deployment."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = int(probe.getsockname()[1])
    process = subprocess.Popen(server_command(port, folder / "redis"), stdout=subprocess.DEVNULL)
    try:
        yield f"redis://127.0.0.1:{port}/0"
    finally:
        process.kill()
        process.wait(10)


if __name__ == "__main__":
    sys.exit(run("soak", measure))
