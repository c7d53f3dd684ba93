"""The REST API under load: reading and submitting jobs, very many listeners, very many jobs, very many replicas.

Everything runs on one pair of cores: Redis, the orchestrator process with its runner and an API key, the yardstick and
the clients. Rows with a rate ask at that rate in all, over 50 connections, at fixed times; their latencies are wall
time and want a machine that does nothing else. Rows without a pause ask as fast as the answers come, and are CPU time
of the service. The yardstick is a bare FastAPI service on the same Redis that reads one key, or writes one and waits
for the append-only file.
"""

from __future__ import annotations

import asyncio
import json
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable

import psutil
from playwright.sync_api import sync_playwright

from benchmarks.frame import Row, compare, run, within
from benchmarks.http_load.load import Listeners, ask, request
from benchmarks.http_load.stage import KEY, Platform, platform
from services.orchestrator.jobs import IN_REDIS, JobStore
from spo.rpc.client import RpcClient
from spo.spec.job_spec import parse_job_spec
from spo.spec.section import JobState
from spo.v1.orchestrator_service_pb2 import HeartbeatRequest
from spo.v1.orchestrator_service_pb2_grpc import OrchestratorServiceStub

CLIENTS = 50
READS_PER_SECOND = 200
SUBMITS_PER_SECOND = 50
SECONDS = 5
UNPACED_REQUESTS = 500
ROUNDS = 3
READ_LIMIT_MS = 30.0
SUBMIT_LIMIT_MS = 60.0

LISTENERS = 1000
EVENTS = 10
EVENT_PAUSE_SECONDS = 1.0
MEMORY_LIMIT_MIB = 300.0
DELIVERY_LIMIT_SECONDS = 1.0

STORED_JOBS = 10_000
PAINTS = 5
PAINT_LIMIT_MS = 1000.0

REPLICAS = 1000
BEATS_PER_SECOND = 250


def measure() -> list[Row]:
    """All claims; those of the listeners before the store is filled, the page's after."""
    with platform() as found:
        jobs = JobStore(found.client, durable=IN_REDIS)
        job_id = jobs.submit(parse_job_spec(found.spec()))
        for state in (JobState.VALIDATING, JobState.ESTIMATING, JobState.RUNNING):
            jobs.transition(job_id, state, "benchmark")
        rows = [*_reading(found, job_id), *_submitting(found)]
        rows += _listening(found, jobs, job_id)
        rows += _beating(found, job_id)
        return rows + _painting(found, jobs)


def _reading(found: Platform, job_id: str) -> list[Row]:
    found.client.set("yardstick", json.dumps(found.spec()))
    read = request("GET", f"/v1/jobs/{job_id}", KEY)
    bare = request("GET", "/yardstick")
    name = f"GET job p99, {CLIENTS} clients, {READS_PER_SECOND}/s"
    return [
        within(name, "ms", _p99_ms(found, read, READS_PER_SECOND), limit=READ_LIMIT_MS, rounds=ROUNDS),
        compare(
            f"CPU of GET job, {CLIENTS} clients without a pause",
            "ms",
            "bare FastAPI, one GET",
            _cpu_ms(found.orchestrator, found.http_port, read),
            _cpu_ms(found.bare, found.bare_port, bare),
            goal=0.125,
            rounds=ROUNDS,
            lower_is_better=True,
        ),
    ]


def _submitting(found: Platform) -> list[Row]:
    body = json.dumps(found.spec()).encode()
    submit = request("POST", "/v1/jobs", KEY, body)
    bare = request("POST", "/yardstick", "", body)
    name = f"POST job p99, {CLIENTS} clients, {SUBMITS_PER_SECOND}/s"
    return [
        within(name, "ms", _p99_ms(found, submit, SUBMITS_PER_SECOND), limit=SUBMIT_LIMIT_MS, rounds=ROUNDS),
        compare(
            f"CPU of POST job, {CLIENTS} clients without a pause",
            "ms",
            "bare FastAPI, SET + WAITAOF",
            _cpu_ms(found.orchestrator, found.http_port, submit),
            _cpu_ms(found.bare, found.bare_port, bare),
            goal=0.125,
            rounds=ROUNDS,
            lower_is_better=True,
        ),
    ]


def _p99_ms(found: Platform, what: bytes, per_second: float) -> Callable[[], float]:
    count = int(per_second * SECONDS)
    return lambda: ask(found.http_port, lambda: what, CLIENTS, count, per_second).p99_ms


def _cpu_ms(service: subprocess.Popen[bytes], port: int, what: bytes) -> Callable[[], float]:
    """CPU milliseconds of the service per request."""
    process = psutil.Process(service.pid)

    def spent() -> float:
        before = process.cpu_times()
        answers = ask(port, lambda: what, CLIENTS, UNPACED_REQUESTS)
        after = process.cpu_times()
        return 1000 * (after.user + after.system - before.user - before.system) / len(answers.latencies)

    return spent


def _listening(found: Platform, jobs: JobStore, job_id: str) -> list[Row]:
    memory_mib, slowest = asyncio.run(_listen(found, jobs, job_id))
    return [
        within(f"orchestrator with {LISTENERS} listeners", "MiB", lambda: memory_mib, limit=MEMORY_LIMIT_MIB, rounds=1),
        within(
            f"slowest delivery, an event a second to {LISTENERS} listeners",
            "s",
            lambda: slowest,
            limit=DELIVERY_LIMIT_SECONDS,
            rounds=1,
        ),
    ]


async def _listen(found: Platform, jobs: JobStore, job_id: str) -> tuple[float, float]:
    """The orchestrator's resident memory with all listeners, and the slowest delivery of any event to any of them."""
    first = len(jobs.events(job_id)) + 1
    listeners = Listeners(found.http_port, f"/v1/jobs/{job_id}/events?after_seq={first - 1}", KEY, LISTENERS)
    await listeners.connect()
    written = {}
    for seq in range(first, first + EVENTS):
        written[seq] = time.monotonic()
        await asyncio.to_thread(jobs.append, job_id, "benchmark", {"seq": seq})
        await asyncio.sleep(EVENT_PAUSE_SECONDS)
    deadline = time.monotonic() + 30
    while any(len(listeners.arrivals.get(seq, ())) < LISTENERS for seq in written):
        if time.monotonic() > deadline:
            raise RuntimeError("events were lost on their way")
        await asyncio.sleep(0.1)
    memory = psutil.Process(found.orchestrator.pid).memory_info().rss / 2**20
    await listeners.close()
    return memory, max(max(listeners.arrivals[seq]) - at for seq, at in written.items())


def _beating(found: Platform, job_id: str) -> list[Row]:
    """What a heartbeat costs the orchestrator when a thousand replicas send them in turn, and when one does."""
    process = psutil.Process(found.orchestrator.pid)
    client = RpcClient("orchestrator", f"127.0.0.1:{found.grpc_port}", OrchestratorServiceStub)

    def cost_ms(replicas: int) -> Callable[[], float]:
        def spent() -> float:
            before = process.cpu_times()
            began = time.perf_counter()
            for number in range(BEATS_PER_SECOND * SECONDS):
                beat = HeartbeatRequest(
                    replica_id=f"replica-{number % replicas}", pool="sandbox-judge", run_id=job_id, load=0.5
                )
                client.call("Heartbeat", beat)
                time.sleep(max(0.0, began + number / BEATS_PER_SECOND - time.perf_counter()))
            after = process.cpu_times()
            return 1000 * (after.user + after.system - before.user - before.system) / BEATS_PER_SECOND / SECONDS

        return spent

    row = compare(
        f"orchestrator CPU per heartbeat, {REPLICAS} replicas",
        "ms",
        "the same of 1 replica",
        cost_ms(REPLICAS),
        cost_ms(1),
        goal=0.67,
        rounds=ROUNDS,
        lower_is_better=True,
    )
    client.close()
    return [row]


# Waiting for an expression would need eval, which the page's Content-Security-Policy forbids.
FIRST_PAINT = """() => new Promise(done => new PerformanceObserver(list => {
    const first = list.getEntriesByName('first-contentful-paint')[0];
    if (first) done(first.startTime);
}).observe({type: 'paint', buffered: true}))"""


def _painting(found: Platform, jobs: JobStore) -> list[Row]:
    """First contentful paint of the list of jobs in a real Chromium, each time in a fresh profile."""
    spec = parse_job_spec(found.spec())
    for number in range(STORED_JOBS):
        jobs.submit(spec, tenant=f"tenant-{number % 10}")
    path = shutil.which("chromium")
    if path is None:
        print("chromium is not installed: the first paint is not measured", file=sys.stderr)
        return []
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=["--no-sandbox", "--no-proxy-server"])

        def paint() -> float:
            context = browser.new_context(extra_http_headers={"Authorization": f"Bearer {KEY}"})
            page = context.new_page()
            page.goto(f"{found.url}/", wait_until="load")
            milliseconds = float(page.evaluate(FIRST_PAINT))
            context.close()
            return milliseconds

        paint()
        row = within(
            f"first paint with {STORED_JOBS} jobs stored",
            "ms",
            lambda: statistics.median(paint() for _ in range(PAINTS)),
            limit=PAINT_LIMIT_MS,
            rounds=ROUNDS,
        )
        browser.close()
    return [row]


if __name__ == "__main__":
    raise SystemExit(run("api", measure))
