"""The problems of the race: those that `toy/thrifty` names."""

from __future__ import annotations

from spo.tasks.problem import TaskSets
from spo.tasks.toy import toy_tasks

TRAIN, HELD_OUT, TASK_SEED = 160, 80, 0
MAX_RESPONSE_TOKENS = 44


def race_problems(task_seed: int = TASK_SEED) -> TaskSets:
    """160 to learn on, 80 to be examined on."""
    return toy_tasks(TRAIN, HELD_OUT, task_seed)
