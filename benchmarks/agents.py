"""What a session of an agent costs: its calls beside plain completions of the same messages, and sessions that wait.

Both are asked of one real orchestrator and Redis, in conversations whose turns grow, of doubles of inference that
answer at once, whole or a token at a time: what is measured is the orchestrator's own. A session's call is matched
against its tree, asks for log-probs, and is stored before its end is told; a plain one does none of it. CPU time is
that of the orchestrator, less what it takes in as long a time by itself.
"""

from __future__ import annotations

import contextlib
import json
import statistics
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import httpx
import psutil

from benchmarks.frame import Row, compare, run, within
from benchmarks.http_load.stage import KEY, Platform, platform
from services.orchestrator import redis_keys as own_keys
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
# Of the tokens that were sampled and read before a call, which its replica has had, of two that are asked for it.
CACHED = 0.95
# Sessions that are played together on two cores, calls of each, and CPU of one of them.
PLAYED, CALLS, AT_ONCE = 64, 20, 16
PLAYED_LIMIT_MS = 15.0
TREE_LIMIT_MIB = 64.0
ANSWER_SECONDS = 0.05
REST_SECONDS = 10.0
SESSIONS = 1000
MEMORY_LIMIT_MIB = 50.0
# Open and without a call yet; a part of their list, which the page of a job's episodes asks for.
OPEN = 10_000
OPEN_MEMORY_LIMIT_MIB = 100.0
OPEN_KIB = 8.0
LISTED, LISTED_LIMIT_MS = 50, 200.0
BEAT_SECONDS = 2.0
START_SECONDS = 60.0
SMOKE = {
    **{"CONVERSATIONS": 1, "TURNS": 2, "ROUNDS": 1, "REST_SECONDS": 1.0},
    **{"PLAYED": 4, "CALLS": 4, "SESSIONS": 5, "OPEN": 20},
}
ANSWER = " ".join(["word"] * ANSWER_TOKENS)


@dataclass
class Asked:
    """A served job, asked as an agent asks its session or as anybody asks a model; milliseconds of each call."""

    found: Platform
    client: httpx.Client
    job_id: str
    latencies: dict[str, list[float]] = field(default_factory=lambda: {"session": [], "plain": []})
    # CPU milliseconds a second.
    at_rest: float = 0.0

    def cpu_ms(self, kind: str, *, stream: bool = False) -> float:
        """CPU milliseconds of the orchestrator for a call, over all turns of some conversations."""
        granted = [self.open() if kind == "session" else ("/v1", KEY) for _ in range(CONVERSATIONS)]
        before = self.spent_ms()
        for place, key in granted:
            self.converse(kind, place, key, TURNS, stream=stream)
        return (self.spent_ms() - before) / (CONVERSATIONS * TURNS)

    def rest(self) -> None:
        """Find out what the orchestrator takes when nobody asks it anything."""
        before, began = self.spent_ms(), time.monotonic()
        time.sleep(REST_SECONDS)
        self.at_rest = (self.spent_ms() - before) / (time.monotonic() - began)

    def spent_ms(self) -> float:
        """CPU milliseconds of the orchestrator for what it was asked so far."""
        times = psutil.Process(self.found.orchestrator.pid).cpu_times()
        return 1000 * (times.user + times.system) - self.at_rest * time.monotonic()

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

    def converse(
        self, kind: str, place: str, key: str, turns: int, *, stream: bool = False, begins: str = "Begin."
    ) -> None:
        """One conversation, each turn with all that was said before."""
        said: list[object] = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": begins}]
        for _ in range(turns):
            body: dict[str, object] = {"model": self.job_id, "messages": said, "stream": stream}
            began = time.perf_counter()
            answer = self._asked(f"{place}/chat/completions", key, body)
            self.latencies[kind].append(1000 * (time.perf_counter() - began))
            if stream:
                assert answer.text.endswith("data: [DONE]\n\n"), answer.text[-300:]
            turn = {"role": "assistant", "content": ANSWER} if stream else answer.json()["choices"][0]["message"]
            said += [turn, {"role": "user", "content": "Go on."}]

    def _get(self, path: str) -> dict[str, Any]:
        answer = self.client.get(path, headers={"Authorization": f"Bearer {KEY}"})
        answer.raise_for_status()
        found: dict[str, Any] = answer.json()
        return found

    def _post(self, path: str, key: str, body: dict[str, object]) -> dict[str, Any]:
        found: dict[str, Any] = self._asked(path, key, body).json()
        return found

    def _asked(self, path: str, key: str, body: dict[str, object]) -> httpx.Response:
        answer = self.client.post(path, json=body, headers={"Authorization": f"Bearer {key}"})
        answer.raise_for_status()
        return answer


@dataclass
class Cache:
    """What an engine would have of each conversation, which its first question names, and what it was asked for."""

    longest: dict[str, int] = field(default_factory=dict)
    known: int = 0
    asked: int = 0

    def prompt(self, request: ServeRequest) -> list[int]:
        """As a replica makes it: known tokens as they are, a token for each word of the rest."""
        turns = json.loads(request.messages_json)
        said = [len(word) for turn in turns[request.context_turns :] for word in str(turn["content"]).split()]
        before, begins = len(request.context_token_ids), turns[1]["content"]
        self.known += min(before, self.longest.get(begins, 0))
        self.asked += before
        found = [*request.context_token_ids, *(100 + length for length in said)]
        self.longest[begins] = len(found) + ANSWER_TOKENS
        return found


def measure() -> list[Row]:
    """Overhead in CPU and in time, how sessions find their prefixes, and the memory of those that wait."""
    with (
        platform() as found,
        ServiceDoubles() as one,
        ServiceDoubles() as other,
        _served(found, (one, other)) as asked,
    ):
        asked.rest()
        whole = _compared(asked, stream=False)
        added = within("what a session adds to a call", "ms", asked.added_ms, limit=LIMIT_MS, rounds=1)
        again = within(
            "tokens of earlier calls that are not fed as they were", "share", asked.unmatched, limit=0, rounds=1
        )
        streamed = _compared(asked, stream=True)
        return [whole, added, streamed, again, *_played(asked, (one, other)), *_waiting(asked), *_open(asked)]


def _compared(asked: Asked, *, stream: bool) -> Row:
    return compare(
        f"call of a session, {TURNS} turns, {'a token at a time' if stream else 'whole'}",
        "CPU ms",
        "plain completion of the same messages",
        lambda: asked.cpu_ms("session", stream=stream),
        lambda: asked.cpu_ms("plain", stream=stream),
        goal=GOAL,
        rounds=ROUNDS,
        lower_is_better=True,
    )


def _played(asked: Asked, replicas: Sequence[ServiceDoubles]) -> list[Row]:
    """Acceptance 13: sessions that are played together, by engines that take a while."""
    caches = [Cache() for _ in replicas]
    for replica, cache in zip(replicas, caches, strict=True):
        replica.inference.says = _slowly
        replica.inference.prompt_of = cache.prompt
    granted = [asked.open() for _ in range(PLAYED)]
    spent, grown = asked.spent_ms(), 0.0
    with ThreadPoolExecutor(AT_ONCE) as threads:
        # The first quarter fills what is kept of any session; from then on nothing may grow.
        for part in (granted[: PLAYED // 4], granted[PLAYED // 4 :]):
            before = psutil.Process(asked.found.orchestrator.pid).memory_info().rss
            played = [
                threads.submit(asked.converse, "session", *each, CALLS, begins=f"Begin {each[0]}.") for each in part
            ]
            for each in played:
                each.result()
            grown = (psutil.Process(asked.found.orchestrator.pid).memory_info().rss - before) / 2**20
    cpu = (asked.spent_ms() - spent) / (PLAYED * CALLS)
    missed = 1 - sum(each.known for each in caches) / sum(each.asked for each in caches)
    largest = max(
        int(asked.found.client.hget(own_keys.agent_session(place.split("/")[2]), "bytes") or 0) for place, _ in granted
    )
    for replica in replicas:
        replica.inference.says = lambda request: ANSWER
    named = f"{PLAYED} sessions of {CALLS} calls, {AT_ONCE} at once"
    return [
        within(f"a call of {named}", "CPU ms", lambda: cpu, limit=PLAYED_LIMIT_MS, rounds=1),
        within(f"{named}, orchestrator", "MiB", lambda: max(0.0, grown), limit=MEMORY_LIMIT_MIB, rounds=1),
        within("the largest tree of them", "MiB", lambda: largest / 2**20, limit=TREE_LIMIT_MIB, rounds=1),
        within(
            "tokens of earlier calls whose replica has not had them",
            "share",
            lambda: missed,
            limit=1 - CACHED,
            rounds=1,
        ),
    ]


def _slowly(request: ServeRequest) -> str:
    time.sleep(ANSWER_SECONDS)
    return ANSWER


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
def _served(found: Platform, replicas: Sequence[ServiceDoubles]) -> Iterator[Asked]:
    """A job that has ended, and replicas that say they serve it."""
    for replica in replicas:
        replica.inference.says = lambda request: ANSWER
        replica.inference.shown = lambda word: ServedToken(text=word, logprob=-0.5)
        replica.inference.prompt_of = Cache().prompt
        replica.inference.in_parts = False
    jobs = JobStore(found.client, durable=IN_REDIS)
    job_id = jobs.submit(parse_job_spec(found.spec()))
    jobs.transition(job_id, JobState.CANCELLED, "benchmark")
    orchestrator = RpcClient("orchestrator", f"127.0.0.1:{found.grpc_port}", OrchestratorServiceStub)
    beats = [
        HeartbeatRequest(replica_id=f"inference-{number}", pool="inference", address=each.address, run_id=job_id)
        for number, each in enumerate(replicas)
    ]
    stop = threading.Event()

    def beating() -> None:
        while not stop.is_set():
            for beat in beats:
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


if __name__ == "__main__":
    sys.exit(run("agents", measure, smoke=SMOKE))
