"""A request or a weight version that kills engines fails by itself: the engine is a double that dies as it is told."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import CancelledError, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import redis

from services.inference.engine import Sample, SampleRequest
from services.inference.engine_thread import EngineDeaths, EngineThread, SampleGroup, engine_failed
from services.inference.rollouts import RolloutWorker
from services.inference.service import InferenceService, ServedRuns
from services.inference.settings import Settings
from services.inference.weights import Weights
from spo import redis_keys
from spo.errors import InvalidInput, NotReady, Unreachable
from spo.messaging.streams.entries import publish
from spo.messaging.streams.recovery import WORK_DEATHS, asked_to_stop
from spo.model.tokenizer import load_tokenizer
from spo.rpc.client import RpcClient, generate
from spo.rpc.server import RpcServer
from spo.spec.tasks import ModelSpec
from spo.testing.peers import wait_until
from spo.testing.trainer import write_random_llama
from spo.v1.inference_service_pb2 import GenerateRequest
from spo.v1.inference_service_pb2_grpc import InferenceServiceStub, add_InferenceServiceServicer_to_server
from spo.v1.prompt_pb2 import Prompt, PromptGroup, Sampling

RUN = "job_01"
WAIT_SECONDS = 60.0
POISON_SEED = 666
REFERENCE = Weights("", 0, "hash", ())


TASKS = SimpleNamespace(harness=None)


class FragileEngine:
    """Samples two tokens a sequence; dies of sequences that `kills` names, and of versions in `bad_versions`."""

    def __init__(self, kills: Callable[[SampleRequest], bool], bad_versions: tuple[int, ...] = ()) -> None:
        self.kills = kills
        self.bad_versions = bad_versions
        self.running: dict[str, SampleRequest] = {}
        self.most_at_once: list[int] = []
        self.version = 0

    def add(self, request_id: str, request: SampleRequest) -> None:
        self.running[request_id] = request

    def step(self) -> list[tuple[str, Sample]]:
        self.most_at_once.append(len(self.running))
        if any(map(self.kills, self.running.values())):
            raise RuntimeError("a long story\nCUDA error: an illegal memory access was encountered")
        done = [(name, Sample((5, 6), (-0.1, -0.2), True, self.version, self.version)) for name in self.running]
        self.running = {}
        return done

    def abort(self, request_ids: list[str]) -> None:
        for request_id in request_ids:
            self.running.pop(request_id, None)

    def load(self, paths: object, version: int) -> None:
        if version in self.bad_versions:
            raise RuntimeError(f"version {version} has the wrong layout")
        self.version = version


def a_request(seed: int = 1) -> SampleRequest:
    return SampleRequest((1, 2), 1.0, 1.0, 4, seed)


@dataclass
class Replica:
    """What a process is to others: whoever dies is started again, as the launcher does with processes."""

    client: redis.Redis
    model_path: Path
    kills: Callable[[SampleRequest], bool]
    starts: int = 0
    groups_in_hand: int = 1000

    def __post_init__(self) -> None:
        self.tokenizer = load_tokenizer(self.model_path)
        self._lock = threading.Lock()
        self._thread = self._start()

    def _start(self) -> EngineThread:
        self.starts += 1
        thread = EngineThread(lambda: FragileEngine(self.kills), REFERENCE, Settings(), EngineDeaths(self.client))  # type: ignore[arg-type, return-value]
        thread.start()
        assert thread.ready.wait(WAIT_SECONDS)
        return thread

    def serving(self, run_id: str) -> Any:
        with self._lock:
            if self._thread.failure:
                self._thread = self._start()
        model = ModelSpec(path=str(self.model_path), max_prompt_tokens=100)
        return SimpleNamespace(
            run_id=run_id,
            tenant="",
            engine=self._thread,
            tokenizer=self.tokenizer,
            sampler="double",
            spec=SimpleNamespace(model=model, algorithm=SimpleNamespace(anchors_by_rollouts=False), tasks=TASKS),
            engine_spec=SimpleNamespace(max_tokens=1000),
            end_token_ids=(),
        )


@pytest.fixture
def inference(redis_client: redis.Redis, tmp_path: Path) -> Iterator[tuple[RpcClient, Replica]]:
    write_random_llama(tmp_path / "model", seed=0)
    # A group's requests have seeds of their own: the poison is in the top-p, which they share.
    replica = Replica(redis_client, tmp_path / "model", lambda request: request.top_p == 0.5)
    server = RpcServer("127.0.0.1", 0)
    deaths, runs = EngineDeaths(redis_client), ServedRuns(redis_client)
    service = InferenceService(replica, "replica", deaths, runs, streams=8)  # type: ignore[arg-type]
    add_InferenceServiceServicer_to_server(service, server.server)
    server.start()
    client = RpcClient("inference", server.address, InferenceServiceStub)
    yield client, replica
    client.close()
    server.stop(0)


def group(number: int, top_p: float = 1.0) -> GenerateRequest:
    sampling = Sampling(samples=2, temperature_min=1, temperature_max=1, top_p=top_p, max_tokens=4, seed=number)
    prompt = Prompt(prompt_id="prompt", text="a statement")
    return GenerateRequest(group=PromptGroup(group_id=f"g{number}", run_id=RUN, prompt=prompt, sampling=sampling))


def test_a_request_that_kills_engines_is_found_among_others_and_fails_by_name(
    inference: tuple[RpcClient, Replica],
) -> None:
    client, replica = inference

    def ask(request: GenerateRequest) -> int:
        answer = client.call_patiently(
            "Generate", request, WAIT_SECONDS, patience_seconds=WAIT_SECONDS, stop=threading.Event()
        )
        return len(answer.group.trajectories)

    with ThreadPoolExecutor(12) as pool:
        poisoned = pool.submit(ask, group(POISON_SEED, top_p=0.5))
        others = [pool.submit(ask, group(number)) for number in range(11)]
        assert [other.result(WAIT_SECONDS) for other in others] == [2] * 11, "all others are answered"
        with pytest.raises(InvalidInput, match="CUDA error: an illegal memory access was encountered") as refused:
            poisoned.result(WAIT_SECONDS)

    assert refused.value.code == "kills_engine"
    assert replica.starts <= 2 + WORK_DEATHS.alone, "one death in company, the others alone, and no crash loop"
    assert ask(group(12)) == 2


def test_a_prompt_of_the_stream_that_kills_engines_becomes_a_dead_letter_by_name_and_the_others_rollouts(
    redis_client: redis.Redis, inference: tuple[RpcClient, Replica]
) -> None:
    _, replica = inference
    redis_client.set(redis_keys.run_spec(RUN), "{}")
    prompts = [group(number).group for number in range(5)] + [group(POISON_SEED, top_p=0.5).group]
    publish(redis_client, redis_keys.prompts(RUN), [prompt.SerializeToString() for prompt in prompts])
    dead = redis_keys.dead_letters(redis_keys.prompts(RUN))
    settings = Settings(reclaim_after_seconds=1, drain_seconds=2)

    def live_once() -> None:
        """A process: it ends with its engine."""
        stop = threading.Event()
        worker = RolloutWorker(redis_client, replica, f"replica-{replica.starts}", settings)  # type: ignore[arg-type]
        replica.current = lambda: replica.serving(RUN)  # type: ignore[attr-defined]
        threads = [threading.Thread(target=worker.run, args=(stop,))]
        starts = replica.starts
        for thread in threads:
            thread.start()
        wait_until(lambda: replica.starts > starts or is_over(), "the engine dies or all is done", WAIT_SECONDS)
        stop.set()
        for thread in threads:
            thread.join(WAIT_SECONDS)

    def is_over() -> bool:
        return bool(redis_client.xlen(redis_keys.rollouts()) == 5 and redis_client.xlen(dead) == 1)

    while not is_over():
        live_once()
        assert replica.starts <= 3 + WORK_DEATHS.alone, "a crash loop"
    ((_, letter),) = redis_client.xrange(dead)
    assert b"CUDA error: an illegal memory access was encountered [kills_engine]" in letter[b"reason"]


def test_a_group_that_has_to_be_alone_shares_the_engine_with_nobody(redis_client: redis.Redis) -> None:
    engine = FragileEngine(lambda request: False)
    thread = EngineThread(lambda: engine, REFERENCE, Settings(), EngineDeaths(redis_client))  # type: ignore[arg-type, return-value]
    groups = [SampleGroup(RUN, [a_request(), a_request()], None, alone=number in (2, 3)) for number in range(6)]
    for each in groups:
        thread.submit(each)

    thread.start()

    for each in groups:
        each.future.result(WAIT_SECONDS)
    thread.stop()
    assert engine.most_at_once == [4, 2, 2, 4]


def test_a_version_that_kills_engines_is_refused_and_the_loaded_one_keeps_serving(redis_client: redis.Redis) -> None:
    def start() -> EngineThread:
        engine = FragileEngine(lambda request: False, bad_versions=(2,))
        thread = EngineThread(lambda: engine, REFERENCE, Settings(), EngineDeaths(redis_client))  # type: ignore[arg-type, return-value]
        thread.start()
        assert thread.ready.wait(WAIT_SECONDS)
        return thread

    def ask() -> None:
        asked = SampleGroup(RUN, [a_request()], bad)
        thread.submit(asked)
        asked.future.result(WAIT_SECONDS)

    bad = Weights(RUN, 2, "digest of 2", ())
    deaths = 0
    thread = start()
    while True:
        thread.announce(RUN, bad)
        with pytest.raises((NotReady, InvalidInput)) as failed:
            ask()
        if isinstance(failed.value, InvalidInput):
            break
        deaths += 1
        assert deaths <= 1 + WORK_DEATHS.alone, "it kills for ever"
        thread = start()

    assert "version 2 has the wrong layout" in failed.value.message
    assert "version 2 has the wrong layout" in thread.problem
    goes_on = SampleGroup(RUN, [a_request()], None)
    thread.submit(goes_on)
    assert goes_on.future.result(WAIT_SECONDS)[0].version_first == 0
    thread.stop()


def test_what_was_killed_with_its_process_is_done_alone_the_next_time(redis_client: redis.Redis) -> None:
    deaths = EngineDeaths(redis_client)
    killed = deaths.during("group g1 of run job_01")
    assert killed.__enter__() is False
    # The process is gone: nobody leaves the block.
    with deaths.during("group g1 of run job_01") as alone:
        assert alone
    with deaths.during("group g1 of run job_01") as alone:
        assert not alone, "what has ended well is forgotten"


class PatientEngine(FragileEngine):
    """Works for as long as nobody dies; a group never finishes."""

    def step(self) -> list[tuple[str, Sample]]:
        threading.Event().wait(0.01)
        return []


def test_callers_that_go_away_are_no_deaths_and_free_the_engine(
    redis_client: redis.Redis, inference: tuple[RpcClient, Replica]
) -> None:
    client, replica = inference
    engine = PatientEngine(lambda request: False)
    replica._thread = EngineThread(lambda: engine, REFERENCE, Settings(), EngineDeaths(redis_client))  # type: ignore[arg-type, return-value]
    replica._thread.start()
    assert replica._thread.ready.wait(WAIT_SECONDS)
    gone = threading.Event()
    gone.set()
    for patience, stop in [(0.3, None)] * 3 + [(WAIT_SECONDS, gone)] * 3:
        with pytest.raises((Unreachable, NotReady)):
            client.call("Generate", group(1), patience, stop=stop)
        wait_until(lambda: not engine.running, "the abandoned group leaves the engine", WAIT_SECONDS)
        wait_until(lambda: not noted(redis_client), "nothing is held against it", WAIT_SECONDS)
    replica._thread.stop()


def test_parts_come_of_what_finishes_and_their_caller_kills_nothing_by_going_away(
    redis_client: redis.Redis, inference: tuple[RpcClient, Replica]
) -> None:
    client, replica = inference
    whole = generate(client, group(1).group, kept={})
    kept = {0: whole[0]}
    rest = generate(client, group(1).group, kept=kept)
    assert [each.sample_index for each in rest] == [0, 1]
    assert rest[1].trajectory_id == whole[1].trajectory_id
    assert (rest[1].seed, rest[1].temperature) == (whole[1].seed, whole[1].temperature), "drawn as in the whole group"
    with pytest.raises(InvalidInput):
        list(client.parts("GenerateParts", GenerateRequest(group=group(1).group, sample_indexes=[7])))

    engine = PatientEngine(lambda request: False)
    replica._thread = EngineThread(lambda: engine, REFERENCE, Settings(), EngineDeaths(redis_client))  # type: ignore[arg-type, return-value]
    replica._thread.start()
    assert replica._thread.ready.wait(WAIT_SECONDS)
    for _ in range(2 + WORK_DEATHS.alone):
        with pytest.raises(Unreachable):
            generate(client, group(1).group, kept={}, wanted=lambda: not engine.running)
        wait_until(lambda: not engine.running and not noted(redis_client), "it leaves nothing", WAIT_SECONDS)
    replica._thread.stop()

    replica._thread = replica._start()
    with pytest.raises(NotReady, match="illegal memory access"):
        generate(client, group(POISON_SEED, top_p=0.5).group, kept={})
    assert noted(redis_client), "an engine that dies of it is a death"


def test_one_group_that_many_ask_for_at_once_is_in_hand_once(
    redis_client: redis.Redis, inference: tuple[RpcClient, Replica]
) -> None:
    client, _ = inference
    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(lambda _: client.call("Generate", group(1), WAIT_SECONDS), range(8)))
    assert [len(answer.group.trajectories) for answer in answers] == [2] * 8
    assert not noted(redis_client)


def noted(client: redis.Redis) -> dict[bytes, dict[bytes, bytes]]:
    """What is held against work, without reasons."""
    found = {key: client.hgetall(key) for key in client.scan_iter(match="spo:inference:engine_deaths:*")}
    return {key: fields for key, fields in found.items() if fields}


@pytest.mark.parametrize(
    ("error", "ends_process", "deaths"),
    [
        pytest.param(None, False, 0, id="it ends well"),
        pytest.param(CancelledError(), False, 0, id="the caller has gone"),
        pytest.param(TimeoutError(), False, 0, id="a deadline has passed"),
        pytest.param(Unreachable("the engine did not finish"), False, 0, id="a deadline, by name"),
        pytest.param(NotReady("the replica is stopping"), True, 0, id="the engine stops"),
        pytest.param(InvalidInput("a bad prompt"), True, 0, id="it is refused"),
        pytest.param(GeneratorExit(), False, 0, id="a stream that nobody reads any more"),
        pytest.param(SystemExit(0), True, 0, id="the process is asked to stop"),
        pytest.param(KeyboardInterrupt(), True, 0, id="the process is interrupted"),
        pytest.param(OSError("no such file"), False, 0, id="a fault that ends no process"),
        pytest.param(RuntimeError("illegal memory access"), True, 1, id="a fault that ends the process"),
        pytest.param(engine_failed(RuntimeError("illegal memory access")), False, 1, id="the engine died"),
    ],
)
def test_only_what_ended_a_process_is_a_death(
    redis_client: redis.Redis, error: BaseException | None, ends_process: bool, deaths: int
) -> None:
    notes = EngineDeaths(redis_client)
    for _ in range(2):
        with suppress(BaseException), notes.during("loading", ends_process=ends_process):
            if error:
                raise error
    counts = redis_client.hgetall(redis_keys.engine_deaths("loading"))
    assert (int(counts.get(b"in_company", 0)), int(counts.get(b"alone", 0))) == (deaths, deaths)


def test_what_was_suspected_stays_suspected_when_a_caller_gives_up_and_is_forgotten_when_it_ends_well(
    redis_client: redis.Redis,
) -> None:
    killed = EngineDeaths(redis_client).during("work")
    killed.__enter__()
    with suppress(CancelledError), EngineDeaths(redis_client).during("work") as alone:
        assert alone
        raise CancelledError
    assert EngineDeaths(redis_client).suspected("work")
    with EngineDeaths(redis_client).during("work") as alone:
        assert alone
    assert not EngineDeaths(redis_client).suspected("work")


def test_a_process_that_is_asked_to_stop_dies_of_nothing_that_it_has_in_hand(redis_client: redis.Redis) -> None:
    for _ in range(2 * WORK_DEATHS.alone):
        stopped = EngineDeaths(redis_client)
        in_hand = stopped.during("group g1 of run job_01")
        in_hand.__enter__()
        asked_to_stop()
        late = stopped.during("what comes in while it drains")
        late.__enter__()
        stopped.died("a group in the engine", engine_failed(RuntimeError("its workers were interrupted")), alone=True)
    assert not noted(redis_client)


@pytest.mark.parametrize(
    ("error", "refused"),
    [
        (ValueError("Model architectures ['FooForCausalLM'] are not supported for now."), True),
        (KeyError("model.layers.0.mlp.gate.weight"), True),
        (AssertionError("Attempted to load weight (torch.Size([4])) into parameter (torch.Size([8]))"), True),
        (NotImplementedError("no attention backend for it"), True),
        (ValueError("No available memory for the cache blocks."), False),
        (RuntimeError("CUDA error: an illegal memory access was encountered"), False),
        (OSError("Stale file handle"), False),
    ],
)
def test_a_model_that_an_engine_cannot_be_built_of_is_refused_at_once_and_another_failure_is_tried_again(
    redis_client: redis.Redis, error: Exception, refused: bool
) -> None:
    deaths = EngineDeaths(redis_client)
    with pytest.raises(type(error)), deaths.building("building"):
        raise error

    if refused:
        with pytest.raises(InvalidInput, match="is given up on: ") as caught, deaths.building("building"):
            pass
        assert (caught.value.code, str(error.args[0])[:40] in caught.value.message) == ("kills_engine", True)
    else:
        with deaths.building("building"):
            pass
