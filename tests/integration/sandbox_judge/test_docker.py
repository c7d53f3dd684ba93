"""Tier docker against a real engine: a running one, else one of the test's own where it may start it.

No registry is needed: the image is made of this machine's interpreter and the libraries that it loads.
"""

from __future__ import annotations

import gc
import io
import os
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import tempfile
import time
import warnings
from collections.abc import Iterator
from pathlib import Path

import docker
import psutil
import pytest
import requests
from docker.errors import DockerException

from services.sandbox_judge.docker import LABEL, ContainerZygote
from services.sandbox_judge.executor import JudgeFault
from services.sandbox_judge.probe import choose_tier, why_not
from services.sandbox_judge.program_judge import ProgramJudge
from services.sandbox_judge.sandbox_worker import Role, SandboxWorker
from services.sandbox_judge.settings import Settings
from spo.errors import NotReady
from spo.v1 import verdict_pb2
from spo.v1.verdict_pb2 import Limits, Outcome

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(240),
    # The SDK leaves sockets to the garbage collector when an engine does not answer.
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
]

IMAGE = "spo-test-interpreter"
INTERPRETER = os.path.realpath(sys.executable)
PREFIX = Path(sysconfig.get_paths()["stdlib"]).parent.parent
LEFT_OUT = {"site-packages", "test", "idlelib", "tkinter", "ensurepip", "lib2to3", "__pycache__"}
START_SECONDS = 60


def skip(reason: str) -> None:
    pytest.skip(f"TIER DOCKER IS NOT TESTED: {reason}")


def answers(url: str) -> bool:
    try:
        engine = docker.DockerClient(base_url=url, timeout=5)
        try:
            return bool(engine.ping())
        finally:
            engine.close()
    except (DockerException, requests.RequestException):
        return False


@pytest.fixture(autouse=True)
def collected() -> Iterator[None]:
    """What is left to the garbage collector is collected here, not in somebody else's test."""
    yield
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)
        gc.collect()


@pytest.fixture(scope="module")
def engine_url() -> Iterator[str]:
    url = os.environ.get("DOCKER_HOST", "unix:///var/run/docker.sock")
    if answers(url):
        yield url
        return
    dockerd = shutil.which("dockerd", path=f"{os.environ['PATH']}:/usr/sbin")
    if dockerd is None or os.geteuid() != 0:
        skip(f"no engine answers at {url}, and none can be started here")
    folder = Path(tempfile.mkdtemp(prefix="spo-engine-"))
    url = f"unix://{folder}/socket"
    command = f"{dockerd} --host {url} --data-root {folder}/state --exec-root {folder}/run --pidfile {folder}/pid"
    command += " --bridge none --iptables=false --ip6tables=false --storage-driver vfs"
    with (folder / "log").open("w") as log:
        process = subprocess.Popen(command.split(), stdout=log, stderr=log, start_new_session=True)
    try:
        deadline = time.monotonic() + START_SECONDS
        while not answers(url):
            if process.poll() is not None or time.monotonic() > deadline:
                skip(f"dockerd does not start here: {(folder / 'log').read_text()[-500:]}")
            time.sleep(0.2)
        yield url
    finally:
        process.terminate()
        process.wait(30)
        shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(scope="module")
def image(engine_url: str) -> Iterator[str]:
    engine = docker.DockerClient(base_url=engine_url, timeout=120)
    engine.api.import_image_from_data(interpreter_archive(), repository=IMAGE)
    yield IMAGE
    engine.images.remove(IMAGE, force=True)
    engine.close()


def interpreter_archive() -> bytes:
    """A file system with this Python, its library and what they link to, at the places where they are here."""
    modules = sorted((PREFIX / "lib").glob("python3*/lib-dynload/*.so"))
    linked = subprocess.run(["ldd", INTERPRETER, *modules], capture_output=True, text=True, check=True).stdout
    words = {word for line in linked.splitlines() for word in line.split() if not word.endswith(":")}
    files = {INTERPRETER, *(word for word in words if word.startswith("/") and ".so" in word)}
    stdlib = Path(sysconfig.get_paths()["stdlib"])
    content = io.BytesIO()
    with tarfile.open(fileobj=content, mode="w") as archive:
        parents = {str(each) for path in (stdlib, *files) for each in Path(path).parents}
        for name in sorted({*parents, "/proc", "/dev", "/sys", "/tmp", "/etc", "/usr", "/judge"} - {"/"}):
            folder = tarfile.TarInfo(name.lstrip("/"))
            folder.type, folder.mode = tarfile.DIRTYPE, 0o1777 if name == "/tmp" else 0o755
            archive.addfile(folder)
        archive.add(stdlib, filter=lambda entry: None if Path(entry.name).name in LEFT_OUT else entry)
        for path in files:
            entry = archive.gettarinfo(os.path.realpath(path), arcname=path.lstrip("/"))
            with open(os.path.realpath(path), "rb") as file:
                archive.addfile(entry, file)
    return content.getvalue()


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
