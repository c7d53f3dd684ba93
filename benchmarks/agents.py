"""What a session of an agent costs: its calls beside plain completions of the same messages, and sessions that wait.

Both are asked of one real orchestrator and Redis, in conversations whose turns grow, of a double of inference that
answers at once: what is measured is the orchestrator's own. A session's call is matched against its tree, asks for
log-probs, and is stored before its end is told; a plain one does none of it. CPU time is that of the orchestrator.
"""

from __future__ import annotations

import contextlib
import json
import statistics
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import httpx
import psutil

from benchmarks.frame import Row, compare, run, within
from benchmarks.http_load.stage import KEY, Platform, platform
from services.orchestrator.jobs import IN_REDIS, JobStore
from spo.rpc.client import RpcClient
from spo.spec.job_spec import parse_job_spec
from spo.spec.section import JobState
from spo.testing.peers import ServiceDoubles
from spo.v1.inference_service_pb2 import ServedToken, ServeRequest
from spo.v1.orchestrator_service_pb2 import HeartbeatRequest
from spo.v1.orchestrator_service_pb2_grpc import OrchestratorServiceStub

CONVERSATIONS, TURNS = 6, 8
ANSWER_TOKENS = 128
ROUNDS = 5
# A call of a session may take 5 % more CPU than the plain one, and 3 ms more.
GOAL = 1 / 1.05
LIMIT_MS = 3.0
SESSIONS = 1000
MEMORY_LIMIT_MIB = 50.0
# Open and without a call yet; a part of their list, which the page of a job's episodes asks for.
OPEN = 10_000
OPEN_MEMORY_LIMIT_MIB = 100.0
OPEN_KIB = 8.0
LISTED, LISTED_LIMIT_MS = 50, 200.0
BEAT_SECONDS = 2.0
START_SECONDS = 60.0
SMOKE = {"CONVERSATIONS": 1, "TURNS": 2, "ROUNDS": 1, "SESSIONS": 5, "OPEN": 20}
ANSWER = " ".join(["word"] * ANSWER_TOKENS)


@dataclass
class Asked:
    """A served job, asked as an agent asks its session or as anybody asks a model; milliseconds of each call."""

    found: Platform
    client: httpx.Client
    job_id: str
    latencies: dict[str, list[float]] = field(default_factory=lambda: {"session": [], "plain": []})

    def cpu_ms(self, kind: str) -> float:
        """CPU milliseconds of the orchestrator for a call, over all turns of some conversations."""
        process = psutil.Process(self.found.orchestrator.pid)
        granted = [self.open() if kind == "session" else ("/v1", KEY) for _ in range(CONVERSATIONS)]
        before = process.cpu_times()
        for place, key in granted:
            self.converse(kind, place, key, TURNS)
        after = process.cpu_times()
        return 1000 * (after.user + after.system - before.user - before.system) / (CONVERSATIONS * TURNS)

    def added_ms(self) -> float:
        """How much longer the median call of a session takes, of those since this was asked last."""
        medians = {kind: statistics.median(taken) for kind, taken in self.latencies.items()}
        return max(0.0, medians["session"] - medians["plain"])

    def unmatched(self) -> float:
        """Of the tokens that a conversation had read and sampled before each of its calls, how many were not known."""
        place, key = self.open()
        self.converse("session", place, key, TURNS)
        calls = self._get(f"/v1/agents/sessions/{place.split('/')[2]}/tree")["calls"]
        known, broken, before = 0, 0, 0
        for last, call in enumerate(calls, -1):
            known += before
            broken += 0 if last < 0 or call["parent"] == last else before
            before += len(call["read"]) + len(call["sampled"])
        return broken / known

    def listed_ms(self) -> float:
        """How long a part of the job's sessions takes."""
        began = time.perf_counter()
        part = self._get(f"/v1/agents/sessions?job={self.job_id}&limit={LISTED}")
        taken = 1000 * (time.perf_counter() - began)
        assert part["items"]
        return taken

    def open(self) -> tuple[str, str]:
        """A session's path and key."""
        opened = self._post("/v1/agents/sessions", KEY, {"job": self.job_id})
        return f"/s/{opened['id']}/v1", str(opened["key"])

    def converse(self, kind: str, place: str, key: str, turns: int) -> None:
        """One conversation, each turn with all that was said before."""
        said: list[object] = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Begin."}]
        for _ in range(turns):
            began = time.perf_counter()
            answer = self._post(f"{place}/chat/completions", key, {"model": self.job_id, "messages": said})
            self.latencies[kind].append(1000 * (time.perf_counter() - began))
            said += [answer["choices"][0]["message"], {"role": "user", "content": "Go on."}]

    def _get(self, path: str) -> dict[str, Any]:
        answer = self.client.get(path, headers={"Authorization": f"Bearer {KEY}"})
        answer.raise_for_status()
        found: dict[str, Any] = answer.json()
        return found

    def _post(self, path: str, key: str, body: dict[str, object]) -> dict[str, Any]:
        answer = self.client.post(path, json=body, headers={"Authorization": f"Bearer {key}"})
        answer.raise_for_status()
        found: dict[str, Any] = answer.json()
        return found


def measure() -> list[Row]:
    """Overhead in CPU and in time, and the memory of sessions that wait."""
    with platform() as found, ServiceDoubles() as doubles, _served(found, doubles) as asked:
        compared = compare(
            f"call of a session, {TURNS} turns",
            "CPU ms",
            "plain completion of the same messages",
            lambda: asked.cpu_ms("session"),
            lambda: asked.cpu_ms("plain"),
            goal=GOAL,
            rounds=ROUNDS,
            lower_is_better=True,
        )
        added = within("what a session adds to a call", "ms", asked.added_ms, limit=LIMIT_MS, rounds=1)
        again = within(
            "tokens of earlier calls that are not fed as they were", "share", asked.unmatched, limit=0, rounds=1
        )
        return [compared, added, again, *_waiting(asked), *_open(asked)]


def _waiting(asked: Asked) -> list[Row]:
    orchestrator = psutil.Process(asked.found.orchestrator.pid)
    stored = int(asked.found.client.info("memory")["used_memory"])
    before = orchestrator.memory_info().rss
    for _ in range(SESSIONS):
        place, key = asked.open()
        asked.converse("session", place, key, 1)
    grown = (orchestrator.memory_info().rss - before) / 2**20
    kept = (int(asked.found.client.info("memory")["used_memory"]) - stored) / 2**10 / SESSIONS
    return [
        within(f"{SESSIONS} idle sessions, orchestrator", "MiB", lambda: grown, limit=MEMORY_LIMIT_MIB, rounds=1),
        within("an idle session of one call, Redis", "KiB", lambda: kept, limit=1024.0, rounds=1),
    ]


def _open(asked: Asked) -> list[Row]:
    orchestrator = psutil.Process(asked.found.orchestrator.pid)
    stored = int(asked.found.client.info("memory")["used_memory"])
    before = orchestrator.memory_info().rss
    for _ in range(OPEN):
        asked.open()
    grown = (orchestrator.memory_info().rss - before) / 2**20
    kept = (int(asked.found.client.info("memory")["used_memory"]) - stored) / 2**10 / OPEN
    return [
        within(f"{OPEN} open sessions, orchestrator", "MiB", lambda: grown, limit=OPEN_MEMORY_LIMIT_MIB, rounds=1),
        within("an open session, Redis", "KiB", lambda: kept, limit=OPEN_KIB, rounds=1),
        within(f"{LISTED} of them listed", "ms", asked.listed_ms, limit=LISTED_LIMIT_MS, rounds=ROUNDS),
    ]


@contextlib.contextmanager
def _served(found: Platform, doubles: ServiceDoubles) -> Iterator[Asked]:
    """A job that has ended, and a replica that says it serves it."""
    doubles.inference.says = lambda request: ANSWER
    doubles.inference.shown = lambda word: ServedToken(text=word, logprob=-0.5)
    doubles.inference.prompt_of = _prompt
    jobs = JobStore(found.client, durable=IN_REDIS)
    job_id = jobs.submit(parse_job_spec(found.spec()))
    jobs.transition(job_id, JobState.CANCELLED, "benchmark")
    orchestrator = RpcClient("orchestrator", f"127.0.0.1:{found.grpc_port}", OrchestratorServiceStub)
    beat = HeartbeatRequest(replica_id="inference-1", pool="inference", address=doubles.address, run_id=job_id)
    stop = threading.Event()

    def beating() -> None:
        while not stop.is_set():
            orchestrator.call("Heartbeat", beat)
            stop.wait(BEAT_SECONDS)

    thread = threading.Thread(target=beating, name="beats")
    thread.start()
    try:
        with httpx.Client(base_url=found.url, timeout=START_SECONDS, trust_env=False) as client:
            yield Asked(found, client, job_id)
    finally:
        stop.set()
        thread.join()
        orchestrator.close()


def _prompt(request: ServeRequest) -> list[int]:
    """As a replica makes it: known tokens as they are, a token for each word of the rest."""
    turns = json.loads(request.messages_json)[request.context_turns :]
    return [*request.context_token_ids, *(100 + len(word) for turn in turns for word in str(turn["content"]).split())]


if __name__ == "__main__":
    sys.exit(run("agents", measure, smoke=SMOKE))
