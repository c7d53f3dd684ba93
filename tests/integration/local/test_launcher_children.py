"""The launcher's children are real processes: they are restarted, stopped in order, and never outlive the launcher."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from spo.errors import Conflict, NotReady, Unreachable
from spo.local.die_with_parent import bound_to_this_process
from spo.local.judge_client import Child, read_state, running_platforms, write_state
from spo.local.launcher import LauncherSettings, LocalPlatform, claimed_port, free_ports, gpu_environment
from spo.testing.peers import wait_until

SLEEPER = [sys.executable, "-S", "-c", "import time; print('up', flush=True); time.sleep(600)"]
STUBBORN = [
    sys.executable,
    "-S",
    "-c",
    "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('up', flush=True); time.sleep(600)",
]


def child_of(command: list[str], folder: Path) -> Child:
    log_path = folder / "child.log"
    return Child("child", command, os.environ, log_path, "nowhere", lambda: "up" in log_path.read_text())


def test_a_killed_child_is_restarted_and_counted(tmp_path: Path) -> None:
    child = child_of(SLEEPER, tmp_path)
    child.start()
    try:
        wait_until(child.is_ready, "the first start")
        first = child.pid
        assert first is not None
        os.kill(first, signal.SIGKILL)
        wait_until(child.revive, "the restart")
        assert child.restarts == 1
        assert child.pid != first
        assert child.exit_status == -signal.SIGKILL
    finally:
        child.stop_by(time.monotonic())


def test_a_child_that_keeps_dying_is_restarted_ever_more_slowly(tmp_path: Path) -> None:
    child = child_of([sys.executable, "-S", "-c", "raise SystemExit(3)"], tmp_path)
    child.start()
    pauses = []
    for _ in range(2):
        wait_until(lambda: not child.is_running(), "the death")
        died_at = time.monotonic()
        wait_until(child.revive, "the restart")
        pauses.append(time.monotonic() - died_at)
    child.stop_by(time.monotonic())
    assert pauses[1] > 1.5 * pauses[0]
    assert child.exit_status == 3


def test_a_child_that_ignores_sigterm_is_killed_at_the_deadline(tmp_path: Path) -> None:
    child = child_of(STUBBORN, tmp_path)
    child.start()
    wait_until(child.is_ready, "the start")
    child.ask_to_stop()
    assert child.stop_by(time.monotonic() + 0.3) is False
    assert not child.is_running()


def test_what_a_dead_child_had_started_is_ended_with_it(tmp_path: Path) -> None:
    parent = "import subprocess, sys; print(subprocess.Popen(['sleep', '600']).pid, flush=True); raise SystemExit(1)"
    child = child_of([sys.executable, "-S", "-c", parent], tmp_path)
    child.start()
    wait_until(lambda: not child.is_running(), "the death")
    child.revive()
    grandchild = int((tmp_path / "child.log").read_text().splitlines()[0])
    wait_until(lambda: not _lives(grandchild), "the end of the grandchild")
    child.stop_by(time.monotonic())


def test_no_child_outlives_a_launcher_that_was_killed(tmp_path: Path) -> None:
    pid_file = tmp_path / "pid"
    script = (
        "import subprocess, sys, time\n"
        "from pathlib import Path\n"
        "from spo.local.die_with_parent import bound_to_this_process\n"
        "command = bound_to_this_process([sys.executable, '-S', '-c', 'import time; time.sleep(600)'])\n"
        "child = subprocess.Popen(command)\n"
        f"Path({str(pid_file)!r}).write_text(str(child.pid))\n"
        "time.sleep(600)\n"
    )
    launcher = subprocess.Popen([sys.executable, "-c", script])
    wait_until(lambda: pid_file.exists() and pid_file.read_text() != "", "the start")
    child = int(pid_file.read_text())
    wait_until(lambda: "sleep(600)" in " ".join(psutil.Process(child).cmdline()[-1:]), "the command to run")
    launcher.kill()
    launcher.wait(10)
    wait_until(lambda: not _lives(child), "the end of the child")


def test_a_child_whose_launcher_is_already_gone_does_not_start() -> None:
    command = bound_to_this_process([sys.executable, "-c", "print('ran')"])
    orphan = [*command[:4], "1", *command[5:]]
    finished = subprocess.run(orphan, capture_output=True, timeout=20, check=False)
    assert finished.returncode == 1
    assert finished.stdout == b""


def test_the_state_of_a_dead_launcher_counts_as_none(tmp_path: Path) -> None:
    state_file = tmp_path / "gone" / "state.json"
    write_state(state_file, {"pid": os.getpid(), "pid_created": 1.0, "http_url": ""})
    assert read_state(state_file) is None
    created = psutil.Process().create_time()
    write_state(state_file, {"pid": os.getpid(), "pid_created": created, "http_url": ""})
    assert [state["pid"] for state in running_platforms(tmp_path)] == [os.getpid()]


def test_ports_are_distinct_and_a_taken_preferred_port_is_replaced() -> None:
    names = [f"service-{number}" for number in range(20)]
    ports = free_ports(names, preferred={})
    assert len(set(ports.values())) == 20
    first = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    assert first < 21_000 or all(port < first for port in ports.values()), "a connection could be given one meanwhile"
    again = free_ports(["http"], preferred={"http": 1})
    assert again["http"] > 0


def test_a_platform_without_its_redis_says_where_it_looked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPO_REDIS_URL", "redis://127.0.0.1:1/0")
    monkeypatch.setenv("SPO_REDIS_WAIT_SECONDS", "0.2")
    platform = LocalPlatform("broken", tmp_path / "state", LauncherSettings(runs_path=tmp_path / "runs"))
    with pytest.raises(Unreachable, match=re.escape("Redis at 127.0.0.1:1/0 did not answer")), platform:
        pass


def test_a_platform_whose_services_keep_dying_says_which_and_why(tmp_path: Path) -> None:
    settings = LauncherSettings(runs_path=tmp_path / "runs", start_seconds=120, drain_seconds=2)
    no_redis = {"SPO_REDIS_URL": "redis://127.0.0.1:1/0", "SPO_REDIS_WAIT_SECONDS": "0.2"}
    with LocalPlatform("broken", tmp_path / "state", settings, extra_environment=no_redis) as platform:
        with pytest.raises(NotReady) as failure:
            platform.wait_until_ready()
        assert "exit status 1" in failure.value.message
        assert "Redis at 127.0.0.1:1/0 did not answer" in failure.value.message
        children = [child.pid for child in platform.children if child.pid]
    assert not any(_lives(pid) for pid in children)
    assert not platform.state_file.exists()


def _lives(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def test_the_port_of_the_api_has_both_its_names(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPO_ORCHESTRATOR_HTTP_PORT", "9000")
    assert LauncherSettings().http_port == 9000
    monkeypatch.setenv("SPO_LAUNCHER_HTTP_PORT", "9001")
    assert LauncherSettings().http_port == 9001
    assert LauncherSettings(http_port=0).http_port == 0


def test_a_port_that_was_set_and_is_taken_is_an_error(tmp_path: Path) -> None:
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        listening.listen()
        settings = LauncherSettings(runs_path=tmp_path / "runs", http_port=listening.getsockname()[1])

        with pytest.raises(Conflict, match="taken by another program"):
            LocalPlatform("p", tmp_path / "state", settings).__enter__()


def test_of_platforms_that_start_at_once_one_has_the_port(tmp_path: Path) -> None:
    (port,) = free_ports(["http"], {}).values()
    settings = LauncherSettings(runs_path=tmp_path / "runs", http_port=port)
    # Of one that has found the port free and does not listen yet.
    with claimed_port(port) as earlier:
        assert earlier
        with pytest.raises(Conflict, match="taken by another program"):
            LocalPlatform("later", tmp_path / "state", settings).__enter__()
    with claimed_port(port) as free_again:
        assert free_again


def test_the_port_of_a_server_that_just_ended_is_free() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        port = listening.getsockname()[1]
        calling = socket.create_connection(("127.0.0.1", port))
        # Who closes first waits for late packets, for a minute.
        listening.accept()[0].close()
        assert calling.recv(1) == b""
        calling.close()

    assert free_ports(["http"], preferred={"http": port})["http"] == port


@pytest.mark.parametrize(
    ("gpus", "ranks", "width", "expected"),
    [
        ("", 1, 1, {"trainer": None, "inference": None, "value-estimation": None}),
        ("0", 1, 1, {"trainer": "0", "inference": "0", "value-estimation": "0"}),
        ("0 1", 1, 1, {"trainer": "0", "inference": "1", "value-estimation": "1"}),
        ("0 1 2 3", 1, 1, {"trainer": "0", "inference": "1", "inference-2": "2", "inference-3": "1"}),
        ("0 1 2 3", 8, 1, {"trainer": "0,1,2", "inference": "3", "value-estimation": "3"}),
        (
            "4 5 6 7 8 9 10 11",
            3,
            2,
            {"trainer": "4,5,6", "inference": "7,8", "inference-2": "9,10", "inference-3": "7,8"},
        ),
        ("0 1 2", 1, 1, {"sandbox-judge": "0,1,2", "value-estimation": "2"}),
    ],
)
def test_each_role_of_a_machine_has_its_own_gpus_as_far_as_there_are(
    gpus: str, ranks: int, width: int, expected: dict[str, str | None]
) -> None:
    for name, devices in expected.items():
        found = gpu_environment(name, gpus.split(), ranks, width)
        assert found.get("CUDA_VISIBLE_DEVICES") == devices
        shares = name.startswith("inference") and devices == expected.get("value-estimation") is not None
        assert ("SPO_INFERENCE_GPU_MEMORY_UTILIZATION" in found) == shares


def test_a_service_that_finds_no_room_for_its_log_is_started_when_there_is_some(tmp_path: Path) -> None:
    child = child_of(SLEEPER, tmp_path / "no-folder-yet")
    (tmp_path / "no-folder-yet").write_text("in the way of the log's folder")
    child.start()
    assert (child.pid, child.is_running()) == (None, False)
    (tmp_path / "no-folder-yet").unlink()
    wait_until(child.revive, "the start")
    try:
        wait_until(child.is_ready, "it is up")
    finally:
        child.stop_by(time.monotonic())


def test_a_launcher_whose_folder_is_full_keeps_its_services_and_says_where_they_are_later(
    tiny_disk: Path, fill_disk: Callable[[], Path], tmp_path: Path
) -> None:
    settings = LauncherSettings(http_port=0, runs_path=tiny_disk, start_seconds=60, drain_seconds=1)
    platform = LocalPlatform("full", tmp_path / "state", settings, warm_parent=None)
    platform.children = [child_of(SLEEPER, tmp_path)]
    ballast = fill_disk()
    assert platform._written(platform._state()) is False
    ballast.unlink()
    assert platform._written(platform._state()) is True
    assert json.loads(platform.state_file.read_text())["name"] == "full"
