"""Services as processes of their own, forked from one that has loaded their libraries: once for all tests of a worker.

What starts from nothing is tested in tests/integration/service and by `make demo`; everywhere else loading torch and
the engine again and again is half of what a test costs.
"""

from __future__ import annotations

import atexit
import os
import tempfile
from collections.abc import Mapping
from functools import cache
from pathlib import Path

import psutil

from spo.local.launcher import WARM_MODULES
from spo.local.warm_parent import WarmParent, WarmProcess
from spo.testing.peers import wait_until
from tests.support.budget import charge_to_nobody

LOADED_SECONDS = 240
MODELS = tuple(module for service in WARM_MODULES.values() for module in service)
# Of the orchestrator, which needs none of the models' libraries: four seconds of every start.
ORCHESTRATOR = ("services.orchestrator.service", "services.orchestrator.http.app")


@cache
def warm_parent(modules: tuple[str, ...] = MODELS) -> WarmParent:
    """The one of this process with these modules, begun at first use, ready.

    Call it from the thread that runs the tests.
    """
    folder = Path(tempfile.mkdtemp(prefix="spo-warm-"))
    threads = {"OMP_NUM_THREADS": "1", "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "TOKENIZERS_PARALLELISM": "false"}
    parent = WarmParent(modules, {**os.environ, **threads}, folder / "warm-parent.log")
    parent.begin()
    atexit.register(parent.close)
    wait_until(lambda: parent.is_ready() or parent.is_gone(), "the services' libraries are loaded", LOADED_SECONDS)
    assert parent.pid is not None
    if not parent.is_gone():
        times = psutil.Process(parent.pid).cpu_times()
        charge_to_nobody(times.user + times.system)
    return parent


def start_warm(module: str, environment: Mapping[str, str], log_path: Path) -> WarmProcess:
    """`python -m module` with this environment and no other; its output is appended to log_path."""
    parent = warm_parent(ORCHESTRATOR if module == "services.orchestrator" else MODELS)
    process = parent.start(module, environment, log_path)
    assert process is not None, "the libraries' process has ended, its log says why"
    return process
