"""Tier docker against a real engine, with an image of this machine's interpreter."""

from __future__ import annotations

import gc
import warnings
from collections.abc import Iterator
from pathlib import Path

import docker
import psutil
import pytest

from services.sandbox_judge.docker import LABEL, ContainerZygote
from services.sandbox_judge.executor import JudgeFault
from services.sandbox_judge.probe import choose_tier, why_not
from services.sandbox_judge.program_judge import ProgramJudge
from services.sandbox_judge.sandbox_worker import Role, SandboxWorker
from services.sandbox_judge.settings import Settings
from spo.errors import NotReady
from spo.v1 import verdict_pb2
from spo.v1.verdict_pb2 import Limits, Outcome
from tests.support.docker_engine import INTERPRETER, interpreter_archive, running_engine

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(240),
    # The SDK leaves sockets to the garbage collector when an engine does not answer.
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
]

IMAGE = "spo-test-interpreter"


@pytest.fixture(autouse=True)
def collected() -> Iterator[None]:
    """What is left to the garbage collector is collected here, not in somebody else's test."""
    yield
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)
        gc.collect()


@pytest.fixture(scope="module")
def engine_url() -> Iterator[str]:
    with running_engine() as url:
        yield url


@pytest.fixture(scope="module")
def image(engine_url: str) -> Iterator[str]:
    engine = docker.DockerClient(base_url=engine_url, timeout=120)
    engine.api.import_image_from_data(interpreter_archive(), repository=IMAGE)
    yield IMAGE
    engine.images.remove(IMAGE, force=True)
    engine.close()


@pytest.fixture
def settings(engine_url: str, image: str, monkeypatch: pytest.MonkeyPatch) -> Settings:
    monkeypatch.setenv("DOCKER_HOST", engine_url)
    return Settings(isolation="docker", docker_image=image, docker_python=INTERPRETER)


def containers(engine_url: str) -> list[str]:
    engine = docker.DockerClient(base_url=engine_url)
    try:
        return [each.short_id for each in engine.containers.list(all=True, filters={"label": LABEL})]
    finally:
        engine.close()


def outcomes(worker: SandboxWorker, *programs: str) -> list[str]:
    tests = verdict_pb2.TestSet(
        tests=[verdict_pb2.TestCase(stdin=b"21\n", stdout=b"42")],
        limits=Limits(cpu_seconds=0.5, wall_seconds=1, memory_bytes=64 << 20, output_bytes=1 << 16),
    )
    program_judge = ProgramJudge(1 << 16)
    verdicts = [program_judge.judge(worker, program, "python", tests) for program in programs]
    return [Outcome.Name(verdict.outcome).removeprefix("OUTCOME_").lower() for verdict in verdicts]


def test_programs_are_judged_in_a_container_and_nothing_of_it_is_left(settings: Settings, engine_url: str) -> None:
    assert choose_tier(settings) == "docker"
    worker = SandboxWorker("docker", 0, settings)
    try:
        assert outcomes(
            worker,
            "print(2 * int(input()))",
            "while True: pass",
            "import time; time.sleep(9)",
            "x = bytearray(100 << 20)",
            "while True: print('x' * 999)",
            "import os; os.fork()",
            "open('/etc/hostname')",
            "open('/judge/control')",
            "import socket; socket.socket()",
            "import ctypes; ctypes.CDLL(None).ptrace(0, 0, 0, 0)",
            "open('/tmp/left', 'w').write('x')",
            "import os; print(42 if os.listdir('/tmp') == [] else 'left')",
        ) == [
            "accepted",
            "cpu_time_limit",
            "wall_time_limit",
            "memory_limit",
            "output_limit",
            "runtime_error",
            "runtime_error",
            "runtime_error",
            "runtime_error",
            "security_violation",
            "wrong_answer",
            "accepted",
        ]
        assert len(containers(engine_url)) == 1
        zygote = psutil.Process(worker.zygote(Role.PROGRAM).pid)
        assert zygote.uids().real != 0
        assert len(set(zygote.net_connections())) == 0
    finally:
        worker.close()
    assert containers(engine_url) == []
    assert not zygote.is_running()


def test_a_container_that_is_killed_costs_a_fault_and_no_verdict(settings: Settings, engine_url: str) -> None:
    worker = SandboxWorker("docker", 0, settings)
    try:
        worker.zygote(Role.PROGRAM)
        engine = docker.DockerClient(base_url=engine_url)
        engine.containers.list(filters={"label": LABEL})[0].kill()
        engine.close()
        with pytest.raises(JudgeFault):
            outcomes(worker, "print(42)")
        worker.close()
        assert outcomes(worker, "print(42)") == ["accepted"]
    finally:
        worker.close()


def test_a_runtime_that_the_engine_lacks_is_no_tier(settings: Settings) -> None:
    reason = why_not("docker", settings.model_copy(update={"docker_runtime": "no-such-runtime"}))

    assert reason is not None
    assert "no-such-runtime" in reason


def test_docker_does_for_a_floor_below_it_only(settings: Settings) -> None:
    with pytest.raises(NotReady, match="below the required namespaces"):
        choose_tier(settings.model_copy(update={"minimum_isolation": "namespaces+seccomp"}))


def test_without_an_engine_the_judge_does_not_serve(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DOCKER_HOST", f"unix://{tmp_path}/absent")
    settings = Settings(isolation="docker", docker_image="any", docker_folder=str(tmp_path))

    with pytest.raises(NotReady, match="no safe way") as refusal:
        choose_tier(settings)
    assert refusal.value.code == "no_isolation"
    with pytest.raises(JudgeFault, match="Docker engine"):
        ContainerZygote(0, settings)
    assert list(tmp_path.iterdir()) == []
