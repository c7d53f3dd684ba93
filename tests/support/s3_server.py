"""A real S3 server (moto) for tests of what lies in buckets; skips loudly where it cannot be installed, fails in CI."""

from __future__ import annotations

import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest

from tests.conftest import free_port

SERVER = Path(__file__).parents[2] / ".venv-s3" / "bin" / "moto_server"
START_SECONDS = 60.0


@dataclass(frozen=True)
class S3Server:
    """A running server; `log` has a line per request, `pid` is its process."""

    url: str
    log: Path
    pid: int = 0

    def bucket(self, name: str) -> None:
        """Make an empty bucket."""
        httpx.put(f"{self.url}/{name}", trust_env=False, timeout=30).raise_for_status()

    def environment(self) -> dict[str, str]:
        """What clients need to know."""
        return {
            "AWS_ENDPOINT_URL": self.url,
            "AWS_ACCESS_KEY_ID": "tests",
            "AWS_SECRET_ACCESS_KEY": "tests",
            "AWS_REGION": "us-east-1",
        }

    def requests(self, *words: str) -> int:
        """Requests so far whose line in the log holds all the words."""
        return sum(all(word in line for word in words) for line in self.log.read_text().splitlines())


@contextmanager
def serve_s3(folder: Path) -> Iterator[S3Server]:
    """Run a server until the block ends."""
    port = free_port()
    program = os.environ.get("SPO_TEST_S3_SERVER", str(SERVER))
    if shutil.which(program) is None:
        message = f"{program} is not there; `make test` installs it"
        pytest.fail(message) if os.environ.get("CI") == "true" else pytest.skip(message)
    log = folder / "s3.log"
    with log.open("w") as output:
        process = subprocess.Popen([program, "-H", "127.0.0.1", "-p", str(port)], stdout=output, stderr=output)
    try:
        server = S3Server(f"http://127.0.0.1:{port}", log, process.pid)
        deadline = time.monotonic() + START_SECONDS
        while not _answers(server.url):
            assert process.poll() is None, f"the S3 server ended: {log.read_text()[-500:]}"
            assert time.monotonic() < deadline, "the S3 server does not answer"
            time.sleep(0.1)
        yield server
    finally:
        process.terminate()
        process.wait(20)


def _answers(url: str) -> bool:
    try:
        return httpx.get(url, trust_env=False, timeout=5).status_code == 200
    except httpx.HTTPError:
        return False
