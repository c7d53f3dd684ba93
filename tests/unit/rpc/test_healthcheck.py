"""The health check of containers tells a service that serves from one that does not."""

from __future__ import annotations

import subprocess
import sys

import pytest

from spo.rpc.healthcheck import main
from spo.rpc.server import RpcServer


def test_a_service_is_well_only_while_it_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    server = RpcServer("127.0.0.1", 0)
    server.start()
    try:
        assert main([server.address]) == 1
        server.set_serving(False, "version 3:\nits file does not match é")
        assert main([server.address]) == 1
        assert "version 3: its file does not match ?" in capsys.readouterr().err
        server.set_serving(True)
        assert main([server.address]) == 0
        assert main([server.address, "127.0.0.1:1"]) == 1
    finally:
        server.stop(0.1)
    assert "127.0.0.1:1" in capsys.readouterr().err


def test_the_check_imports_little_because_it_starts_so_often() -> None:
    program = "import sys, spo.rpc.healthcheck; print({'redis', 'pydantic', 'torch', 'structlog'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout == "set()\n"
