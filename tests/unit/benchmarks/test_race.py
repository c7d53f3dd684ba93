"""What the race makes of its contestants' courses."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from benchmarks.learning import document
from benchmarks.race.__main__ import main
from benchmarks.race.contestants import FIRST, SECOND, Jobs, contestants, identity, searched_settings
from benchmarks.race.course import (
    Checkpoint,
    Contest,
    Course,
    Examined,
    read_contests,
    read_courses,
    write_contests,
)
from benchmarks.race.examiner import Examiner
from benchmarks.race.held import folder_of
from benchmarks.race.own_platform import with_experience
from benchmarks.race.peer import said
from benchmarks.race.rows import best_setting, claims, intervals, ratio_interval, table
from spo.errors import NotReady

TRL = "TRL GRPO"


def course(contestant: str, *points: tuple[float, float], seed: int = 0) -> Course:
    """Points are (CPU seconds, pass@10); the interval of each is .05 to either side."""
    examined = [
        Examined(10 * n, seconds, 0.5, score, score - 0.05, score + 0.05)
        for n, (seconds, score) in enumerate(points, start=1)
    ]
    return Course(contestant, seed, "as it is", 30.0, 2.0, examined)


def test_a_course_is_paid_for_until_the_first_checkpoint_that_reaches_the_goal() -> None:
    found = course(FIRST, (5, 0.7), (9, 0.92), (12, 0.88), (15, 0.95))

    assert found.until(0.9) == (9, True)
    assert found.until(0.96) == (15, False)
    assert found.until(0.75, "high") == (5, True)
    assert found.best().cpu_seconds == 15


def test_a_goal_that_was_missed_gives_no_ratio_and_says_so() -> None:
    rows = claims(
        [course(FIRST, (5, 0.7), (9, 0.8)), course(SECOND, (2, 0.91)), course(TRL, (10, 0.5), (40, 0.9))], TRL
    )

    first, second = [row for row in rows if "pass@10 0.90" in row.name]
    assert (first.ratio, first.holds) == (0.0, False)
    assert "missed" in first.name
    assert (second.value, second.yardstick_value, second.ratio, second.holds) == (2, 40, 20, True)


def test_a_yardstick_that_missed_the_goal_counts_for_what_it_had_spent_and_says_so() -> None:
    rows = claims([course(FIRST, (9, 0.9)), course(SECOND, (2, 0.9)), course(TRL, (10, 0.5), (40, 0.8))], TRL)

    goal = [row for row in rows if "pass@10 0.90" in row.name]
    assert all("at least" in row.yardstick for row in goal)
    assert goal[0].ratio == 40 / 9
    assert not any("at least" in row.yardstick for row in rows if row not in goal)


def test_the_setting_that_counts_is_the_cheapest_of_the_search() -> None:
    quick, slow, missed = course("a", (30, 0.8)), course("b", (60, 0.95)), course("c", (5, 0.7))

    assert best_setting([slow, missed, quick], ["a", "b", "c"]) == "a"
    assert best_setting([missed, course("d", (9, 0.75))], ["c", "d"]) == "d"
    # Other seeds and contestants are no part of the search.
    assert best_setting([slow, replace(quick, seed=1), course("e", (1, 0.9))], ["a", "b"]) == "b"


def test_a_ratio_has_the_interval_of_its_seeds() -> None:
    ratio, low, high = ratio_interval([80, 100, 125], [20, 20, 20])

    assert ratio == pytest.approx(5)
    # Student's t with 2 degrees of freedom: 4.303 standard errors of the mean logarithm.
    assert high / ratio == pytest.approx(1.7408, rel=1e-3)
    assert low * high == pytest.approx(25)


def test_intervals_need_two_seeds_of_either_side() -> None:
    one = [course(FIRST, (20, 0.8)), course(TRL, (80, 0.8))]
    two = [replace(each, seed=1) for each in (course(FIRST, (25, 0.8)), course(TRL, (90, 0.8)))]

    assert intervals(one, TRL) == []
    (found,) = intervals([*one, *two], TRL)
    assert (found["contestant"], found["score"], found["pairs"]) == (FIRST, 0.8, [80 / 25, 90 / 20])


def test_the_json_object_holds_claims_and_every_course() -> None:
    courses = [course(FIRST, (9, 0.9)), course(SECOND, (2, 0.9)), course(searched_settings()[0], (40, 0.9))]

    found = json.loads(document(courses))

    assert [row["ratio"] for row in found["rows"]] == [40 / 9, 20, 40 / 9, 20]
    assert read_courses(found["courses"]) == courses
    assert table(courses).count("\n") == 1 + len(courses)


class Answers(Examiner):
    """An examiner that knows every answer; the folder's name is the score in hundredths."""

    def _ask(self, folder: Path) -> dict[str, float]:
        return {"pass_at_1": 0.0, "pass_at_10": int(folder.name) / 100, "low": 0.0, "high": 1.0}


def examined_steps(folder: Path, scores: Sequence[int]) -> list[int]:
    checkpoints = [Checkpoint(10 * n, n, folder / str(score)) for n, score in enumerate(scores, start=1)]
    with subprocess.Popen(["true"], text=True) as process:
        return [each.step for each in Answers(process, folder / "kept").until((0.8, 0.9), checkpoints)]


def test_few_checkpoints_are_all_examined_until_the_last_goal(tmp_path: Path) -> None:
    assert examined_steps(tmp_path, [40, 85, 70, 90, 95]) == [10, 20, 30, 40]
    assert examined_steps(tmp_path, [40, 41]) == [10, 20]


def test_of_many_checkpoints_a_fourth_is_examined_but_all_before_one_that_passes(tmp_path: Path) -> None:
    scores = [40] * 6 + [81, 82] + [83] * 19 + [91]

    assert examined_steps(tmp_path, scores) == [40, 50, 60, 70, 80, 120, 160, 200, 240, 250, 260, 270, 280]


def test_contests_and_courses_survive_their_files(tmp_path: Path) -> None:
    contests = {TRL: Contest(3.0, [Checkpoint(10, 1.5, tmp_path / "step-10")], 2.0)}
    write_contests(tmp_path / "contests.json", contests)

    assert read_contests(tmp_path / "contests.json") == contests
    kept = course(FIRST, (9, 0.9))
    assert read_courses([asdict(kept)]) == [kept]


def test_a_checkpoint_of_a_second_stage_costs_the_first_one_too() -> None:
    assert Checkpoint(10, 1.5, Path("x")).after(20, 4.0) == Checkpoint(30, 5.5, Path("x"))


def test_a_changed_setting_is_another_contestant() -> None:
    known = contestants()

    assert len({identity(each) for each in known.values()}) == len(known)
    assert folder_of("grpo", known["grpo"], 0) != folder_of("grpo", known["grpo-dr"], 0)
    assert folder_of("grpo", known["grpo"], 0) == folder_of("grpo", contestants()["grpo"], 0)


def test_only_a_recipe_that_reads_experience_gets_the_run_before() -> None:
    spo = contestants()["spo"]
    assert isinstance(spo, Jobs)
    first, second = spo.documents.values()

    assert with_experience(first, "job-1") == first
    assert [source["run"] for source in with_experience(second, "job-1")["offline"]["experience"]] == ["job-1"]


def test_an_unknown_contestant_is_refused_by_name(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["nobody"])

    assert "no contestant is called nobody" in capsys.readouterr().err


def test_what_a_trainer_says_is_stamped_when_it_is_said(tmp_path: Path) -> None:
    program = 'import json; print("noise"); [print(json.dumps({"step": n, "folder": None})) for n in (0, 10)]'
    asked = iter(range(100))

    lines = said([sys.executable, "-c", program], tmp_path, tmp_path / "log", lambda: float(next(asked)))
    first = next(lines)
    time.sleep(0.2)

    assert [first, *lines] == [({"step": 0, "folder": None}, 0.0), ({"step": 10, "folder": None}, 1.0)]


def test_a_trainer_that_fails_names_its_log(tmp_path: Path) -> None:
    with pytest.raises(NotReady, match="status 3"):
        list(said([sys.executable, "-c", "raise SystemExit(3)"], tmp_path, tmp_path / "log", lambda: 0.0))
