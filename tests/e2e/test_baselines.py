"""Every method of the recipes as a job of one running platform: each ends with a higher pass@1 than it began."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from spo.client import Client
from tests.support.platform import running_platform

ROOT = Path(__file__).parents[2]
RECIPES = ROOT / "deploy" / "recipes" / "toy"
STEPS = 40
# Same problems and samples for all, so that the first job that needs Qhat_0 estimates it for the others.
SHORTENED: dict[str, dict[str, Any]] = {
    "tasks": {"train_problems": 40, "evaluation_problems": 40},
    "value": {"samples": 48},
    "trainer": {"steps": STEPS, "checkpoint_interval": STEPS},
    "evaluation": {"interval_steps": STEPS, "samples": 10, "ks": [1]},
}
JOB_SECONDS = 600.0

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Client]:
    """A client of a platform that all tests of this module share."""
    folder = tmp_path_factory.mktemp("platform")
    with (
        running_platform(folder, drain_seconds=5) as platform,
        Client(platform.http_url, retry_seconds=60) as connected,
    ):
        yield connected


def shortened(method: str, reference_model: Path, **changes: dict[str, Any]) -> dict[str, Any]:
    """The method's recipe on fewer problems, for fewer steps; `changes` by section come last."""
    recipe: dict[str, Any] = yaml.safe_load((RECIPES / f"{method}.yaml").read_text())
    for section in SHORTENED:
        if recipe[section] is not None:
            recipe[section] |= SHORTENED[section] | changes.get(section, {})
    recipe["model"]["path"] = str(reference_model)
    return recipe


@pytest.mark.parametrize("method", ["sft", "ppo", "grpo", "expert_iteration"])
def test_a_baseline_ends_with_a_higher_pass_at_1_than_it_began(
    client: Client, reference_model: Path, method: str
) -> None:
    before, after = run(client, shortened(method, reference_model))

    assert after > before


def test_a_star_po_ends_with_a_higher_pass_at_1_than_it_began(client: Client, reference_model: Path) -> None:
    # One sample per prompt says little of each: it takes more problems and steps to show on held-out ones.
    steps = 80
    trainer = {"steps": steps, "checkpoint_interval": steps}
    spec = shortened(
        "a_star_po",
        reference_model,
        tasks={"train_problems": 160},
        # Of a residual's variance the noise of so few is a sixteenth.
        value={"samples": 16},
        trainer=trainer,
        evaluation={"interval_steps": steps, "samples": 20},
    )

    before, after = run(client, spec)

    assert after > before


def run(client: Client, spec: dict[str, Any]) -> tuple[float, float]:
    """pass@1 before and after the job, which must succeed with all its steps."""
    job = client.wait(client.submit(spec).id, JOB_SECONDS)
    assert job.state == "succeeded", job.failure
    assert job.progress.step == spec["trainer"]["steps"]
    before, *_, after = [evaluation.pass_at_k["1"].value for evaluation in client.evaluations(job.id)]
    print(f"{spec['name']}: pass@1 {before:.3f} -> {after:.3f}")
    return before, after
