"""Programs of others that speak to the API, in an environment of their own: their packages want other versions."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PROGRAMS = ROOT / ".venv-clients" / "bin"
# It wants another version of litellm than the others do.
AIDER = ROOT / ".venv-aider" / "bin" / "aider"
SECONDS = 400


def environment_of_clients(program: str = "openapi-python-client") -> Path:
    """The folder of the environment's programs; skips where one is not there, and fails where CI=true."""
    return _there(PROGRAMS / program).parent


def aider() -> Path:
    """The program aider, in an environment of its own; skips where it is not there, and fails where CI=true."""
    return _there(AIDER)


def node_program(name: str) -> Path:
    """A command line that npm has; skips where it is not there, and fails where CI=true."""
    return _there(ROOT / ".node-clients" / "node_modules" / ".bin" / name)


def _there(program: Path) -> Path:
    if not program.exists():
        message = f"{program} is not there; `make test` installs it (`make test-nightly` all of them)"
        if os.environ.get("CI") == "true":
            pytest.fail(message)
        pytest.skip(message)
    return program


def run_in_clients(program: str, *arguments: str, folder: Path, **environment: str) -> str:
    """What a program of Python prints that runs there; a failed one fails the test with all that it said."""
    bare = {name: os.environ[name] for name in ("PATH", "TMPDIR", "LANG") if name in os.environ}
    own = {
        "HOME": str(folder),
        "HF_HUB_OFFLINE": "1",
        "LITELLM_LOCAL_MODEL_COST_MAP": "True",
        "LANGSMITH_TRACING": "false",
    }
    ran = subprocess.run(
        [PROGRAMS / "python", "-c", program, *arguments],
        cwd=folder,
        env={**bare, **own, **environment},
        capture_output=True,
        text=True,
        timeout=SECONDS,
        check=False,
    )
    assert ran.returncode == 0, ran.stdout[-3000:] + ran.stderr[-5000:]
    return ran.stdout
