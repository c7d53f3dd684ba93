"""The batch script of docs/slurm.md, as it stands there, with real roles and stand-ins for Slurm's own commands."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
from pathlib import Path

import pytest

from spo.local.launcher import server_command
from tests.conftest import require
from tests.e2e.conftest import ROOT, SHORT, demo_spec

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.nightly, pytest.mark.timeout(1200)]

NODES = ("127.0.0.1", "127.0.0.2")
LIMIT_SECONDS = 1000
# Stand-ins, not Slurm: they know the options of the page, and run everything on this machine.
SRUN = """#!/bin/bash
while [[ $1 == -* ]]; do if [ "$1" = -w ]; then echo "$2" >>"$STAND_IN_NODES"; shift; fi; shift; done
exec "$@"
"""
SCONTROL = f"""#!/bin/bash
[ "$1 $2" = "show hostnames" ] && printf '%s\\n' {" ".join(NODES)}
"""


def script() -> str:
    """The page's one script."""
    (found,) = re.findall(r"^```\n(#!/bin/bash\n.*?)^```$", (ROOT / "docs" / "slurm.md").read_text(), re.M | re.S)
    return str(found)


@pytest.fixture
def stand_ins(tmp_path: Path) -> Path:
    """A folder for PATH."""
    folder = tmp_path / "bin"
    folder.mkdir()
    for name, text in {"srun": SRUN, "scontrol": SCONTROL}.items():
        (folder / name).write_text(text)
        (folder / name).chmod(0o755)
    (folder / "valkey-server").symlink_to(server_command(1, tmp_path / "unused")[0])
    return folder


@pytest.fixture
def own_network() -> list[str]:
    """What runs a command with a loopback of its own: the page's ports are fixed."""
    command = [require("unshare"), "--net", require("bash"), "-c", 'ip link set lo up && exec "$@"', "-"]
    require("ip")
    tried = subprocess.run([*command, "true"], capture_output=True, text=True, timeout=20, check=False)
    if tried.returncode:
        pytest.skip(f"NOT TESTED, the script of docs/slurm.md: no network of its own here: {tried.stderr.strip()}")
    return command


def test_the_script_of_the_page_ends_with_its_job(
    stand_ins: Path, own_network: list[str], reference_model: Path, tmp_path: Path
) -> None:
    short = {
        "trainer": {"steps": 4, "checkpoint_interval": 4, "update_interval": 2},
        "evaluation": {"interval_steps": 4},
    }
    (tmp_path / "job.yaml").write_text(json.dumps(demo_spec(reference_model, SHORT, short)))
    (tmp_path / "script.sh").write_text(script())
    (tmp_path / "spo").mkdir()
    places = os.pathsep.join([str(stand_ins), str(Path(shutil.which("spo") or "").parent), os.environ["PATH"]])
    environment = {
        **{name: value for name, value in os.environ.items() if not name.startswith("SPO_")},
        **{"PATH": places, "SCRATCH": str(tmp_path), "SLURM_JOB_NODELIST": "node[1-2]"},
        **{"STAND_IN_NODES": str(tmp_path / "nodes"), "VLLM_ENABLE_V1_MULTIPROCESSING": "0"},
    }
    with (tmp_path / "output").open("wb") as output:
        ran = subprocess.Popen(
            [*own_network, "bash", "script.sh"],
            **{"cwd": tmp_path, "env": environment, "stdout": output, "stderr": output, "start_new_session": True},
        )
        try:
            status = ran.wait(LIMIT_SECONDS)
        finally:
            if ran.poll() is None:
                os.killpg(ran.pid, signal.SIGKILL)
    said = (tmp_path / "output").read_text(errors="replace")
    assert status == 0, said[-6000:]
    assert "succeeded" in said
    assert set((tmp_path / "nodes").read_text().split()) == set(NODES)
