"""The official `tinker` package, unmodified, against a real orchestrator and a real service on a toy model."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.integration.tinker.conftest import TinkerPlatform, TinkerProcess

PROGRAM = Path(__file__).with_name("package_client.py")
ABSENT = "NO TINKER HERE: the package `tinker` is not installed; the extra `dev` has it"


def require_package() -> None:
    if importlib.util.find_spec("tinker") is None:
        pytest.fail(ABSENT) if os.environ.get("CI") == "true" else pytest.skip(ABSENT)


# On a busy machine; most of it are imports and small requests, one after the other.
@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_package_trains_samples_saves_and_goes_on_after_the_service_was_killed(
    real_platform: TinkerPlatform, tmp_path: Path
) -> None:
    require_package()
    url, key, model = real_platform.url, real_platform.key("mine"), real_platform.model
    log = tmp_path / "client.log"
    with log.open("wb") as errors:
        client = subprocess.Popen(
            [sys.executable, str(PROGRAM), url, key, model],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            env=os.environ | {"HF_HUB_OFFLINE": "1", "TINKER_TELEMETRY": "0"},
        )
    with client:
        assert client.stdout is not None
        assert client.stdout.readline() == "READY TO BE KILLED\n", log.read_text()[-3000:]
        assert isinstance(real_platform.process, TinkerProcess)
        real_platform.process.kill()
        real_platform.process.start()
        output, _ = client.communicate("it is back\n", timeout=300)
        assert client.returncode == 0, log.read_text()[-3000:]
    told = json.loads(output.splitlines()[-1])
    assert "weights/autosave" in told["killed"]["told"]
    assert told["killed"]["stepped"]
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
