"""A trainer of four ranks over two hosts, a replica cut over two workers, weights by broadcast: and a pulled cable.

The hosts are network namespaces with a switch between them; the cable of the one with the replica and half of the ranks
is out for a minute. Roles start anew when they end, as systemd and Kubernetes have it.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from spo.local.launcher import server_command
from tests.conftest import require
from tests.e2e.conftest import ROOT, SHORT, demo_spec
from tests.support.two_hosts import HEAD, INTERFACE, OTHER, Host, two_hosts_or_skip

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.nightly, pytest.mark.timeout(2400)]

STEPS, PULLED_AT, CABLE_SECONDS = 24, 8, 60.0
TRAINER = {
    "steps": STEPS,
    "update_interval": 2,
    "checkpoint_interval": 4,
    "zero_stage": 3,
    "sequence_parallel": 2,
}
LIMIT_SECONDS = 1800.0
SHARED = {
    "SPO_REDIS_URL": f"redis://{HEAD}:6379/0",
    "SPO_RPC_TOKEN": "of-the-platform",
    "SPO_ORCHESTRATOR_ADDRESS": f"{HEAD}:7070",
    "SPO_INFERENCE_ADDRESS": f"{OTHER}:7071",
    "SPO_SANDBOX_JUDGE_ADDRESS": f"{HEAD}:7072",
    "SPO_REPLAY_BUFFER_ADDRESS": f"{HEAD}:7073",
    "SPO_VALUE_ESTIMATION_ADDRESS": f"{HEAD}:7074",
    "SPO_VERIFIER_ADDRESS": f"{HEAD}:7076",
    "SPO_TRAINER_WEIGHT_TRANSFER": "broadcast",
    "SPO_INFERENCE_WEIGHT_TRANSFER": "broadcast",
    "SPO_INFERENCE_TENSOR_PARALLEL_SIZE": "2",
    "GLOO_SOCKET_IFNAME": INTERFACE,
    "OMP_NUM_THREADS": "1",
}
PORTS = {"orchestrator": 7070, "sandbox_judge": 7072, "replay_buffer": 7073, "value_estimation": 7074, "verifier": 7076}
RENDEZVOUS = (
    *("--nnodes", "2", "--nproc-per-node", "2", "--max-restarts", "100"),
    *("--rdzv-backend", "c10d", "--rdzv-endpoint", f"{HEAD}:29500", "--rdzv-id", "trainer"),
)
AGAIN = 'while true; do "$@"; echo "ended with $?"; sleep 2; done'


class Roles:
    """Processes on the hosts, started anew whenever they end; each writes a log of its name."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._environment = {
            **{name: value for name, value in os.environ.items() if not name.startswith("SPO_")},
            **SHARED,
            "SPO_STATE_PATH": str(folder / "state"),
            "PYTHONPATH": str(ROOT),
        }
        self._started: list[subprocess.Popen[bytes]] = []

    def start(self, host: Host, name: str, *command: str, **extra: str) -> None:
        again = [require("bash"), "-c", AGAIN, "-", *command]
        with (self.folder / f"{name}.log").open("wb") as log:
            output = {"stdout": log, "stderr": subprocess.STDOUT}
            environment = {**self._environment, **extra}
            self._started.append(
                subprocess.Popen(host.on(again), env=environment, start_new_session=True, cwd=self.folder, **output)
            )

    def service(self, host: Host, service: str, port: int, **own: str) -> None:
        named = {f"SPO_{service.upper()}_{name}": value for name, value in own.items()}
        place = {f"SPO_{service.upper()}_HOST": host.address, f"SPO_{service.upper()}_PORT": str(port)}
        self.start(host, service, sys.executable, "-m", f"services.{service}", **place, **named)

    def ranks(self, host: Host, name: str) -> None:
        """Two of the trainer's four; the head keeps the rendezvous, as in the chart.

        torchrun finds out by the machine's name who keeps it, and namespaces have one between them: it is said.
        """
        keeps = f"is_host={int(host.address == HEAD)}"
        place = ("--rdzv-conf", keeps, "--local-addr", host.address)
        torchrun = (sys.executable, "-m", "torch.distributed.run", *RENDEZVOUS, *place, "-m", "services.trainer")
        self.start(host, name, *torchrun, SPO_TRAINER_HOST=host.address, SPO_TRAINER_PORT="7075")

    def run(self, host: Host, *command: str) -> subprocess.Popen[str]:
        return subprocess.Popen(host.on(command), env=self._environment, stdout=subprocess.PIPE, text=True)

    def said(self, name: str, event: str) -> list[dict[str, Any]]:
        """What a role logged under a name, all its lives in one file."""
        found = (self.folder / f"{name}.log").read_text(errors="replace").splitlines()
        said = [json.loads(line) for line in found if line.startswith("{")]
        return [line for line in said if line.get("event") == event]

    def end(self) -> None:
        for process in self._started:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait(60)


@pytest.fixture
def hosts() -> Iterator[tuple[Host, Host]]:
    with two_hosts_or_skip("two hosts and a pulled cable") as made:
        yield made


@pytest.fixture
def roles(hosts: tuple[Host, Host], tmp_path: Path) -> Iterator[Roles]:
    head, other = hosts
    started = Roles(tmp_path)
    try:
        started.start(
            head, "redis", *server_command(6379, tmp_path / "redis"), "--bind", HEAD, "--protected-mode", "no"
        )
        for service, port in PORTS.items():
            keys = {"HTTP_PORT": "8080", "API_KEY": "of-the-api"} if service == "orchestrator" else {}
            started.service(head, service, port, **keys)
        started.service(other, "inference", 7071)
        started.ranks(head, "trainer-head")
        started.ranks(other, "trainer-other")
        yield started
    finally:
        started.end()


def test_a_job_over_two_hosts_outlives_a_minute_without_the_cable_and_loses_nothing(
    roles: Roles, hosts: tuple[Host, Host], reference_model: Path, tmp_path: Path
) -> None:
    spec = demo_spec(reference_model, SHORT, {"trainer": TRAINER, "evaluation": {"interval_steps": STEPS}})
    (tmp_path / "spec.json").write_text(json.dumps(spec))
    places = (f"http://{HEAD}:8080", SHARED["SPO_REDIS_URL"], str(tmp_path / "state" / "experience"))
    program = str(ROOT / "tests" / "e2e" / "job_of_two_hosts.py")
    seen: list[dict[str, Any]] = []
    pulled_at = restored_at = 0.0
    began = time.monotonic()
    with roles.run(hosts[0], sys.executable, program, str(tmp_path / "spec.json"), *places) as driver:
        assert driver.stdout is not None
        try:
            for line in driver.stdout:
                seen.append(json.loads(line))
                assert time.monotonic() < began + LIMIT_SECONDS, seen[-5:]
                if seen[-1].get("step", 0) >= PULLED_AT and not pulled_at:
                    pulled_at = time.monotonic()
                    hosts[1].plug(out=True)
                    time.sleep(CABLE_SECONDS)
                    hosts[1].plug(out=False)
                    restored_at = time.monotonic()
            assert driver.wait(60) == 0, seen[-5:]
        finally:
            driver.kill()

    (ended,) = [line for line in seen if "state" in line]
    assert ended["state"] == "succeeded", ended["failure"]
    assert ended["steps"] == list(range(1, STEPS + 1))
    assert None not in ended["losses"]
    assert {line["ranks"] for line in roles.said("trainer-head", "job leased")} == {4}
    sources = [line["source"] for line in roles.said("inference", "weights loaded")]
    assert sources.count("broadcast") >= 2, sources
    again = next(line["at"] for line in seen if line["at"] > restored_at and "step" in line)
    print(
        f"{seen[-1]['trajectories']} trajectories, none lost or doubled; the first step "
        f"{again - restored_at:.0f} s after the cable; "
        f"{len(roles.said('trainer-head', 'job leased'))} leases; weights by {sources}"
    )
