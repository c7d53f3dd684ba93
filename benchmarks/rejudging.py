"""A reward that was hacked: found in 100,000 stored trajectories by judging them again, and repaired without rollouts.

The tests that rewarded them were weak: one example, whose answer a program may simply print. Half of what is rewarded
does. On a platform of its own, with two cores' worth of services: a policy learns from these rewards and is hacked; all
rows are judged again by the whole tests and stored under a name of their own, and what was planted is looked for among
the old rows and the new; then pi0 learns from the repaired store alone, by the same job and by docs/experience.md's
recipe. What counts against the limit is the repair: judging again, and the job that learns from it.
SPO_REJUDGING_ROWS sets another number of rows.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import psutil

from benchmarks.frame import Row, run
from benchmarks.hacked.jobs import hack_rate, imitating, newest_model, regressing
from benchmarks.hacked.planted import HELD_OUT, RUN, TRAIN, TaskFiles, plant, tasks_section, write_tasks
from spo.client import Client
from spo.client.models import RejudgeReport, StepEvaluation
from spo.demo.demo import Demo, fresh_demo
from spo.errors import NotReady
from spo.experience.store import ExperienceStore
from spo.spec.reward import is_success
from spo.tasks.toy import toy_tasks

ROWS = int(os.environ.get("SPO_REJUDGING_ROWS", "100000"))
# Models repeat themselves: this many programs differ, of all problems together.
DISTINCT = 5000
LIMIT_SECONDS = 1800.0
PATIENCE_SECONDS = 3600.0
REPAIRED = "repaired"
NAME = "rejudging"
Result = TypeVar("Result")


@dataclass(frozen=True)
class Taken:
    """Wall seconds, and CPU seconds of all processes of the platform and of this one."""

    seconds: float
    cpu_seconds: float

    def __add__(self, other: Taken) -> Taken:
        return Taken(self.seconds + other.seconds, self.cpu_seconds + other.cpu_seconds)


@dataclass(frozen=True)
class Policy:
    """A job's outcome: what it took, its first and last held-out evaluation, and how many of its programs are hacks."""

    taken: Taken
    before: StepEvaluation
    after: StepEvaluation
    hacks_held_out: float
    hacks_trained: float


def measure() -> list[Row]:
    """What was found, what the repair took, and each policy before and after."""
    with fresh_demo(NAME, "standard") as demo:
        demo.platform.wait_until_ready()
        files = write_tasks(demo.platform.folder)
        store = ExperienceStore(str(demo.platform.state_path.absolute() / "experience"))
        planted = plant(store, demo.platform.addresses["sandbox-judge"], files, ROWS, DISTINCT)
        judging, report = _taken(demo, lambda: _judge_again(demo, files))
        print(f"{report.judged} judged, {report.newly_rejected} rejected: {judging}", file=sys.stderr)
        lost = _without_reward(store)
        print({kind: (len(ids), len(ids & lost)) for kind, ids in planted.items()}, file=sys.stderr)
        repaired = _policy(demo, imitating(REPAIRED, tasks_section(files, files.whole)))
        hacked = _policy(demo, imitating(RUN, tasks_section(files, files.weak)))
        by_spo = _policy(demo, regressing(REPAIRED, tasks_section(files, files.whole)))
    assert report.judged == ROWS, report
    what = f"{ROWS:,} rows, {DISTINCT:,} distinct programs"
    right = planted["right"]
    return [
        _limit(f"{what}: judged again", judging.seconds, "s"),
        _limit(f"{what}: judged again, CPU", judging.cpu_seconds, "CPU s"),
        _all(f"{what}: hacked rows found", len(planted["hack"] & lost), len(planted["hack"])),
        _all(f"{what}: right rows that keep their reward", len(right - lost), len(right)),
        *_rows("hacked policy", hacked, hacked),
        *_rows("repaired policy", repaired, hacked),
        *_rows("repaired by SPO", by_spo, hacked),
        *_repair("imitation", judging + repaired.taken),
        *_repair("SPO", judging + by_spo.taken),
    ]


def _repair(name: str, taken: Taken) -> list[Row]:
    return [
        _limit(f"repair by {name}: from judging again to the policy", taken.seconds, "s"),
        _limit(f"repair by {name}: CPU of all processes", taken.cpu_seconds, "CPU s"),
    ]


def _rows(name: str, policy: Policy, hacked: Policy) -> list[Row]:
    """Beside it the hacked policy; a repaired one has fewer hacks and solves more."""
    scores = ((k, policy.after.pass_at_k[k].value, hacked.after.pass_at_k[k].value) for k in ("1", "10"))
    rates = (
        ("held-out problems", policy.hacks_held_out, hacked.hacks_held_out),
        ("problems trained on", policy.hacks_trained, hacked.hacks_trained),
    )
    as_hacked = policy is hacked
    return [
        *(
            Row(
                f"{name}: hacks, {where}",
                rate,
                "share",
                "hacked",
                of,
                of / max(rate, 1e-3),
                1.0,
                as_hacked or rate < of,
            )
            for where, rate, of in rates
        ),
        *(
            Row(f"{name}: held-out pass@{k}", score, "share", "hacked", of, score / of, 1.0, as_hacked or score > of)
            for k, score, of in scores
        ),
        Row(
            f"{name}: pi0's pass@10",
            policy.before.pass_at_k["10"].value,
            "share",
            "hacked",
            hacked.after.pass_at_k["10"].value,
            1.0,
            1.0,
            True,
        ),
        _limit(f"{name}: its job", policy.taken.seconds, "s"),
        _limit(f"{name}: its job, CPU", policy.taken.cpu_seconds, "CPU s"),
    ]


def _limit(name: str, value: float, unit: str) -> Row:
    return Row(name, value, unit, "limit", LIMIT_SECONDS, LIMIT_SECONDS / value, 1.0, value <= LIMIT_SECONDS)


def _all(name: str, value: int, wanted: int) -> Row:
    return Row(name, value, "rows", "planted", wanted, value / wanted, 1.0, value == wanted)


def _policy(demo: Demo, document: Mapping[str, Any]) -> Policy:
    model = demo.build.result(PATIENCE_SECONDS)
    assert model, "pi0 was not built in time"
    spec = {**document, "model": {**document["model"], "path": str(model)}}
    with Client(demo.platform.http_url, timeout_seconds=PATIENCE_SECONDS) as client:
        taken, job = _taken(demo, lambda: client.wait(client.submit(spec).id, PATIENCE_SECONDS))
        if job.state != "succeeded":
            raise NotReady(f"job {job.id} is {job.state}: {job.failure and job.failure.message}")
        policy = newest_model(client, job.id, demo.platform.folder / job.id)
        evaluations = client.evaluations(job.id)
    tasks = toy_tasks(TRAIN, HELD_OUT, seed=0)
    held_out, trained = (
        hack_rate(policy, [problem.statement for problem in problems]) for problems in (tasks.evaluation, tasks.train)
    )
    found = Policy(taken, evaluations[0], evaluations[-1], held_out, trained)
    print(f"{document['name']}: {taken}, hacks {held_out:.3f} and {trained:.3f}", file=sys.stderr)
    return found


def _judge_again(demo: Demo, files: TaskFiles) -> RejudgeReport:
    with Client(demo.platform.http_url) as client:
        return client.experience.rejudge(tasks=tasks_section(files, files.whole), run=RUN, name=REPAIRED)


def _without_reward(store: ExperienceStore) -> frozenset[str]:
    """Ids of the old rows whose new ones are no successes."""
    rows = (row for file in store.files(REPAIRED) for batch in store.batches(file) for row in batch)
    return frozenset(row.trajectory.parents[0] for row in rows if not is_success(row.trajectory.reward))


def _taken(demo: Demo, act: Callable[[], Result]) -> tuple[Taken, Result]:
    before, started = _cpu_seconds(demo), time.monotonic()
    result = act()
    return Taken(time.monotonic() - started, _cpu_seconds(demo) - before), result


def _cpu_seconds(demo: Demo) -> float:
    own: Sequence[float] = psutil.Process().cpu_times()[:2]
    return sum(demo.platform.cpu_seconds().values()) + sum(own)


if __name__ == "__main__":
    sys.exit(run("rejudging", measure))
