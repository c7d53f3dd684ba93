"""CPU seconds until pi0 has learnt the toy contest: a whole job on the platform against TRL's GRPO.

    python -m benchmarks.learning [--json]              about fifteen minutes of two cores
    python -m benchmarks.learning --plot FILE           draws pass@10 over CPU seconds of the last run

The goal is a held-out pass@10 of .90 (80 problems, 20 samples at temperature 0.4, top-p 0.95); where not all get there,
.80 tells more. All start from the same
pi0, learn on the same 160 problems and ask the same kind of judge. Three contestants:

    first run    deploy/recipes/toy/thrifty.yaml: values, SPO on human solutions and rollouts; nothing is known before
    second run   deploy/recipes/toy/thrifty_second.yaml: from the first one's stored experience and values
    TRL          GRPO with the settings that suited it best here, see peers/trl_grpo.py

A contestant's time is the CPU of all its processes and their children, from being ready to learn until the first
weights that reach the goal were there. Weights are examined afterwards, all by one process (peers/held_out.py), so that
nobody's time holds an evaluation; the rows "with evaluation" add the measured price of one for each checkpoint until
the goal. The rows "with start" add imports and services; the build of vLLM's engine is part of the first run anyway.
Read the rows with this in mind: SPO learns from people's solutions too, taken as published, for which GRPO has no use.
"""

from __future__ import annotations

import json
import shutil
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path
from typing import Any, Literal

from benchmarks.frame import Row, run
from benchmarks.peers.contestants import Checkpoint, Contest, own_judge, platform_contest, tree_cpu_seconds, trl_contest
from spo import redis_keys
from spo.demo.demo import RECIPE
from spo.demo.experience import starting_from
from spo.demo.reference_model import cached_reference_model
from spo.errors import NotReady
from spo.local.child import bound_to_this_process
from spo.local.judge_client import EmbeddedJudge
from spo.service.settings import PlatformSettings
from spo.spec.spec_file import read_spec

FOLDER = Path("runs/benchmark-learning")
FIRST_RECIPE, SECOND_RECIPE = (RECIPE.with_name(f"{name}.yaml") for name in ("thrifty", "thrifty_second"))
GOAL = 0.90
SCORES = (0.80, GOAL)
SEEDS = (0,)
TRL_STEPS, TRL_STEPS_PER_CHECKPOINT = 200, 50
FIRST, SECOND, TRL = "first run", "second run, from the first one's experience", "TRL GRPO"
FACTORS = {FIRST: 4.0, SECOND: 10.0}

Way = Literal["evaluation aside", "with evaluation", "with evaluation and start"]
WAYS: tuple[Way, ...] = ("evaluation aside", "with evaluation", "with evaluation and start")


@dataclass(frozen=True)
class Examined:
    """A checkpoint's price and worth; evaluation_seconds is the CPU of examining it."""

    step: int
    cpu_seconds: float
    pass_at_1: float
    pass_at_10: float
    evaluation_seconds: float


@dataclass(frozen=True)
class Course:
    """How a contestant fared with one seed."""

    contestant: str
    seed: int
    start_cpu_seconds: float
    points: Sequence[Examined]

    def until(self, score: float, way: Way) -> tuple[float, bool]:
        """CPU seconds until pass@10 reached `score`, and whether it did; those of the whole course where it did not."""
        spent = self.start_cpu_seconds if way == "with evaluation and start" else 0.0
        for point in self.points:
            if way != "evaluation aside":
                spent += point.evaluation_seconds
            if point.pass_at_10 >= score:
                return spent + point.cpu_seconds, True
        return spent + self.points[-1].cpu_seconds, False


def measure() -> list[Row]:
    """Every contestant with every seed, then one row per claim."""
    cache = PlatformSettings().state_path / "cache" / "models"
    pi0 = cached_reference_model(cache, "standard", lambda done, total: None).absolute()
    return rows_of([course for seed in SEEDS for course in _schedules(pi0, seed)])


def rows_of(courses: Sequence[Course]) -> list[Row]:
    """Medians over seeds; a contestant that misses the goal with any seed has no ratio."""
    found = []
    for score, way in product(SCORES, WAYS):
        peer, always = _median(courses, TRL, score, way)
        for contestant, factor in FACTORS.items():
            own, reached = _median(courses, contestant, score, way)
            what = f"to pass@10 {score:.2f}, {contestant}, {way}" + ("" if reached else " (missed)")
            ratio = peer / own if reached else 0.0
            yardstick = TRL if always else f"{TRL} (missed, so at least)"
            found.append(Row(what, own, "CPU s", yardstick, peer, ratio, factor, ratio >= factor))
    return found


def _median(courses: Sequence[Course], contestant: str, score: float, way: Way) -> tuple[float, bool]:
    found = [each.until(score, way) for each in courses if each.contestant == contestant]
    return statistics.median(spent for spent, _ in found), all(reached for _, reached in found)


def _schedules(pi0: Path, seed: int) -> list[Course]:
    """All contestants with one seed, the platform's and the peer side by side."""
    with ThreadPoolExecutor(2) as sides:
        found = [sides.submit(side, pi0, seed) for side in (spo_courses, trl_courses)]
        return [course for each in found for course in each.result()]


def spo_courses(pi0: Path, seed: int) -> list[Course]:
    """Both runs on the platform."""
    return _side(pi0, seed, "spo", lambda folder: _spo(pi0, seed, folder / "platform"))


def trl_courses(pi0: Path, seed: int) -> list[Course]:
    """The peer."""

    def hold(folder: Path) -> dict[str, Contest]:
        return {TRL: trl_contest(pi0, seed, TRL_STEPS, TRL_STEPS_PER_CHECKPOINT, folder / "trl")}

    return _side(pi0, seed, "trl", hold)


def _side(pi0: Path, seed: int, name: str, hold: Callable[[Path], dict[str, Contest]]) -> list[Course]:
    """Hold and examine; what is done is kept, so that an interrupted benchmark goes on where it was."""
    folder = _kept(seed)
    folder.mkdir(parents=True, exist_ok=True)
    contests = _remembered(folder / f"{name}.json", lambda: hold(folder))
    kept = folder / f"{name}-courses.json"
    if not kept.exists():
        courses = _examined(pi0, contests, seed, folder / f"{name}-held-out.log")
        kept.write_text(json.dumps([asdict(each) for each in courses]) + "\n")
    return stored_courses(kept)


def _kept(seed: int) -> Path:
    """Named after what was run, so that a changed recipe or peer is measured anew."""
    peers = Path(__file__).parent / "peers"
    texts = [path.read_text() for path in (FIRST_RECIPE, SECOND_RECIPE, *sorted(peers.glob("*.py")))]
    return (FOLDER / f"{redis_keys.digest(*texts)[:12]}-seed-{seed}").absolute()


def _remembered(path: Path, hold: Callable[[], dict[str, Contest]]) -> dict[str, Contest]:
    """The contests in a file; held and written when there is none."""
    if not path.exists():
        held = {name: asdict(contest) for name, contest in hold().items()}
        path.write_text(json.dumps(held, default=str) + "\n")
    return {
        name: Contest(
            contest["start_cpu_seconds"],
            [Checkpoint(each["step"], each["cpu_seconds"], Path(each["folder"])) for each in contest["checkpoints"]],
        )
        for name, contest in json.loads(path.read_text()).items()
    }


def stored_courses(path: Path) -> list[Course]:
    """What `_schedules` has kept."""
    return [
        Course(**{**each, "points": [Examined(**point) for point in each["points"]]})
        for each in json.loads(path.read_text())
    ]


def _spo(pi0: Path, seed: int, folder: Path) -> dict[str, Contest]:
    shutil.rmtree(folder, ignore_errors=True)
    with platform_contest(folder) as carry_out:
        job, first = carry_out(_document(FIRST_RECIPE, pi0, seed))
        _, second = carry_out(starting_from(job.id, _document(SECOND_RECIPE, pi0, seed)))
    return {FIRST: first, SECOND: second}


def _document(recipe: Path, pi0: Path, seed: int) -> dict[str, Any]:
    """The recipe as it stands, but for the evaluations: the job's own are as few and small as can be."""
    document = read_spec(recipe)
    evaluation = {"interval_steps": 1_000_000, "samples": 1, "ks": [1]}
    return {**document, "seed": seed, "model": {**document["model"], "path": str(pi0)}, "evaluation": evaluation}


def _examined(pi0: Path, contests: Mapping[str, Contest], seed: int, log_path: Path) -> list[Course]:
    """pass@k of every checkpoint, all from one process."""
    courses = []
    with own_judge() as judge, log_path.open("wb") as log:
        command = [sys.executable, "-m", "benchmarks.peers.held_out", str(pi0), judge.address]
        pipes: Any = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": log, "text": True}
        with subprocess.Popen(bound_to_this_process(command), **pipes) as examiner:
            try:
                for name, contest in contests.items():
                    points = list(_until_the_goal(examiner, judge, contest.checkpoints, log_path.with_suffix(".json")))
                    courses.append(Course(name, seed, contest.start_cpu_seconds, points))
            finally:
                examiner.kill()
    return courses


def _until_the_goal(
    examiner: subprocess.Popen[str], judge: EmbeddedJudge, checkpoints: Sequence[Checkpoint], kept: Path
) -> Iterator[Examined]:
    """Examine in order, each checkpoint once; what comes after the goal changes nothing."""
    known: dict[str, Any] = json.loads(kept.read_text()) if kept.exists() else {}
    for checkpoint in checkpoints:
        name = str(checkpoint.folder)
        if name not in known:
            known[name] = asdict(_examine(examiner, judge, checkpoint))
            kept.write_text(json.dumps(known) + "\n")
        found = Examined(**known[name])
        yield found
        if found.pass_at_10 >= GOAL:
            return


def _examine(examiner: subprocess.Popen[str], judge: EmbeddedJudge, checkpoint: Checkpoint) -> Examined:
    before = tree_cpu_seconds(judge.pid)
    assert examiner.stdin is not None
    assert examiner.stdout is not None
    print(checkpoint.folder, file=examiner.stdin, flush=True)
    # Libraries may print before it.
    line = next((each for each in examiner.stdout if each.startswith('{"pass_at')), "")
    if not line:
        raise NotReady(f"the examiner ended; its log is below {FOLDER}", code="examiner_failed")
    answer = json.loads(line)
    seconds = answer["cpu_seconds"] + tree_cpu_seconds(judge.pid) - before
    return Examined(checkpoint.step, checkpoint.cpu_seconds, answer["pass_at_1"], answer["pass_at_10"], seconds)


def plot(path: Path) -> None:
    """Draw every kept course."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axis = pyplot.subplots(figsize=(8, 4.5))
    colours = dict(zip((FIRST, SECOND, TRL), ("tab:blue", "tab:green", "tab:orange"), strict=True))
    for kept in (path for seed in SEEDS for path in sorted(_kept(seed).glob("*-courses.json"))):
        for course in stored_courses(kept):
            label = course.contestant if course.seed == SEEDS[0] else None
            seconds, scores = [p.cpu_seconds for p in course.points], [p.pass_at_10 for p in course.points]
            axis.plot(seconds, scores, marker="o", alpha=0.7, color=colours[course.contestant], label=label)
    axis.axhline(GOAL, color="grey", linestyle=":")
    axis.set(xlabel="CPU seconds of all processes, evaluation and start aside", ylabel="held-out pass@10")
    axis.set_xscale("log")
    axis.grid(alpha=0.3)
    axis.legend()
    figure.tight_layout()
    figure.savefig(path, dpi=120)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--plot"]:
        plot(Path(sys.argv[2]))
        sys.exit(0)
    sys.exit(run("learning", measure))
