"""A job that trains an adapter, on the whole platform: killed, resumed, forked, exported; pass@1 rises."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest
from peft import PeftModel
from transformers import AutoModelForCausalLM
from typer.testing import CliRunner

from spo.cli.app import app
from spo.client import Client
from spo.reproduce.plan import merged
from spo.spec.section import read_spec
from spo.testing.peers import wait_until
from tests.e2e.live.conftest import on_its_day
from tests.support.platform import child_of, wait_for_progress

RECIPE = Path(__file__).parents[3] / "deploy" / "recipes" / "toy" / "lora.yaml"
SHORT = {
    "tasks": {"train_problems": 40, "evaluation_problems": 40},
    "value": {"samples": 32},
    "trainer": {"steps": 40, "checkpoint_interval": 10},
    "evaluation": {"interval_steps": 40, "samples": 10, "ks": [1]},
}

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.cpu_seconds(400), pytest.mark.timeout(1800)]


@on_its_day("lora")
def test_an_adapter_learns_through_a_killed_trainer_and_is_forked_and_exported(
    live: Any, client: Client, tmp_path: Path, reference_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = merged(read_spec(RECIPE), SHORT, {"model": {"path": str(reference_model)}})
    job_id = client.submit(spec).id
    wait_for_progress(client, job_id, lambda job: job.progress.step >= 15)
    trainer = child_of(live.platform, "trainer")
    restarts, killed = trainer.restarts, trainer.pid
    assert killed is not None
    os.kill(killed, signal.SIGKILL)
    wait_until(lambda: trainer.restarts > restarts, "the trainer's next life", 60)
    job = client.wait(job_id, 1200)
    assert job.state == "succeeded", job.failure
    before, *_, after = [found.pass_at_k["1"].value for found in client.evaluations(job_id)]
    print(f"pass@1 {before:.3f} -> {after:.3f}")
    assert after > before

    newest = client.weights(job_id)[-1]
    whole = sum(file.stat().st_size for file in reference_model.glob("*.safetensors"))
    print(f"{newest.size_bytes} of {whole} bytes")
    assert newest.size_bytes < whole / 2
    overrides = {"trainer": {"steps": 10}, "evaluation": {"interval_steps": 10}}
    fork = client.wait(client.fork(job_id, version=newest.version, overrides=overrides).id, 300)
    assert fork.state == "succeeded", fork.failure

    monkeypatch.setenv("SPO_API_URL", live.url)
    for name, options in (("adapter", []), ("merged", ["--merge"])):
        ran = CliRunner().invoke(app, ["export", job_id, str(tmp_path / name), *options])
        assert ran.exit_code == 0, ran.output
    base = AutoModelForCausalLM.from_pretrained(reference_model)
    PeftModel.from_pretrained(base, str(tmp_path / "adapter"))
    AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    assert json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())["r"] == 8
