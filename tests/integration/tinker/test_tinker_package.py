"""The official `tinker` package, unmodified, against a real orchestrator and a real service on a toy model."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.integration.tinker.conftest import TinkerPlatform

PROGRAM = Path(__file__).with_name("package_client.py")
ABSENT = "NO TINKER HERE: the package `tinker` is not installed; the extra `dev` has it"


def require_package() -> None:
    if importlib.util.find_spec("tinker") is None:
        pytest.fail(ABSENT) if os.environ.get("CI") == "true" else pytest.skip(ABSENT)


# On a busy machine; most of it are imports and small requests, one after the other.
@pytest.mark.slow
@pytest.mark.timeout(200)
def test_the_package_trains_samples_saves_and_goes_on(platform: TinkerPlatform) -> None:
    require_package()
    command = [sys.executable, str(PROGRAM), platform.url, platform.key("mine"), platform.model]
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "TINKER_TELEMETRY": "0"}
    ended = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False, env=environment)
    assert ended.returncode == 0, ended.stderr[-3000:]
    told = json.loads(ended.stdout.splitlines()[-1])
    assert told["losses"] == sorted(told["losses"], reverse=True)
    assert told["losses"][-1] < 0.2 * told["losses"][0]
    assert told["lengths"] == [6, 6, 6, 6] or max(told["lengths"]) <= 6
    # Sampling with a cache and training without one agree to rounding.
    assert told["gap"] < 1e-3
    # At a ratio of 1 both losses are minus the number of sampled tokens.
    assert told["rewarded"] == pytest.approx([-sum(told["lengths"])] * 2, rel=1e-3)
    assert told["same"][0] == pytest.approx(told["same"][1], rel=1e-5)
    # The trained sampler finds the text that was trained on likelier than the base does.
    assert told["learnt"][0] < 0.5 * told["learnt"][1]
    assert told["first_is_unknown"]
    assert "is not offered" in told["refused"]
    assert told["path"].removeprefix("tinker://").partition("/")[0] in told["runs"]
