"""Inserting and sampling trajectories, in CPU time of everything involved, the server included.

The yardstick is what the same server and client can do at best: pipelined SET of serialised messages, pipelined GET of
128 random keys and decoding them. The product checks, indexes and counts each inserted trajectory; to sample it asks
the limiter, draws by source, records the batch and answers over gRPC, and its client decodes too.

With SPO_BENCHMARK_REVERB_PYTHON, the path of a Python that has dm-reverb, DeepMind Reverb is measured in the same run.
"""

from __future__ import annotations

import contextlib
import math
import os
import random
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.frame import CpuClock, Row, compare, run
from services.replay_buffer.sampling import BatchSampler
from services.replay_buffer.service import ReplayService
from services.replay_buffer.store import ReplayStore
from services.replay_buffer.windows import Candidate
from spo import redis_keys
from spo.local.launcher import server_command
from spo.messaging.redis_client import RedisClient, connect
from spo.rpc.client import RpcClient
from spo.rpc.server import RpcServer
from spo.spec.job_spec import parse_job_spec, spec_to_json
from spo.v1.prompt_pb2 import SOURCE_ONLINE
from spo.v1.replay_service_pb2 import SampleBatchRequest, SourceShare
from spo.v1.replay_service_pb2_grpc import ReplayServiceStub, add_ReplayServiceServicer_to_server
from spo.v1.trajectory_pb2 import Trajectory
from spo.v1.value_pb2 import PromptValue
from spo.v1.verdict_pb2 import OUTCOME_ACCEPTED, OUTCOME_WRONG_ANSWER, Verdict

RUN = "job_BENCHMARK"
BATCH = 128
INSERTS_AT_ONCE = 256
WINDOW = 2048
PROMPTS = 64
REMEMBERED, REMEMBERED_PROMPTS = 1_000_000, 100_000
ROUNDS = 5
# Inserts and samples against dm-reverb.
REVERB_GOALS = {"2 KB": (8.0, 2.0), "32 KB": (4.0, 1.0)}
# Response tokens that make a trajectory of about 2 KB and of about 32 KB, and how many rounds of what.
SIZES = {"2 KB": (140, 2048, 200), "32 KB": (2400, 512, 60)}


# Runs something and returns its CPU seconds.
Clock = Callable[[Callable[[], None]], float]


def measure() -> list[Row]:
    """All claims."""
    rows = []
    for size, (tokens, inserts, batches) in SIZES.items():
        with _server() as (client, clock):
            made = [_trajectory(number, tokens) for number in range(inserts)]
            with _service(client) as (store, replay):
                enter, put = _Inserts(store, made), _Puts(client, made)
                draw, get = _Draws(replay), _Gets(client)
                if os.environ.get("SPO_BENCHMARK_REVERB_PYTHON"):
                    rows += _against_reverb(size, clock, enter, draw)
                rows.append(
                    compare(
                        f"insert {size}",
                        "per CPU s",
                        "pipelined SET",
                        lambda: inserts / clock(lambda: enter(inserts)),  # noqa: B023
                        lambda: inserts / clock(lambda: put(inserts)),  # noqa: B023
                        goal=0.35,
                        rounds=ROUNDS,
                    )
                )
                rows.append(
                    compare(
                        f"sample {BATCH} of {size}, decoded",
                        "batches per CPU s",
                        "pipelined GET and decode",
                        lambda: batches / clock(lambda: draw(batches)),  # noqa: B023
                        lambda: batches / clock(lambda: get(batches)),  # noqa: B023
                        goal=0.7,
                        rounds=ROUNDS,
                    )
                )
    return [*rows, _remembered()]


def _remembered() -> Row:
    """Batches half of which are answers from memory, beside batches of the window alone.

    The mirror of memory is filled by hand: its members are the trajectories that were inserted, named again and again
    under other prompts. A million in Redis would take minutes and change nothing of a draw.
    """
    tokens, inserts, batches = SIZES["2 KB"]
    mix = [{"source": "online", "share": 0.5}, {"source": "memory", "share": 0.5}]
    sections = {
        "algorithm": {"losses": [{"objective": "supervised"}]},
        "replay": {"mix": mix, "memory": {"per_prompt": REMEMBERED // REMEMBERED_PROMPTS}},
    }
    with _server() as (client, clock):
        sampler = BatchSampler(ReplayStore(client))
        with _service(client, sampler, sections) as (store, replay):
            _Inserts(store, [_trajectory(number, tokens) for number in range(inserts)])(inserts)
            both = _Draws(replay)
            window = _Draws(replay, first=1_000_000, mix=[SourceShare(source=SOURCE_ONLINE, share=1)])
            both(1)
            index = sampler.index(RUN)
            with index.lock:
                names = sorted(index.memory.members())
                for number in range(REMEMBERED):
                    name, prompt_id = names[number % len(names)], f"{number % REMEMBERED_PROMPTS:064x}"
                    index.memory.add(Candidate((name,), prompt_id, 1, True, (0.0,), f"{number:016x}"), number + 1)
            return compare(
                f"sample {BATCH}, half from a memory of {REMEMBERED:,} answers",
                "batches per CPU s",
                "the window alone",
                lambda: batches / clock(lambda: both(batches)),
                lambda: batches / clock(lambda: window(batches)),
                goal=0.5,
                rounds=ROUNDS,
            )


def _against_reverb(size: str, clock: Clock, enter: Callable[[int], None], draw: Callable[[int], None]) -> list[Row]:
    tokens, inserts, batches = SIZES[size]
    insert_goal, sample_goal = REVERB_GOALS[size]
    with _Reverb(tokens) as reverb:
        return [
            compare(
                f"insert {size}",
                "per CPU s",
                "dm-reverb",
                lambda: inserts / clock(lambda: enter(inserts)),
                lambda: inserts / reverb.seconds("insert", inserts),
                goal=insert_goal,
                rounds=ROUNDS,
            ),
            compare(
                f"sample {BATCH} of {size}, decoded",
                "batches per CPU s",
                "dm-reverb",
                lambda: batches / clock(lambda: draw(batches)),
                lambda: batches / reverb.seconds("sample", batches),
                goal=sample_goal,
                rounds=ROUNDS,
            ),
        ]


class _Reverb(contextlib.AbstractContextManager["_Reverb"]):
    """DeepMind Reverb, its server and client in one process of its own."""

    def __init__(self, tokens: int) -> None:
        program = Path(__file__).parent / "peers" / "reverb_server.py"
        self.process = subprocess.Popen(
            [os.environ["SPO_BENCHMARK_REVERB_PYTHON"], str(program), str(tokens)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        while self._answer() != "ready":
            pass

    def seconds(self, order: str, count: int) -> float:
        """CPU seconds that so many of an order took."""
        assert self.process.stdin
        self.process.stdin.write(f"{order} {count}\n")
        self.process.stdin.flush()
        return float(self._answer())

    def __exit__(self, *_: object) -> None:
        self.process.communicate()

    def _answer(self) -> str:
        assert self.process.stdout
        line = self.process.stdout.readline()
        if not line:
            raise RuntimeError("Reverb ended; is dm-reverb installed for SPO_BENCHMARK_REVERB_PYTHON?")
        return line.strip()


class _Inserts:
    """Enters the made trajectories under ever new ids, as ingest does: decoded messages, many groups at once."""

    def __init__(self, store: ReplayStore, made: Sequence[Trajectory]) -> None:
        self.store = store
        self.made = made
        self.number = 0

    def __call__(self, count: int) -> None:
        for start in range(0, count, INSERTS_AT_ONCE):
            batch = self.made[start : start + INSERTS_AT_ONCE]
            for sample in batch:
                self.number += 1
                sample.trajectory_id = f"traj_{self.number:032x}"
            self.store.append(RUN, batch)


class _Puts:
    """The same messages as plain values."""

    def __init__(self, client: RedisClient, made: Sequence[Trajectory]) -> None:
        self.client = client
        self.made = made
        self.number = 0

    def __call__(self, count: int) -> None:
        for start in range(0, count, INSERTS_AT_ONCE):
            with self.client.pipeline(transaction=False) as pipe:
                for sample in self.made[start : start + INSERTS_AT_ONCE]:
                    self.number += 1
                    pipe.set(f"plain:{self.number:032x}", sample.SerializeToString())
                pipe.execute()


class _Draws:
    """The batches of ever new steps, decoded."""

    def __init__(self, replay: RpcClient, first: int = 0, mix: Sequence[SourceShare] = ()) -> None:
        self.replay = replay
        self.step = first
        self.mix = mix

    def __call__(self, count: int) -> None:
        for _ in range(count):
            self.step += 1
            request = SampleBatchRequest(run_id=RUN, batch_size=BATCH, step=self.step, mix=self.mix)
            assert len(self.replay.call("SampleBatch", request).batch) == BATCH


class _Gets:
    """Plain values of random keys, decoded."""

    def __init__(self, client: RedisClient) -> None:
        self.client = client
        self.rng = np.random.default_rng(0)

    def __call__(self, count: int) -> None:
        for _ in range(count):
            with self.client.pipeline(transaction=False) as pipe:
                for number in self.rng.choice(np.arange(1, SIZES["32 KB"][1] + 1), BATCH, replace=False):
                    pipe.get(f"plain:{number:032x}")
                assert all(Trajectory.FromString(payload) for payload in pipe.execute())


def _trajectory(number: int, tokens: int) -> Trajectory:
    """Token ids and log-probs spread as a language model's, three characters of program per token."""
    luck = random.Random(number)
    logprobs = [-luck.expovariate(2 if luck.random() < 0.4 else 2000) for _ in range(tokens)]
    ids = [int(math.exp(luck.uniform(0, 12))) for _ in range(tokens)]
    right = number % 3 == 0
    return Trajectory(
        trajectory_id=f"traj_{number:032x}",
        group_id=f"{RUN}-{number // 4}",
        run_id=RUN,
        prompt_id=f"{number % PROMPTS:064x}",
        sample_index=number % 4,
        source=SOURCE_ONLINE,
        prompt_token_ids=ids[: tokens // 3],
        response_token_ids=ids,
        sampling_logprobs=logprobs,
        reference_logprobs=[logprob * 1.1 for logprob in logprobs],
        response_text="".join(luck.choice("abcdef =+()[]:\n") for _ in range(3 * tokens)),
        verdict=Verdict(outcome=OUTCOME_ACCEPTED if right else OUTCOME_WRONG_ANSWER),
        reward=0.0 if right else -1.0,
        policy_version_first=1,
        policy_version_last=1,
    )


@contextlib.contextmanager
def _server() -> Iterator[tuple[RedisClient, Clock]]:
    """A fresh server, and a measure of the CPU seconds that it and this process spend on something."""
    with tempfile.TemporaryDirectory(prefix="spo-benchmark-") as folder, socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = int(probe.getsockname()[1])
        probe.close()
        process = subprocess.Popen(server_command(port, Path(folder)), stdout=subprocess.DEVNULL)
        try:
            client = connect(f"redis://127.0.0.1:{port}/0")
            cpu = CpuClock(process.pid)

            def clock(body: Callable[[], None]) -> float:
                before = cpu.seconds()
                body()
                # The clocks of processes tick in hundredths.
                time.sleep(0.02)
                return cpu.seconds() - before

            yield client, clock
        finally:
            process.kill()
            process.wait(10)


@contextlib.contextmanager
def _service(
    client: RedisClient, sampler: BatchSampler | None = None, sections: Mapping[str, Any] | None = None
) -> Iterator[tuple[ReplayStore, RpcClient]]:
    """A replay buffer with a run that only samples online, or as `sections` have it, and a client of it."""
    sampler = sampler or BatchSampler(ReplayStore(client))
    own = sections or {"replay": {"mix": [{"source": "online", "share": 1}]}}
    replay_section = {"online_capacity": WINDOW, "samples_per_insert": 1e6, **own["replay"]}
    spec = parse_job_spec(
        {
            "model": {"path": "/pi0", "max_prompt_tokens": 4096, "max_response_tokens": 4096},
            "trainer": {"batch_size": BATCH},
            **own,
            "replay": replay_section,
        }
    )
    client.set(redis_keys.run_spec(RUN), spec_to_json(spec))
    for number in range(PROMPTS):
        prompt_id = f"{number:064x}"
        value = PromptValue(prompt_id=prompt_id, samples=100, successes=number)
        client.hset(redis_keys.run_values(RUN), prompt_id, value.SerializeToString())
    server = RpcServer("127.0.0.1", 0)
    add_ReplayServiceServicer_to_server(ReplayService(sampler), server.server)
    server.start()
    replay = RpcClient("replay-buffer", server.address, ReplayServiceStub)
    try:
        yield sampler.store, replay
    finally:
        replay.close()
        server.stop(1)


SMOKE: dict[str, object] = {
    "WINDOW": 256,
    "ROUNDS": 1,
    "REMEMBERED": 2000,
    "REMEMBERED_PROMPTS": 200,
    "SIZES": {"2 KB": (140, 512, 2), "32 KB": (2400, 256, 1)},
}


if __name__ == "__main__":
    raise SystemExit(run("replay", measure, smoke=SMOKE))
