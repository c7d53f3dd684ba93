"""The grace after SIGTERM is the process's, however many of its threads are slow."""

from __future__ import annotations

import signal
import subprocess
import sys
import time

LIMIT_SECONDS = 60.0
DRAIN_SECONDS = 3.0
SLOW_WORKERS = 5
# Five threads that end too late; once in its loop the process says so.
PROCESS = f"""
import time
from spo.service.process import ServiceProcess
from spo.service.settings import ServiceSettings

class Settings(ServiceSettings, service="sandbox_judge"):
    pass

def slow(stop):
    stop.wait()
    time.sleep(60)

process = ServiceProcess("sandbox-judge", Settings(drain_seconds={DRAIN_SECONDS}))
process.workers = [slow] * {SLOW_WORKERS}
raise SystemExit(process.run())
"""


def test_slow_threads_share_one_deadline() -> None:
    with subprocess.Popen([sys.executable, "-c", PROCESS], stderr=subprocess.PIPE, text=True) as process:
        try:
            assert process.stderr is not None
            assert any('"serving"' in line for line in process.stderr)
            asked = time.monotonic()
            process.send_signal(signal.SIGTERM)
            said = process.stderr.read()
            assert process.wait(LIMIT_SECONDS) == 0
            took_seconds = time.monotonic() - asked
        finally:
            process.kill()
    assert "workers still busy" in said
    assert DRAIN_SECONDS <= took_seconds < 2 * DRAIN_SECONDS + 5
