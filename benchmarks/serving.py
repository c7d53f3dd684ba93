"""Tokens per CPU second through OpenAI's API: the whole platform's way, against vLLM behind its own server.

Ours are an orchestrator, a Redis and an inference replica; CPU time of all of them counts, and of everything below
them. The yardstick is `vllm serve` of the same package with the settings that our replica gives its engine. Both
answer the same requests on the same model, whose steps are so cheap that every overhead shows: with a larger model
both sides come closer to each other. Clients are this process, which counts for nobody.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import httpx
import psutil

from benchmarks.frame import Row, compare, run
from services.inference.engine import CPU_BLOCK_TOKENS, CPU_PREFILL_TOKENS
from services.inference.settings import Settings
from spo.client import Client
from spo.local.launcher import free_ports, server_command
from spo.testing.runs import toy_document
from spo.testing.trainer import write_random_llama

KEY = "the-key-of-the-benchmark"
PROMPT_TOKENS, ANSWER_TOKENS = 64, 128
# Answers asked for in one measurement, by how many are asked for at once.
ANSWERS = {1: 4, 8: 32, 50: 100}
START_SECONDS = 240.0
ANSWER_SECONDS = 120.0
ROUNDS = 2
GOAL = 0.9
# The toy's model has none: ours takes one message as it is then.
TEMPLATE = "{{ messages[0]['content'] }}"
PROMPTS = [f"{what} of the {order} numbers" for what in ("sum", "count") for order in ("sorted", "even", "distinct")]


@dataclass(frozen=True)
class Side:
    """One server of the API: where it is, what the model is called there, and the processes that are its."""

    url: str
    model: str
    processes: tuple[int, ...]

    def tokens_per_cpu_second(self, clients: int, *, stream: bool) -> float:
        """Ask for ANSWERS, so many at once; returns sampled tokens by CPU seconds of the server."""
        before = self._cpu_seconds()
        tokens = asyncio.run(self._ask_all(clients, stream=stream))
        return tokens / (self._cpu_seconds() - before)

    def _cpu_seconds(self) -> float:
        found = [psutil.Process(pid) for pid in self.processes]
        found += [child for process in tuple(found) for child in process.children(recursive=True)]
        return sum(times.user + times.system for times in (process.cpu_times() for process in found))

    async def _ask_all(self, clients: int, *, stream: bool) -> int:
        numbers = iter(range(ANSWERS[clients]))
        headers = {"Authorization": f"Bearer {KEY}"}
        limits = httpx.Limits(max_connections=clients)
        async with httpx.AsyncClient(
            base_url=self.url, headers=headers, limits=limits, timeout=ANSWER_SECONDS, trust_env=False
        ) as client:

            async def ask() -> int:
                return sum([await self._ask(client, number, stream=stream) for number in numbers])

            return sum(await asyncio.gather(*(ask() for _ in range(clients))))

    async def _ask(self, client: httpx.AsyncClient, number: int, *, stream: bool) -> int:
        body: dict[str, object] = {
            "model": self.model,
            "messages": [{"role": "user", "content": PROMPTS[number % len(PROMPTS)]}],
            "max_tokens": ANSWER_TOKENS,
            "seed": number,
            "stream": stream,
        }
        if stream:
            body["stream_options"] = {"include_usage": True}
        answer = await client.post("/v1/chat/completions", json=body)
        answer.raise_for_status()
        # The last event but one is the usage.
        document = answer.content.split(b"\n\n")[-3].removeprefix(b"data: ") if stream else answer.content
        return int(json.loads(document)["usage"]["completion_tokens"])


def measure() -> list[Row]:
    """A row for each kind of answer and number of clients."""
    with tempfile.TemporaryDirectory(prefix="spo-benchmark-") as name, contextlib.ExitStack() as stack:
        folder = Path(name)
        model = _model(folder)
        ours, raw = stack.enter_context(_platform(folder, model)), stack.enter_context(_vllm_server(folder, model))
        return [_row(ours, raw, clients, stream=stream) for clients in ANSWERS for stream in (True, False)]


def _row(ours: Side, raw: Side, clients: int, *, stream: bool) -> Row:
    kind = "streamed" if stream else "whole"
    return compare(
        f"chats, {kind}, {clients} at once",
        "tokens per CPU second",
        "vllm serve",
        lambda: ours.tokens_per_cpu_second(clients, stream=stream),
        lambda: raw.tokens_per_cpu_second(clients, stream=stream),
        goal=GOAL,
        rounds=ROUNDS,
    )


def _model(folder: Path) -> Path:
    model = folder / "pi0"
    write_random_llama(model, seed=0)
    config = model / "config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), "max_position_embeddings": 1024}))
    return model


@contextlib.contextmanager
def _platform(folder: Path, model: Path) -> Iterator[Side]:
    """Redis, orchestrator and replica, and a job that has ended: asking for it brings the replica to it."""
    ports = free_ports(["redis", "http", "grpc"], {})
    address, url = f"127.0.0.1:{ports['grpc']}", f"http://127.0.0.1:{ports['http']}"
    environment = {
        "SPO_REDIS_URL": f"redis://127.0.0.1:{ports['redis']}/0",
        "SPO_STATE_PATH": str(folder / "state"),
        "SPO_ORCHESTRATOR_PORT": str(ports["grpc"]),
        "SPO_ORCHESTRATOR_HTTP_PORT": str(ports["http"]),
        "SPO_ORCHESTRATOR_ADDRESS": address,
        "SPO_ORCHESTRATOR_API_KEY": KEY,
        "SPO_ORCHESTRATOR_RATE_LIMIT": "100000000/minute",
        "SPO_ORCHESTRATOR_SERVING_WAIT_SECONDS": str(START_SECONDS),
        "SPO_LOG_LEVEL": "warning",
    }
    services = ([sys.executable, "-m", f"services.{name}"] for name in ("orchestrator", "inference"))
    with contextlib.ExitStack() as stack:
        redis = stack.enter_context(
            _running(server_command(ports["redis"], folder / "redis"), {}, folder / "redis.log")
        )
        orchestrator, replica = (
            stack.enter_context(_running(command, environment, folder / f"{command[-1]}.log")) for command in services
        )
        _until_ready(f"{url}/readyz", orchestrator, folder / "services.orchestrator.log")
        sizes = {"path": str(model), "max_prompt_tokens": PROMPT_TOKENS, "max_response_tokens": ANSWER_TOKENS}
        with Client(url, api_key=KEY, timeout_seconds=ANSWER_SECONDS, retry_seconds=START_SECONDS) as client:
            job_id = client.submit(toy_document({"model": {**sizes, "dtype": "float32"}})).id
            client.cancel(job_id)
        side = Side(url, f"{job_id}@0", (redis.pid, orchestrator.pid, replica.pid))
        _first_answer(side)
        yield side


@contextlib.contextmanager
def _vllm_server(folder: Path, model: Path) -> Iterator[Side]:
    (port,) = free_ports(["vllm"], {}).values()
    settings = Settings()
    (folder / "template.jinja").write_text(TEMPLATE)
    options = {
        "model": model,
        "served-model-name": "pi0",
        "chat-template": folder / "template.jinja",
        "host": "127.0.0.1",
        "port": port,
        "api-key": KEY,
        "dtype": "float32",
        "max-model-len": PROMPT_TOKENS + ANSWER_TOKENS,
        "max-num-seqs": settings.max_sequences,
        "kv-cache-memory-bytes": settings.cache_bytes(on_cpu=True),
        "block-size": CPU_BLOCK_TOKENS,
        "max-num-batched-tokens": CPU_PREFILL_TOKENS,
        "uvicorn-log-level": "warning",
    }
    switches = ["--enforce-eager", "--disable-log-stats", "--no-enable-log-requests", "--no-enable-chunked-prefill"]
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", *switches]
    command += [f"--{name}={value}" for name, value in options.items()]
    log = folder / "vllm.log"
    with _running(command, {"VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1"}, log) as process:
        url = f"http://127.0.0.1:{port}"
        _until_ready(f"{url}/health", process, log)
        side = Side(url, "pi0", (process.pid,))
        _first_answer(side)
        yield side


def _first_answer(side: Side) -> None:
    side.tokens_per_cpu_second(1, stream=True)


@contextlib.contextmanager
def _running(command: list[str], environment: dict[str, str], log: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A process with one thread for arithmetic; ended with all its children."""
    surroundings = {**os.environ, "OMP_NUM_THREADS": "1", **environment}
    with log.open("wb") as output:
        process = subprocess.Popen(command, env=surroundings, stdout=output, stderr=output)
        try:
            yield process
        finally:
            _end(process)


def _end(process: subprocess.Popen[bytes]) -> None:
    children = psutil.Process(process.pid).children(recursive=True) if process.poll() is None else []
    process.terminate()
    try:
        process.wait(30)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait(30)
    for child in children:
        with contextlib.suppress(psutil.NoSuchProcess):
            child.kill()


def _until_ready(url: str, process: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + START_SECONDS
    while process.poll() is None and time.monotonic() < deadline:
        with contextlib.suppress(httpx.TransportError):
            if httpx.get(url, trust_env=False, timeout=2).is_success:
                return
        time.sleep(0.2)
    raise RuntimeError(f"{url} did not answer within {START_SECONDS:g} s: {log.read_text()[-2000:]}")


if __name__ == "__main__":
    sys.exit(run("serving", measure))
