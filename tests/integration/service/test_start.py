"""What a role imports, and that its probes are answered while it does."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from spo.rpc.healthcheck import why_not_serving
from spo.testing.peers import wait_until

HEAVY = ("torch", "vllm", "deepspeed", "transformers")
LIGHT_ROLES = ("orchestrator", "replay_buffer", "sandbox_judge", "verifier")
HEAVY_ROLES = ("inference", "value_estimation", "trainer")
# The modules that a role has before its `main` begins.
IMPORTED = "import json, sys, services.{role}.__main__; print(json.dumps([m for m in {heavy} if m in sys.modules]))"
LOOKS_SECONDS = 60.0


@pytest.mark.parametrize("role", [*LIGHT_ROLES, *HEAVY_ROLES])
def test_no_role_imports_a_model_library_before_its_probes_are_answered(role: str) -> None:
    code = IMPORTED.format(role=role, heavy=HEAVY)
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True)
    assert json.loads(ended.stdout.splitlines()[-1]) == []


@pytest.mark.parametrize("role", HEAVY_ROLES)
def test_a_role_that_loads_says_so_to_its_probes(role: str, redis_server: str, tmp_path: Path, free_port: int) -> None:
    settings = {
        "SPO_REDIS_URL": redis_server,
        "SPO_STATE_PATH": str(tmp_path),
        f"SPO_{role.upper()}_PORT": str(free_port),
    }
    with subprocess.Popen([sys.executable, "-m", f"services.{role}"], env=os.environ | settings) as process:
        try:
            said = wait_until(lambda: _reason(f"127.0.0.1:{free_port}"), "an answer to the probe", LOOKS_SECONDS)
        finally:
            process.kill()
    assert said == "loads its libraries"


def _reason(address: str) -> str:
    found = why_not_serving(address)
    return "" if found == "it does not answer" else found
