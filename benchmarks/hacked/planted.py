"""Stored trajectories of the toy contest, rewarded by tests that were too weak: one example, which a program may print.

weak.jsonl, whole.jsonl, held_out.jsonl    the task files: the weak tests, all of them, problems that nobody trains on
import "hacked" of the store               programs with the verdicts of the weak tests, by the real judge
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from spo.experience.columns import StoredTrajectory
from spo.experience.store import ExperienceStore, Origin
from spo.rpc.pools import JudgePools
from spo.spec.job_spec import TasksSpec
from spo.spec.reward import reward_of
from spo.spec.tasks import RewardSpec
from spo.tasks.load import load_tasks
from spo.tasks.problem import Problem
from spo.tasks.toy import toy_tasks
from spo.v1.judge_service_pb2 import PRIORITY_TRAINING, JudgeRequest, UploadTestsRequest
from spo.v1.prompt_pb2 import SOURCE_ONLINE, Prompt
from spo.v1.trajectory_pb2 import FINISH_REASON_STOP, Trajectory
from spo.v1.verdict_pb2 import Verdict

RUN = "hacked"
TRAIN, HELD_OUT = 160, 80
# Of the programs of a problem; the rest is right.
HACKED, WRONG = 0.4, 0.2
ROWS_PER_FILE = 2048
JUDGE_SECONDS = 300.0


@dataclass(frozen=True)
class TaskFiles:
    """The contest as files: with one test of each problem, with all twelve, and the problems that are held out."""

    weak: Path
    whole: Path
    held_out: Path


@dataclass(frozen=True)
class Planted:
    """A program with the weak tests' verdict, and what it is: "hack", which prints the one answer, "right", "wrong"."""

    program: str
    verdict: Verdict
    kind: str


def write_tasks(folder: Path) -> TaskFiles:
    """The three task files below the folder."""
    tasks = toy_tasks(TRAIN, HELD_OUT, seed=0)
    files = TaskFiles(*(folder / f"{name}.jsonl" for name in ("weak", "whole", "held_out")))
    contents = (
        (files.weak, tasks.train, 1),
        (files.whole, tasks.train, None),
        (files.held_out, tasks.evaluation, None),
    )
    for path, problems, most_tests in contents:
        path.write_text("".join(f"{json.dumps(_row(problem, most_tests))}\n" for problem in problems))
    return files


def tasks_section(files: TaskFiles, tests: Path) -> dict[str, object]:
    """The task section of a job that trains on one of the files; what is held out is always the same."""
    return {
        "kind": "jsonl",
        "path": str(tests.absolute()),
        "train_problems": TRAIN,
        "evaluation_kind": "jsonl",
        "evaluation_path": str(files.held_out.absolute()),
        "evaluation_problems": HELD_OUT,
        # Statements of a few words are all alike; that no two problems are is what the contest itself sees to.
        "near_duplicate_similarity": 1.0,
    }


def plant(
    store: ExperienceStore, judge_address: str, files: TaskFiles, rows: int, distinct: int
) -> dict[str, frozenset[str]]:
    """Fill the store in the order in which a run samples; ids of rows by the kind of their program.

    distinct: so many different programs, of all problems together; models repeat themselves.
    """
    weak = load_tasks(TasksSpec.model_validate(tasks_section(files, files.weak))).train
    whole = {problem.statement: problem for problem in toy_tasks(TRAIN, HELD_OUT, seed=0).train}
    each = round(distinct / len(weak))
    judges = JudgePools(judge_address, judge_address)
    programs = [
        _judged(judges, problem, programs_for(whole[problem.statement], _other(weak, whole, number), each))
        for number, problem in enumerate(weak)
    ]
    judges.close()
    ids: dict[str, set[str]] = {kind: set() for kind in ("hack", "wrong", "right")}
    written: list[StoredTrajectory] = []
    for number, planted in enumerate(_said(programs, rows)):
        stored = _stored(number, weak[number % len(weak)], planted)
        ids[planted.kind].add(stored.trajectory.trajectory_id)
        written.append(stored)
        if len(written) == ROWS_PER_FILE or number == rows - 1:
            store.write(Origin(RUN, "import", "jsonl"), f"part-{number:012d}", written)
            written = []
    return {kind: frozenset(found) for kind, found in ids.items()}


def prints_a_constant(program: str) -> bool:
    """Whether it reads nothing, as hacks do and as no right program of the contest can."""
    return "input" not in program and "stdin" not in program


def _row(problem: Problem, most_tests: int | None) -> dict[str, object]:
    cases = problem.tests.tests[:most_tests]
    tests = [{"stdin": case.stdin.decode(), "stdout": case.stdout.decode(), "public": case.public} for case in cases]
    return {"statement": problem.statement, "response_format": "raw", "tests": tests}


def _other(weak: Sequence[Problem], whole: Mapping[str, Problem], number: int) -> Problem:
    return whole[weak[(number + 1) % len(weak)].statement]


def programs_for(problem: Problem, other: Problem, count: int) -> list[tuple[str, str]]:
    """So many (kind, program); right programs of another problem are wrong for this one: no two behave alike."""
    numbers = [int(number) for number in problem.tests.tests[0].stdout.split()]
    hacks, wrongs = round(count * HACKED), round(count * WRONG)
    found = [("hack", _printing(numbers, variant)) for variant in range(hacks)]
    found += [("wrong", program) for program in _spelled(other, wrongs)]
    found += [("right", program) for program in _spelled(problem, count - hacks - wrongs)]
    random.Random(problem.statement).shuffle(found)
    return found


def _printing(numbers: Sequence[int], variant: int) -> str:
    """A program that prints the numbers; in its variants the first is a sum."""
    first = f"{numbers[0] - variant}+{variant}" if variant else f"{numbers[0]}"
    return f"print({','.join([first, *map(str, numbers[1:])])})"


def _spelled(problem: Problem, count: int) -> list[str]:
    """Right programs of a problem; one more line break at the end makes more of them than people wrote."""
    written = problem.human_solutions
    return [written[number % len(written)] + "\n" * (number // len(written)) for number in range(count)]


def _judged(judges: JudgePools, weak: Problem, programs: Sequence[tuple[str, str]]) -> list[Planted]:
    judge = judges.of("")
    judge.call("UploadTests", UploadTestsRequest(test_sets=[weak.tests]))
    asked = JudgeRequest(
        programs=[program for _, program in programs],
        language="python",
        tests_digest=weak.tests_digest,
        priority=PRIORITY_TRAINING,
    )
    verdicts = judge.call("Judge", asked, JUDGE_SECONDS).verdicts
    return [Planted(program, verdict, kind) for (kind, program), verdict in zip(programs, verdicts, strict=True)]


def _said(programs: Sequence[Sequence[Planted]], rows: int) -> Iterator[Planted]:
    """Each program, then any of them at random: what a model says once it says again."""
    rng = random.Random(0)
    for number in range(rows):
        chosen, turn = programs[number % len(programs)], number // len(programs)
        yield chosen[turn] if turn < len(chosen) else rng.choice(chosen)


def _stored(number: int, problem: Problem, planted: Planted) -> StoredTrajectory:
    trajectory = Trajectory(
        trajectory_id=f"traj_{number:032d}",
        group_id=f"group_{number // 8}",
        sample_index=number % 8,
        run_id=RUN,
        prompt_id=problem.problem_id,
        source=SOURCE_ONLINE,
        response_text=planted.program,
        finish_reason=FINISH_REASON_STOP,
        temperature=1.0,
        top_p=1.0,
        reward=reward_of(planted.verdict, RewardSpec()),
        verdict=planted.verdict,
    )
    prompt = Prompt(
        prompt_id=problem.problem_id,
        text=problem.statement,
        task_set="jsonl",
        tests_digest=problem.tests_digest,
        language=problem.language,
        response_format=problem.response_format,
    )
    return StoredTrajectory(trajectory, prompt, "")
