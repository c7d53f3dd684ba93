"""`spo demo-experience`: what a run leaves behind is worth something to the next.

    first job   the demo, from nothing
    second job  deploy/recipes/toy/experience.yaml: Qhat_0 recalled, offline data from the experience store
    report      runs/demo-experience/report.{json,png,md}: rollouts until the first job's best held-out pass@10

A rollout counts for a step when it was sampled before that step's weights were published: nothing later can have taught
them anything.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from spo.api.platform import JsonObject, ReadJson
from spo.client import Client
from spo.console import ExitCode, console
from spo.demo.demo import WITH_PEOPLE, Demo, DemoOutcome, fresh_demo, model_of, report_of
from spo.errors import NotReady
from spo.spec.section import read_spec

NAME = "demo-experience"
SECOND_RECIPE = WITH_PEOPLE.with_name("experience.yaml")
MEASURE = "10"
PROMISED_SHARE = 0.5
ALL_ROLLOUTS = 1_000_000
STORED_SECONDS = 60.0


@dataclass(frozen=True)
class RunCost:
    """One job: its outcome, and for each evaluated step the rollouts sampled before that step's weights were there."""

    outcome: DemoOutcome
    rollouts: Mapping[int, int]

    @property
    def scores(self) -> list[tuple[int, float]]:
        """(step, held-out pass@10) of every evaluation."""
        return [(evaluation.step, evaluation.pass_at_k[MEASURE].value) for evaluation in self.outcome.evaluations]

    def best(self) -> tuple[int, float]:
        """(step, pass@10) of the first evaluation with the best score."""
        return max(self.scores, key=lambda point: (point[1], -point[0]), default=(0, 0.0))

    def reaches(self, score: float) -> int | None:
        """The first evaluated step at which pass@10 is at least score."""
        return next((step for step, value in self.scores if value >= score), None)


def run_demo_experience() -> None:
    """Run both jobs in the foreground; exits with a status that says whether the promise held. Raises SpoError."""
    first_document, second_document = read_spec(WITH_PEOPLE), read_spec(SECOND_RECIPE)
    with fresh_demo(NAME, model_of(first_document)) as demo:
        first = _measure(demo, first_document)
        _await_stored(demo, first.outcome.job.id)
        second = _measure(demo, starting_from(first.outcome.job.id, second_document))
    report = compare(first, second)
    write_comparison(report, first, second, demo.platform.folder)
    console.print(_summary(report), markup=False, highlight=False)
    if not report["promise_held"]:
        raise SystemExit(ExitCode.JOB_DID_NOT_SUCCEED)


def compare(first: RunCost, second: RunCost) -> JsonObject:
    """The report document: what the second job needed to be as good as the first ever was."""
    best_step, best = first.best()
    reached = second.reaches(best)
    needed = second.rollouts[reached] if reached is not None else None
    spent = first.rollouts[best_step]
    share = needed / spent if needed is not None and spent else None
    return {
        "best_pass_at_10": best,
        "first": _facts(first) | {"best_at_step": best_step, "rollouts_until_then": spent},
        "second": _facts(second) | {"reaches_it_at_step": reached, "rollouts_until_then": needed},
        "share_of_rollouts": share,
        "promised_share": PROMISED_SHARE,
        "promise_held": share is not None and share <= PROMISED_SHARE,
    }


def write_comparison(report: ReadJson, first: RunCost, second: RunCost, folder: Path) -> None:
    """report.json, report.md and report.png below the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    jobs = {"first": report_of(first.outcome), "second": report_of(second.outcome)}
    (folder / "report.json").write_text(json.dumps({**report, "jobs": jobs}, indent=2) + "\n")
    (folder / "report.md").write_text(_markdown(report, first, second))
    draw_comparison(report["best_pass_at_10"], first, second, folder / "report.png")


def draw_comparison(best: float, first: RunCost, second: RunCost, path: Path) -> None:
    """Held-out pass@10 of both jobs over the rollouts they had sampled."""
    # Only drawing needs matplotlib, which the light roles do without.
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axis = pyplot.subplots(figsize=(8, 5), constrained_layout=True)
    for label, job in (("first run, from nothing", first), ("second run, from stored experience", second)):
        scores = [evaluation.pass_at_k[MEASURE] for evaluation in job.outcome.evaluations]
        spent = [job.rollouts[evaluation.step] for evaluation in job.outcome.evaluations]
        (line,) = axis.plot(spent, [score.value for score in scores], marker="o", label=label)
        low, high = [score.low for score in scores], [score.high for score in scores]
        axis.fill_between(spent, low, high, alpha=0.15, color=line.get_color())
    axis.axhline(best, linestyle="--", color="grey", label="the first run's best")
    axis.set(title="held-out pass@10, 95 % interval", xlabel="online rollouts", ylim=(0, 1))
    axis.grid(alpha=0.3)
    axis.legend(loc="lower right")
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def _measure(demo: Demo, document: ReadJson) -> RunCost:
    outcome = demo.run(document)
    if outcome.job.state != "succeeded":
        reason = outcome.job.failure.message if outcome.job.failure else "no reason given"
        raise NotReady(f"job {outcome.job.id} is {outcome.job.state}: {reason}", code="job_did_not_succeed")
    with Client(demo.platform.http_url) as client:
        found = client.trajectories(outcome.job.id, ALL_ROLLOUTS, source="online")
        versions = client.weights(outcome.job.id)
    sampled = [trajectory.created_unix_ms for trajectory in found]
    published = {version.step: _unix_ms(version.published_at) for version in versions} | {0: 0}
    steps = [evaluation.step for evaluation in outcome.evaluations]
    return RunCost(outcome, {step: sum(at <= published[step] for at in sampled) for step in steps})


def _await_stored(demo: Demo, job_id: str) -> None:
    """The second job would wait for it too; here it is told apart from the job's own time."""
    deadline = time.monotonic() + STORED_SECONDS
    with Client(demo.platform.http_url) as client:
        while not any(stored.run == job_id and stored.complete for stored in client.experience.runs()):
            if time.monotonic() > deadline:
                raise NotReady(f"the experience of {job_id} was not stored within {STORED_SECONDS:g} s")
            time.sleep(0.5)


def starting_from(run: str, document: ReadJson) -> JsonObject:
    """The second job's document, with the run whose experience it takes."""
    offline = document["offline"]
    sources = [{**source, "run": run} for source in offline["experience"]]
    return {**document, "offline": {**offline, "experience": sources}}


def _facts(job: RunCost) -> JsonObject:
    report = report_of(job.outcome)
    return {
        "job_id": job.outcome.job.id,
        "seconds_estimating": report["wall_seconds"]["estimate"],
        "seconds_training": report["wall_seconds"]["train"],
        "trajectories": dict(job.outcome.trajectories),
        "points": [{"step": step, "pass_at_10": value, "rollouts": job.rollouts[step]} for step, value in job.scores],
    }


def _summary(report: ReadJson) -> str:
    first, second = report["first"], report["second"]
    goal = f"The first run's best held-out pass@10, {report['best_pass_at_10']:.2f}, took it"
    spent = f"{goal} {first['rollouts_until_then']} rollouts (step {first['best_at_step']})"
    if report["share_of_rollouts"] is None:
        return f"{spent}; the second run never reached it."
    return (
        f"{spent}; the second run reached it with {second['rollouts_until_then']} "
        f"({report['share_of_rollouts']:.0%}, step {second['reaches_it_at_step']}). Estimating Qhat_0 took "
        f"{first['seconds_estimating']} s, then {second['seconds_estimating']} s."
    )


def _markdown(report: ReadJson, first: RunCost, second: RunCost) -> str:
    lines = ["# A second run from the first one's experience", "", _summary(report), "", "![pass@10](report.png)", ""]
    lines += ["| run | step | online rollouts | held-out pass@10 |", "|---|---|---|---|"]
    for name, job in (("first", first), ("second", second)):
        lines += [f"| {name} | {step} | {job.rollouts[step]} | {value:.3f} |" for step, value in job.scores]
    return "\n".join([*lines, ""])


def _unix_ms(timestamp: str) -> int:
    return round(datetime.fromisoformat(timestamp).timestamp() * 1000)
