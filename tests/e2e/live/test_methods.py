"""Methods of the recipes as jobs of a running platform: each ends with a higher pass@1 than it began."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from spo.client import Client
from tests.e2e.live.conftest import on_its_day

ROOT = Path(__file__).parents[3]
RECIPES = ROOT / "deploy" / "recipes" / "toy"
STEPS = 40
# Same problems and samples for all, so that the first job that needs Qhat_0 estimates it for the others.
SHORTENED: dict[str, dict[str, Any]] = {
    "tasks": {"train_problems": 40, "evaluation_problems": 40},
    "value": {"samples": 48},
    "trainer": {"steps": STEPS, "checkpoint_interval": STEPS},
    "evaluation": {"interval_steps": STEPS, "samples": 10, "ks": [1]},
}
# One sample per prompt says little of each: it takes more problems and steps to show on held-out ones. Of a residual's
# variance the noise of so few samples of the reference is a sixteenth.
A_STAR_PO: dict[str, dict[str, Any]] = {
    "tasks": {"train_problems": 160},
    "value": {"samples": 16},
    "trainer": {"steps": 2 * STEPS, "checkpoint_interval": 2 * STEPS},
    "evaluation": {"interval_steps": 2 * STEPS, "samples": 20},
}
OWN = {"a_star_po": A_STAR_PO}
JOB_SECONDS = 1200.0
METHODS = ("sft", "ppo", "grpo", "expert_iteration", "a_star_po")

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.cpu_seconds(400), pytest.mark.timeout(1800)]


def shortened(method: str, reference_model: Path) -> dict[str, Any]:
    """The method's recipe on fewer problems, for fewer steps."""
    recipe: dict[str, Any] = yaml.safe_load((RECIPES / f"{method}.yaml").read_text())
    for section in SHORTENED:
        if recipe[section] is not None:
            recipe[section] |= SHORTENED[section] | OWN.get(method, {}).get(section, {})
    recipe["model"]["path"] = str(reference_model)
    return recipe


@pytest.mark.parametrize("method", [pytest.param(name, marks=on_its_day(name)) for name in METHODS])
def test_a_method_ends_with_a_higher_pass_at_1_than_it_began(
    client: Client, reference_model: Path, method: str
) -> None:
    before, after = run(client, shortened(method, reference_model))

    assert after > before


def run(client: Client, spec: dict[str, Any]) -> tuple[float, float]:
    """pass@1 before and after the job, which must succeed with all its steps."""
    job = client.wait(client.submit(spec).id, JOB_SECONDS)
    assert job.state == "succeeded", job.failure
    assert job.progress.step == spec["trainer"]["steps"]
    before, *_, after = [evaluation.pass_at_k["1"].value for evaluation in client.evaluations(job.id)]
    print(f"{spec['name']}: pass@1 {before:.3f} -> {after:.3f}")
    return before, after
