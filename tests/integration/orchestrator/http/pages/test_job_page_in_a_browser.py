"""The pages of a job in a real browser: curves move, controls work, nothing is refused by the page's own policy."""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Any

import pytest
import yaml

from services.orchestrator import redis_keys as own_keys
from services.orchestrator.container import AppContext
from services.orchestrator.versions import announced_version
from spo.spec.job_spec import parse_job_spec
from spo.spec.section import JobState
from spo.testing.peers import wait_until

if TYPE_CHECKING:
    from conftest import Trainer

pytestmark = pytest.mark.slow

HOSTILE = "<img src=x onerror=alert(1)><script>alert(2)</script>"


def curves(page: Any) -> int:
    """Canvases drawn: one per curve."""
    return int(page.locator("figure canvas").count())


def test_a_running_job_is_live_and_obeys_its_buttons(
    context: AppContext, page: Any, job_id: str, trainer: Trainer, complaints: list[str]
) -> None:
    trainer.report(*range(1, 6))
    page.goto(f"/jobs/{job_id}")
    page.get_by_text("step 5 / 20").wait_for()
    page.locator("#curve-loss canvas").wait_for()
    page.locator("#stream-state", has_text="live").wait_for()

    for step in range(6, 11):
        trainer.report(step)
    page.get_by_text("step 10 / 20").wait_for()
    page.get_by_role("button", name="pause").click()
    wait_until(lambda: context.jobs.state(job_id) is JobState.PAUSING, "the pause arrives")
    trainer.checkpoint(10)
    page.locator("#state", has_text="paused").wait_for()
    page.get_by_role("button", name="resume").click()
    page.locator("#state", has_text="running").wait_for()
    page.get_by_role("button", name="checkpoint").click()
    page.locator("#toast", has_text="checkpoint").wait_for()
    page.get_by_role("button", name="cancel").click()
    page.locator("#state", has_text="cancelling").wait_for()

    assert curves(page) >= 6
    assert complaints == []


def test_a_job_whose_losses_read_no_values_shows_none(
    context: AppContext, page: Any, document: dict[str, Any], trainer: Trainer, complaints: list[str]
) -> None:
    document |= {"value": None, "algorithm": {"losses": [{"objective": "grpo"}]}, "labels": {}}
    document["offline"] = {"human_solutions": False, "keep_reference_samples": False}
    document["replay"] = {"mix": [{"source": "online", "share": 1.0}], "unit": "group"}
    document["rollout"] = {"samples_per_prompt": 4, "temperature": 1.0, "top_p": 1.0}
    job_id = context.jobs.submit(parse_job_spec(document))
    page.goto(f"/jobs/{job_id}")
    page.locator("#state", has_text="queued").wait_for()
    page.get_by_text("trainer publishes").wait_for()

    assert "values" not in page.locator("#status").inner_text()
    assert "prompts solved" not in page.locator("#status").inner_text()
    assert page.locator("figure").count() > 5
    assert page.locator("#curve-residual").count() == 0
    page.goto("/")
    chosen = page.locator(f"#chosen-{job_id}")
    chosen.wait_for()
    assert chosen.bounding_box()["height"] < 24, "it makes its row higher than its text does"
    assert complaints == []


def test_an_answer_to_a_button_that_is_gone_meanwhile_is_not_made_into_a_page(
    context: AppContext, page: Any, job_id: str, complaints: list[str]
) -> None:
    page.goto(f"/jobs/{job_id}")
    page.get_by_role("button", name="pause").wait_for()

    # As where news replaces the part that the button stands in, before the answer to it is there.
    page.evaluate("() => { const button = document.getElementById('action-pause'); button.click(); button.remove(); }")

    wait_until(lambda: context.jobs.state(job_id) is JobState.PAUSING, "the pause arrives")
    page.locator("#toast", has_text="pausing").wait_for()
    assert complaints == []


def test_a_curve_that_stays_at_nought_is_drawn_around_it_and_preferences_have_curves(
    context: AppContext, page: Any, job_id: str, complaints: list[str]
) -> None:
    page.add_init_script(
        """let made; window.axes = {};
        Object.defineProperty(window, "uPlot", { get: () => made, set: (real) => {
          made = new Proxy(real, { construct(kind, given) {
            const plot = new kind(...given);
            window.axes[given[2].id] = () => [plot.scales.y.min, plot.scales.y.max];
            return plot;
          } });
        } });"""
    )
    for step in range(1, 6):
        point = {"step": step, "loss": 0.0, "reward": -1.0, "kl_to_reference": 1000.0}
        point |= {"preference_margin": 0.01 * step, "preference_accuracy": 0.5}
        context.redis.zadd(own_keys.job_metrics(job_id), {json.dumps(point): step})
    page.goto(f"/jobs/{job_id}")
    for name in ("loss", "reward", "kl", "margin", "accuracy"):
        page.locator(f"#curve-{name} canvas").wait_for()
    low, high = page.evaluate("window.axes['curve-loss']()")
    assert -1 <= low < 0 < high <= 1
    low, high = page.evaluate("window.axes['curve-reward']()")
    assert -2 <= low < -1 < high <= 0
    low, high = page.evaluate("window.axes['curve-kl']()")
    assert 500 < low < 1000 < high < 1500
    assert page.locator("#curve-margin output").inner_text() == "0.05"
    assert complaints == []


def test_who_waits_for_whom_is_told_in_seconds(page: Any, job_id: str, trainer: Trainer) -> None:
    trainer.report(1, 2, 3)
    page.goto(f"/jobs/{job_id}")

    row = page.locator("#slow tr", has_text="a batch from the replay buffer").inner_text()

    assert "1.5 s" in row
    assert "idles 75%" in row


def test_an_alarm_of_the_collapse_guard_appears_while_one_looks(
    page: Any, job_id: str, trainer: Trainer, complaints: list[str]
) -> None:
    page.goto(f"/jobs/{job_id}")
    page.locator("#alarms", has_text="None.").wait_for()
    trainer.report(4, alarm=f"the entropy fell {HOSTILE}")
    page.locator("#alarms", has_text=f"step 4: entropy the entropy fell {HOSTILE}").wait_for()

    assert complaints == []


def test_weights_are_pushed_and_rolled_back_from_the_page(
    context: AppContext, page: Any, job_id: str, trainer: Trainer, complaints: list[str]
) -> None:
    trainer.publish(1)
    trainer.publish(2)
    page.goto(f"/jobs/{job_id}")
    page.get_by_role("button", name="Roll back to version 1").click()
    wait_until(lambda: (announced_version(context.jobs, job_id) or 0).version == 1, "version 1 is announced")
    page.locator("#weights tr:has(#push-1)", has_text="announced").wait_for()
    page.get_by_role("button", name="Push version 2").click()
    wait_until(lambda: (announced_version(context.jobs, job_id) or 0).version == 2, "version 2 is announced")

    assert complaints == []


@pytest.mark.usefixtures("evaluated")
def test_evaluations_are_drawn_with_their_intervals(page: Any, job_id: str, complaints: list[str]) -> None:
    page.goto(f"/jobs/{job_id}")
    page.locator("#curve-pass canvas").wait_for()

    assert "pass@10 0.4" in page.locator("#curve-pass output").inner_text()
    page.goto(f"/jobs/{job_id}/evaluations")
    assert "0.350 to 0.450" in page.locator("#evaluations").inner_text()
    assert complaints == []


def test_a_job_is_checked_and_submitted_from_the_page(
    context: AppContext, page: Any, document: dict[str, Any], complaints: list[str]
) -> None:
    page.goto("/")
    page.get_by_role("link", name="Submit a job").click()
    spec = page.get_by_label("Job spec, YAML or JSON")
    assert "source: memory" in spec.input_value(), "the job of the demo"

    faulty = yaml.safe_dump({**document, "trainer": {"steps": -3}}, sort_keys=False)
    spec.fill(faulty)
    page.get_by_role("button", name="Check only").click()
    fault = page.locator(".faults li", has_text="/trainer/steps")
    fault.get_by_role("button").click()
    selected = page.evaluate(
        "const at = document.getElementById('spec'); at.value.slice(at.selectionStart, at.selectionEnd)"
    )
    assert selected.strip() == "steps: -3"

    spec.fill(yaml.safe_dump({**document, "name": "from the page"}))
    page.get_by_role("button", name="Check only").click()
    page.get_by_text("This spec is valid").wait_for()
    assert context.jobs.page([], None, 10).job_ids == []
    page.get_by_role("button", name="Submit").click()
    page.wait_for_url(re.compile(r"/jobs/job_\w{26}$"))
    page.get_by_role("heading", name="from the page").wait_for()

    assert len(context.jobs.page([], None, 10).job_ids) == 1
    assert complaints == []


def test_a_trajectory_is_found_and_inspected_with_the_keyboard(page: Any, job_id: str, complaints: list[str]) -> None:
    page.goto(f"/jobs/{job_id}/trajectories")
    page.get_by_label("Verdict").select_option("wrong_answer")
    page.locator("#trajectories tbody tr").nth(3).wait_for()
    page.locator("#trajectories a", has_text="traj_0").wait_for(state="detached")
    page.locator("#trajectories a", has_text="traj_1").click()

    assert page.locator("#response").inner_text() == f"print(1)  # {HOSTILE}"
    assert "sandbox-judge" in page.get_by_role("region", name="Hops").inner_text()
    tokens = page.get_by_role("group", name=re.compile("Tokens"))
    tokens.focus()
    page.keyboard.press("ArrowRight")
    page.locator("#token-readout", has_text="Q_t -0.3000 · advantage +0.1000").wait_for()
    page.keyboard.press("End")
    page.locator("#token-readout", has_text="advantage -0.0500").wait_for()
    tokens.locator(".token").nth(2).hover()
    page.locator("#token-readout", has_text="pivotal: pi0's success 0.12 → 0.88").wait_for()
    page.get_by_role("button", name="Judge it again").click()
    page.locator("#tests .verdict").first.wait_for()

    assert page.locator(".token.plus4").count() > 4
    assert complaints == []


def test_a_prompt_shows_its_value_its_group_and_its_pivotal_tokens(
    page: Any, job_id: str, complaints: list[str]
) -> None:
    page.goto(f"/jobs/{job_id}/prompts")
    page.get_by_role("button", name="Measure it").click()
    page.locator("#curve-calibration canvas").wait_for()
    assert "27 prefixes" in page.locator("#calibration-figures").inner_text()
    page.locator("#prompts tbody a").nth(1).click()

    page.get_by_text("pi0 was right in 30 of 100 samples").wait_for()
    assert page.locator(".card").count() == 8
    assert page.locator(".card pre").first.inner_text() == f"print(0)  # {HOSTILE}"
    assert page.get_by_role("heading", name="Pivotal tokens").count() == 1
    assert complaints == []
