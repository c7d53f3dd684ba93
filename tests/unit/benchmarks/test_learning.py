"""What the learning benchmark makes of its contestants' courses."""

from __future__ import annotations

from benchmarks.learning import FIRST, SECOND, TRL, Course, Examined, rows_of


def course(contestant: str, *points: tuple[float, float], start: float = 30.0) -> Course:
    """Points are (CPU seconds, pass@10); each examination costs 2 s."""
    examined = [Examined(10 * n, seconds, 0.5, score, 2.0) for n, (seconds, score) in enumerate(points, start=1)]
    return Course(contestant, 0, start, examined)


def test_a_course_is_paid_for_until_the_first_checkpoint_that_reaches_the_goal() -> None:
    found = course(FIRST, (5, 0.7), (9, 0.92), (12, 0.88), (15, 0.95))

    assert found.until(0.9, "evaluation aside") == (9, True)
    assert found.until(0.9, "with evaluation") == (9 + 2 * 2, True)
    assert found.until(0.9, "with evaluation and start") == (30 + 9 + 2 * 2, True)


def test_a_goal_that_was_missed_gives_no_ratio_and_says_so() -> None:
    rows = rows_of(
        [
            course(FIRST, (5, 0.7), (9, 0.8)),
            course(SECOND, (2, 0.91)),
            course(TRL, (10, 0.5), (40, 0.9)),
        ]
    )

    first, second = [row for row in rows if "pass@10 0.90" in row.name][:2]
    assert (first.ratio, first.holds) == (0.0, False)
    assert "missed" in first.name
    assert (second.value, second.yardstick_value, second.ratio, second.holds) == (2, 40, 20, True)


def test_a_yardstick_that_missed_the_goal_counts_for_what_it_had_spent_and_says_so() -> None:
    rows = rows_of([course(FIRST, (9, 0.9)), course(SECOND, (2, 0.9)), course(TRL, (10, 0.5), (40, 0.8))])

    goal = [row for row in rows if "pass@10 0.90" in row.name]
    assert all("at least" in row.yardstick for row in goal)
    assert goal[0].ratio == 40 / 9
    assert not any("at least" in row.yardstick for row in rows if row not in goal)
