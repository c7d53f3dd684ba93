"""What the report makes of results: verdicts that know noise from effect, costs that hide nothing."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from spo.errors import InvalidInput
from spo.reproduce.command import chosen_runs, result_path, stored_result
from spo.reproduce.plan import QUICK, SETTINGS, merged, runs
from spo.reproduce.report import (
    Results,
    difference,
    findings,
    judged,
    markdown,
    mean_score,
    overview,
    ratio,
    remember_estimate,
    remembered_estimates,
    score_table,
    write_report,
)

SAMPLES = 10
ROOT = Path(__file__).parents[3]


def result(setting: str, method: str, seed: int, correct: list[int], **changes: Any) -> dict[str, Any]:
    """A run that began at 0 and ended with `correct` of SAMPLES per problem."""

    def evaluation(step: int, counts: list[int]) -> dict[str, Any]:
        scores = (
            score_table([counts], [[SAMPLES] * len(counts)], 1),
            score_table([counts], [[SAMPLES] * len(counts)], 10),
        )
        return {
            "step": step,
            "pass_at_k": {str(k): {"value": float(each.mean())} for k, each in zip((1, 10), scores, strict=True)},
            "distinct_solutions": 2.0,
            "entropy": 0.5,
            "public_only_rate": 0.1,
            "hard_coded_rate": 0.05,
            "per_problem": {"correct": counts, "samples": [SAMPLES] * len(counts)},
        }

    made: dict[str, Any] = {
        "name": f"{setting}/{method}/seed{seed}",
        "setting": setting,
        "method": method,
        "seed": seed,
        "state": "succeeded",
        "failure": None,
        "document": {"value": {"samples": 16}, "tasks": {"train_problems": 8}, "offline": {}},
        "evaluations": [evaluation(0, [0] * len(correct)), evaluation(50, correct)],
        "cpu_seconds": {"estimate": 1.0, "train": 10.0},
        "seconds": {"estimate": 2.0, "train": 20.0},
        "rollouts": {"online": 100, "values": 50, "pivotal": 0},
        "trainer_memory_bytes": 1000,
        "happened": [],
    }
    return merged(made, changes)


def test_the_interval_of_a_difference_holds_the_truth_as_often_as_it_says() -> None:
    rng = np.random.default_rng(1)
    misses = 0
    for _ in range(40):
        problems, seeds = rng.normal(0, 0.2, 40), rng.normal(0, 0.03, (2, 4, 1))
        left, right = (0.5 + problems + seeds[side] + rng.normal(0, 0.1, (4, 40)) for side in (0, 1))
        found = difference(left + 0.1, right)
        misses += not found.low <= 0.1 <= found.high

    assert misses <= 8, "a 95 % interval from four seeds may miss more often than that, but not by much"


def test_equal_results_give_equal_estimates_and_a_ratio_knows_its_sides() -> None:
    scores = score_table([[1, 5, 10]], [[10, 10, 10]], 1)

    assert mean_score(scores) == mean_score(scores)
    assert mean_score(scores).mean == pytest.approx(16 / 30)
    assert ratio([30.0, 34.0], [16.0, 16.0]).mean == 2.0


def test_one_seed_decides_nothing_and_noise_is_called_unclear() -> None:
    rng = np.random.default_rng(0)
    noise = rng.random((3, 40))

    assert judged(difference(noise[:1] + 0.5, noise[:1]), "higher")[0] == "unclear"
    assert judged(difference(noise + 0.3, noise), "higher")[0] == "reproduced"
    assert judged(difference(noise, noise + 0.3), "higher")[0] == "not reproduced"
    assert judged(difference(noise, rng.random((3, 40))), "higher")[0] == "unclear"
    assert judged(difference(noise, noise), "same")[0] == "reproduced"
    assert judged(difference(noise, noise + 0.3), "same")[0] == "not reproduced"


def test_a_claim_is_held_against_the_runs_and_what_was_not_run_says_so() -> None:
    high, low = [9, 10, 8, 9, 10, 9], [1, 0, 0, 2, 0, 1]
    kept = [result("p160", "half_online_squared", seed, high) for seed in range(3)]
    kept += [result("p160", "online_squared", seed, low, rollouts={"online": 200}) for seed in range(3)]

    by_claim = {(each.claim, each.setting): each for each in findings(Results(kept))}

    better = by_claim["Half-online SPO beats online SPO in pass@10 (squared)", "p160"]
    assert better.verdict == "reproduced"
    assert better.estimate is not None
    assert better.estimate.seeds == 3
    half = by_claim["Half-online SPO needs half the online rollouts", "p160"]
    assert (half.verdict, half.estimate and half.estimate.mean) == ("unclear", 0.5)
    missing = by_claim["Half-online SPO beats PPO in pass@10 (squared)", "p160"]
    assert (missing.verdict, missing.reason, missing.estimate) == ("unclear", "not run", None)


def test_a_collapse_is_seen_at_the_end_of_a_long_run() -> None:
    fine = [result("stability", "online_group_centred", seed, [5] * 6) for seed in range(2)]
    dead = [result("stability", "online_squared", seed, [5] * 6) for seed in range(2)]
    for each in [*fine, *dead]:
        each["evaluations"][-1]["step"] = 500
    for each in dead:
        each["evaluations"].append({**each["evaluations"][0], "step": 550})

    found = {each.claim: each for each in findings(Results([*fine, *dead])) if each.setting == "stability"}

    assert found["online_group_centred is stable for 500 steps"].verdict == "reproduced"
    assert found["online_squared is stable for 500 steps"].verdict == "not reproduced"


def test_a_report_names_all_costs_and_every_failed_run(tmp_path: Path) -> None:
    first = result("p160", "half_online_squared", 0, [9, 8, 7], cpu_seconds={"estimate": 30.0})
    reused = result("p160", "supervised", 0, [9, 9, 9], rollouts={"online": 0})
    without = result("p160", "ppo", 0, [3, 3, 3], document={"value": None})
    failed = result("p160", "grpo", 0, [0]) | {"state": "failed", "failure": {"code": "x", "message": "it broke"}}

    steps = (12, 13)
    first["happened"] = [{"kind": "alarm", "body": {"alarm": "grad_norm", "step": step}} for step in steps]

    report = write_report(Results([first, reused, without, failed]), [], tmp_path, quick=True, wall_seconds=1.0)

    rows = {row["method"]: row for row in report["tables"]["p160"]}
    assert rows["supervised"]["cpu_seconds"] == {"train": 10.0, "values": 30.0, "total": 40.0}, "the first run paid"
    assert rows["ppo"]["cpu_seconds"]["values"] == 0
    counts = report["last_evaluations"]["p160/ppo/seed0"]
    again = mean_score(score_table([counts["correct"]], [counts["samples"]], 1))
    assert (again.mean, again.low, again.high) == tuple(rows["ppo"]["pass@1"][name] for name in ("mean", "low", "high"))
    assert rows["half_online_squared"]["rollouts"]["total"] == 150
    assert "grpo" not in rows
    text = (tmp_path / "report.md").read_text()
    assert "it broke" in text
    assert "Collapse guard in p160/half_online_squared/seed0: grad_norm at step 12" in text
    assert "QUICK" in text
    assert "| supervised | 1 |" in text
    assert json.loads((tmp_path / "report.json").read_text())["failed"][0]["name"] == "p160/grpo/seed0"
    assert (tmp_path / "fig1.png").stat().st_size > 1000
    assert any("p160" in sentence and "150 rollouts" in sentence for sentence in report["earns_its_keep"])


def test_a_repeated_run_still_pays_for_the_values_that_it_found(tmp_path: Path) -> None:
    repeated = result("p160", "supervised", 0, [9, 9])
    remember_estimate(tmp_path, repeated["document"], 30.0)
    remember_estimate(tmp_path, repeated["document"], 1.0)

    assert Results([repeated], remembered_estimates(tmp_path)).estimate_cpu_seconds(repeated) == 30.0


def test_only_a_finished_run_of_the_same_document_is_not_run_again(tmp_path: Path) -> None:
    run = runs(QUICK, quick=True)[0]
    path = result_path(tmp_path, run)
    path.parent.mkdir()
    kept = {"state": "succeeded", "document": run.document}
    assert stored_result(tmp_path, run) is None

    path.write_text(json.dumps(kept))
    assert stored_result(tmp_path, run) is not None
    path.write_text(json.dumps(merged(kept, {"state": "failed"})))
    assert stored_result(tmp_path, run) is None
    path.write_text(json.dumps(merged(kept, {"document": {"seed": 99}})))
    assert stored_result(tmp_path, run) is None


def test_runs_are_chosen_by_setting_and_pattern() -> None:
    def chosen(**wanted: Any) -> list[Any]:
        return chosen_runs(**{"quick": False, "seeds": None, "pattern": "", "only": (), **wanted})

    assert {run.setting for run in chosen()} == set(SETTINGS)
    assert {run.setting for run in chosen(only=["stability"])} == {"stability"}
    assert {run.seed for run in chosen(seeds=5)} == set(range(5))
    assert {run.method for run in chosen(pattern="p32/ppo")} == {"ppo"}
    for wanted in ({"only": ["p16"]}, {"pattern": "("}, {"pattern": "nothing is called so"}):
        with pytest.raises(InvalidInput):
            chosen(**wanted)


def test_the_committed_report_is_what_its_figures_say() -> None:
    folder = ROOT / "docs" / "results"
    report = json.loads((folder / "reproduce.json").read_text())
    written = (folder / "reproduce.md").read_text()
    plots = re.findall(r"^!\[(.+)\]", written, re.MULTILINE)

    assert not report["quick"]
    assert "\n".join(markdown(report, plots)) + "\n" == written


def test_the_overview_has_a_row_per_method_and_a_column_per_setting(tmp_path: Path) -> None:
    kept = [result("p160", "supervised", seed, [9, 9]) for seed in range(2)]
    report = write_report(Results(kept), [], tmp_path, quick=False, wall_seconds=1.0)

    assert "| supervised | 0.90 / 1.00 ± 0.00 |  |  |  |" in list(overview(report))
