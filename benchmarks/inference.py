"""Tokens per CPU-second, stream in and stream out through the service's own code, against raw in-process vLLM.

Both sides decode the same prompts on the same small model, on which every overhead shows: a real server stands for the
streams, and its CPU time is counted against the product.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import vllm

from benchmarks.frame import CpuClock, Row, compare, run
from services.inference.engine import CPU_BLOCK_TOKENS
from services.inference.replica import ServingReplica
from services.inference.rollouts import RolloutWorker
from services.inference.settings import Settings
from spo import redis_keys
from spo.local.launcher import free_ports, server_command
from spo.messaging.redis_client import RedisClient, connect
from spo.messaging.streams.entries import publish, read_after
from spo.model.tokenizer import encode_prompt, load_tokenizer
from spo.observability import configure_logs
from spo.spec.job_spec import spec_to_json
from spo.testing.runs import toy_spec
from spo.testing.trainer import write_random_llama
from spo.v1.orchestrator_service_pb2 import HeartbeatResponse
from spo.v1.prompt_pb2 import SOURCE_ONLINE, Prompt, PromptGroup, Sampling
from spo.v1.trajectory_pb2 import RolloutGroup

RUN = "job_benchmark"
GROUPS = 128
SAMPLES = 4
MAX_TOKENS = 44
TEMPERATURE, TOP_P = 0.7, 0.95
WAIT_SECONDS = 300.0
PROMPTS = [
    f"{what} of the {order}numbers {where} {limit}"
    for what in ("sum", "count", "maximum", "minimum")
    for order in ("sorted ", "reversed ", "distinct ", "even ")
    for where in ("above", "below")
    for limit in (3, 17)
]


class Service:
    """An inference replica's own parts between a real server's streams, without gRPC."""

    def __init__(self, client: RedisClient, folder: Path, settings: Settings) -> None:
        self._client = client
        self._stop = threading.Event()
        client.set(redis_keys.run_spec(RUN), spec_to_json(toy_spec({"model": {"path": str(folder)}})))
        self._replica = ServingReplica(settings, client, lambda serving, reason: None, self._stop.set)
        self._replica.on_heartbeat(HeartbeatResponse(run_id=RUN, model_path=str(folder)))
        self._worker = RolloutWorker(client, self._replica, "benchmark", settings)
        self._numbers = itertools.count()
        loops = (self._replica.follow, self._worker.run)
        self._threads = [threading.Thread(target=loop, args=(self._stop,), daemon=True) for loop in loops]
        for thread in self._threads:
            thread.start()
        _until(lambda: self._replica.current() is not None, "the engine")

    def tokens(self) -> int:
        """Send GROUPS prompts and take their rollouts; returns the response tokens that came back."""
        payloads = [self._group(index).SerializeToString() for index in range(GROUPS)]
        publish(self._client, redis_keys.prompts(RUN), payloads)
        position, groups, tokens = "0-0", 0, 0
        deadline = time.monotonic() + WAIT_SECONDS
        while groups < GROUPS:
            if time.monotonic() > deadline:
                raise TimeoutError(f"waited {WAIT_SECONDS:g} s for {GROUPS - groups} rollout groups")
            entries = read_after(self._client, redis_keys.rollouts(), position, block_seconds=1)
            for entry in entries:
                rollouts = RolloutGroup.FromString(entry.payload)
                tokens += sum(len(each.response_token_ids) for each in rollouts.trajectories)
            position = entries[-1].entry_id if entries else position
            groups += len(entries)
        self._client.delete(redis_keys.rollouts())
        return tokens

    def close(self) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join(WAIT_SECONDS)
        self._replica.close()

    def _group(self, index: int) -> PromptGroup:
        number = next(self._numbers)
        return PromptGroup(
            group_id=str(number),
            run_id=RUN,
            prompt=Prompt(prompt_id=str(index), text=PROMPTS[index % len(PROMPTS)]),
            sampling=Sampling(
                samples=SAMPLES,
                temperature_min=TEMPERATURE,
                temperature_max=TEMPERATURE,
                top_p=TOP_P,
                max_tokens=MAX_TOKENS,
                seed=number,
            ),
            source=SOURCE_ONLINE,
        )


class RawVllm:
    """The same work by vllm.LLM, as its documentation shows it."""

    def __init__(self, folder: Path, settings: Settings) -> None:
        tokenizer = load_tokenizer(folder)
        self._prompts = [
            vllm.TokensPrompt(prompt_token_ids=encode_prompt(tokenizer, PROMPTS[index % len(PROMPTS)]))
            for index in range(GROUPS)
        ]
        self._llm = vllm.LLM(
            str(folder),
            dtype="float32",
            enforce_eager=True,
            max_model_len=64 + MAX_TOKENS,
            max_num_seqs=settings.max_sequences,
            block_size=CPU_BLOCK_TOKENS,
            kv_cache_memory_bytes=settings.cache_bytes(on_cpu=True),
            logprobs_mode="processed_logprobs",
        )
        self._params = vllm.SamplingParams(
            n=SAMPLES, temperature=TEMPERATURE, top_p=TOP_P, max_tokens=MAX_TOKENS, logprobs=0
        )

    def tokens(self) -> int:
        outputs = self._llm.generate(self._prompts, self._params, use_tqdm=False)
        return sum(len(completion.token_ids) for output in outputs for completion in output.outputs)


def measure() -> list[Row]:
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    configure_logs("benchmark", "warning")
    settings = Settings()
    with tempfile.TemporaryDirectory() as folder, _server(Path(folder)) as (client, pid):
        model = Path(folder) / "model"
        write_random_llama(model, seed=0)
        service, raw = Service(client, model, settings), RawVllm(model, settings)
        clock = CpuClock(pid)

        def per_cpu_second(work: Service | RawVllm) -> float:
            before = clock.seconds()
            return work.tokens() / (clock.seconds() - before)

        row = compare(
            "stream in, stream out",
            "tokens per CPU-second",
            f"vLLM {vllm.__version__} in process",
            lambda: per_cpu_second(service),
            lambda: per_cpu_second(raw),
            goal=0.8,
        )
        service.close()
    return [row]


@contextlib.contextmanager
def _server(folder: Path) -> Iterator[tuple[RedisClient, int]]:
    port = free_ports(["redis"], {})["redis"]
    process = subprocess.Popen(server_command(port, folder), stdout=subprocess.DEVNULL)
    try:
        client = connect(f"redis://127.0.0.1:{port}/0")
        yield client, process.pid
        client.close()
    finally:
        process.terminate()
        process.wait(WAIT_SECONDS)


def _until(probe: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + WAIT_SECONDS
    while not probe():
        if time.monotonic() > deadline:
            raise TimeoutError(f"waited {WAIT_SECONDS:g} s for {what}")
        time.sleep(0.05)


if __name__ == "__main__":
    sys.exit(run("inference", measure))
