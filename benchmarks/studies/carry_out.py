"""Runs of the studies one after the other; each is a file, and what is done is not done again."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.studies import baselines as published, imitation as beside, memory as remembering, staleness as stale
from benchmarks.studies.collect import results
from benchmarks.studies.contest import EVALUATION_SAMPLES, UNTEMPERED, Contest
from spo.algorithm.values import ProblemCounts, mean_pass_at_k
from spo.demo.demo import toy_model
from spo.spec.job_spec import JobSpec
from spo.spec.reward import qhat_0
from spo.tasks.toy import toy_tasks
from spo.v1.prompt_pb2 import SOURCE_REFERENCE
from spo.v1.trajectory_pb2 import Trajectory
from spo.v1.value_pb2 import PromptValue

FOLDER, DOCUMENTS = Path("runs/studies"), Path("docs/results")
TRAIN, HELD_OUT, TASK_SEED = 160, 80, 0


def contest(difficulty: str, held_out: int = HELD_OUT, task_seed: int = TASK_SEED) -> Contest:
    """pi0 of that difficulty with the problems of the report, or with others."""
    torch.set_num_threads(1)
    return Contest(toy_model(difficulty), toy_tasks(TRAIN, held_out, task_seed))


def samples_of_pi0(found: Contest, count: int, spec: JobSpec) -> list[Trajectory]:
    """So many graded samples of each training problem; gives the contest its values, as the job reads them."""
    repeated = [problem for problem in found.tasks.train for _ in range(count)]
    trajectories = found.sampled(found.reference, repeated, TASK_SEED, UNTEMPERED)
    for start in range(0, len(trajectories), count):
        group = trajectories[start : start + count]
        for each in group:
            each.source = SOURCE_REFERENCE
        successes = sum(each.reward == 0 for each in group)
        found.values[group[0].prompt_id] = PromptValue(samples=count, successes=successes)
    read_values(found, spec)
    return trajectories


def read_values(found: Contest, spec: JobSpec) -> None:
    """Qhat_0 of each prompt from its samples, by the job's temperature of values and its policy."""
    estimates = {prompt_id: qhat_0(value, spec) for prompt_id, value in found.values.items()}
    found.qhat_0 = {prompt_id: estimate.q for prompt_id, estimate in estimates.items() if estimate is not None}


def staleness(seeds: Sequence[int]) -> None:
    """The study of stale samples."""
    found = contest("standard")
    samples_of_pi0(found, 64, stale.StaleRun("spo", 0, stale.RATES[0], 0).spec(found.pi0))
    samples, folder = stale.Samples(found), FOLDER / "staleness"
    while todo := [
        run for run in stale.planned(chosen_rates(folder), seeds) if not (folder / f"{run.name}.json").exists()
    ]:
        run, began = todo[0], time.process_time()
        if (spec := run.spec(found.pi0)).value is not None:
            read_values(found, spec)
        kept(
            folder / f"{run.name}.json",
            stale.carry_out(run, found, samples) | {"cpu_seconds": time.process_time() - began},
        )


def kept(path: Path, result: dict[str, Any]) -> None:
    """Write a result and say what it came to."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(result) + "\n")
    said = "; ".join(
        f"step {step}: {score(correct, 1):.3f} / {score(correct, 10):.3f}"
        for step, correct in result["correct"].items()
    )
    print(f"{time.strftime('%T')} {path.stem}: {said}; {result['cpu_seconds']:.0f} CPU s", flush=True)


def score(correct: Sequence[int], k: int) -> float:
    """Mean pass@k."""
    return mean_pass_at_k([ProblemCounts(EVALUATION_SAMPLES, right) for right in correct], k, seed=0, resamples=1).mean


def chosen_rates(folder: Path) -> dict[tuple[str, int], float]:
    """The rate with the best pass@10 at the last step, of each method and lag whose search is complete."""
    found: dict[tuple[str, int], dict[float, float]] = {}
    for path in sorted(folder.glob("*-seed0.json")):
        run = json.loads(path.read_text())
        by_rate = found.setdefault((run["method"], run["lag"]), {})
        by_rate[run["rate"]] = score(run["correct"][str(stale.STEPS)], 10)
    return {
        key: max(by_rate, key=by_rate.__getitem__) for key, by_rate in found.items() if len(by_rate) == len(stale.RATES)
    }


def baselines(seeds: Sequence[int]) -> None:
    """The study of published baselines."""
    found, folder = contest("standard"), FOLDER / "baselines"
    # Of all that these losses do not read, Qhat_0 is what a row cannot be without.
    found.qhat_0 = {problem.problem_id: 0.0 for problem in found.tasks.train}
    while True:
        kept_runs = [json.loads(path.read_text()) for path in sorted(folder.glob("*.json"))]
        scores = {
            (run["method"], run["rate"], run["seed"]): score(run["correct"][str(stale.STEPS)], 10) for run in kept_runs
        }
        todo = [run for run in published.planned(scores, seeds) if (run.method, run.rate, run.seed) not in scores]
        if not todo:
            return
        run, began = todo[0], time.process_time()
        result = published.carry_out(run, found)
        kept(folder / f"{run.name}.json", result | {"cpu_seconds": time.process_time() - began})


def memory(seeds: Sequence[int], part: remembering.Part, settings: Sequence[str]) -> None:
    """A part of the study of runs that remember; what the committed document holds is done."""
    folder, contests = FOLDER / "memory", dict[tuple[str, bool], Contest]()
    while run := remembering.next_run(_remembered(results(folder, DOCUMENTS / "memory.json")), seeds, part, settings):
        key = run.setting, run.searched
        if key not in contests:
            held_out = remembering.SEARCH_HELD_OUT if run.searched else remembering.HELD_OUT
            tasks = remembering.SEARCH_TASKS if run.searched else remembering.REPORTED_TASKS
            found = contest("hard" if run.setting == "hard" else "standard", held_out, tasks)
            found.qhat_0 = {problem.problem_id: 0.0 for problem in found.tasks.train}
            contests[key] = found
        own = run.method in remembering.OWN_METHODS and not contests[key].values
        if own and (spec := run.spec(contests[key].pi0)).value is not None:
            samples_of_pi0(contests[key], 64, spec)
        began = time.process_time()
        result = remembering.carry_out(run, contests[key])
        kept(folder / f"{run.name}.json", {"cpu_seconds": time.process_time() - began, **result})


def _remembered(found: Sequence[dict[str, Any]]) -> dict[remembering.MemoryRun, float]:
    """pass@10 at the end of each run."""
    return {remembering.run_of(each): score(list(each["correct"].values())[-1], 10) for each in found}


def imitation(seeds: Sequence[int]) -> None:
    """The study of imitation beside SPO."""
    found, folder = contest("hard"), FOLDER / "imitation"
    jobs = beside.specs(max(seeds) + 1, found.pi0)
    any_job = jobs[beside.METHODS[0], 0]
    samples = samples_of_pi0(found, beside.SAMPLES_OF_PI0, any_job)
    offline = beside.offline_window(samples, any_job)
    found.add_reference(offline)
    for seed in seeds:
        for method in beside.METHODS:
            path, began = folder / f"{method}-seed{seed}.json", time.process_time()
            if not path.exists():
                result = beside.carry_out(jobs[method, seed], found, offline)
                kept(path, {"method": method, "seed": seed, **result, "cpu_seconds": time.process_time() - began})
