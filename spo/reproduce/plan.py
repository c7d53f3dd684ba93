"""Every run of `spo reproduce`: the paper's comparisons in the small, and the settings that it does not have.

A run is a recipe of `deploy/recipes/`, changed as its setting and its method say. Settings are the report's sections:

    p160          the toy contest with 160 training problems (Fig. 1)
    p32           with 32, the closest to the paper's picture
    hard          a weaker pi0 and no human solutions: successes must be found
    contaminated  a reward that a hard-coded answer passes, and offline data full of such answers
    2a 2b 2c      the ablations (Fig. 2)
    pushes        weights pushed every step against every ten (3.2)
    stability     online only, for 500 steps
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from spo.reproduce.methods import (
    IMPORT_NAME,
    METHODS,
    RECIPES,
    Document,
    Method,
    merged,
)
from spo.spec.spec_file import read_spec

Difficulty = Literal["standard", "hard"]
SETTINGS = ("p160", "p32", "hard", "contaminated", "2a", "2b", "2c", "pushes", "stability")


@dataclass(frozen=True)
class Size:
    """How large the runs are; the shape of the plan does not depend on it."""

    seeds: int
    changes: Mapping[str, Any]
    problems: Mapping[str, int]
    long_steps: int
    interval_steps: int
    long_interval_steps: int


FULL = Size(
    seeds=3,
    changes={},
    problems={"p32": 32},
    long_steps=500,
    interval_steps=75,
    long_interval_steps=125,
)
QUICK = Size(
    seeds=1,
    changes={
        "tasks": {"train_problems": 24, "evaluation_problems": 16},
        "value": {"samples": 16},
        "replay": {"min_online": 32, "error_buffer": 32},
        "trainer": {"steps": 16, "batch_size": 32},
        "evaluation": {"samples": 10},
    },
    problems={"p32": 8},
    long_steps=32,
    interval_steps=10,
    long_interval_steps=32,
)


@dataclass(frozen=True)
class PlannedRun:
    """One job; `document` lacks the model's path, and what `contaminated` means is filled in when it is submitted."""

    setting: str
    method: str
    seed: int
    difficulty: Difficulty
    document: Document

    @property
    def name(self) -> str:
        return f"{self.setting}/{self.method}/seed{self.seed}"


# What QUICK leaves out elsewhere: everything.
QUICK_METHODS = {
    "p160": ("half_online_squared", "online_squared", "ppo", "grpo", "supervised", "expert_iteration"),
    "p32": ("half_online_squared", "online_squared", "ppo", "supervised"),
    "hard": ("half_online_cross_entropy", "supervised", "expert_iteration"),
    "contaminated": ("supervised", "expert_iteration", "expert_iteration_filtered", "spo_cross_entropy"),
    "stability": ("online_squared", "online_group_centred", "online_damped_0.1"),
}


# Rows that add least to the claims; they come after every seed of the others.
LATER = {
    "p160": ("half_online_group_centred", "online_group_centred", "a_star_po"),
    "p32": ("half_online_group_centred", "online_group_centred", "online_cross_entropy", "grpo", "a_star_po"),
    "hard": ("half_online_squared", "half_online_group_centred", "ppo", "a_star_po"),
    "contaminated": ("spo_squared",),
    "stability": (
        "online_damped_0.3",
        "online_squared_hotter",
        "online_cross_entropy",
        "half_online_squared",
        "half_online_group_centred",
        "online_squared_paper_beta",
        "online_group_centred_paper_beta",
        "online_damped_0.1_paper_beta",
        "online_damped_0.02_paper_beta",
        "online_cross_entropy_paper_beta",
    ),
}


def runs(size: Size, *, quick: bool) -> list[PlannedRun]:
    """The whole plan, seed by seed, so that a plan cut short is still a fair one; runs of one pi0 follow each other."""
    found = [
        _run(setting, name, method, seed, size)
        for seed in range(size.seeds)
        for setting in SETTINGS
        for name, method in METHODS[setting].items()
        if not quick or name in QUICK_METHODS.get(setting, METHODS[setting])
    ]
    return sorted(found, key=lambda run: (run.method in LATER.get(run.setting, ()), run.seed, run.difficulty == "hard"))


def _run(setting: str, name: str, method: Method, seed: int, size: Size) -> PlannedRun:
    hard = setting in ("hard", "contaminated")
    of_setting = {
        "name": f"{setting}/{name}/seed{seed}",
        "labels": {"setting": setting, "method": name},
        "seed": seed,
        "evaluation": {"interval_steps": size.interval_steps},
    }
    document = merged(read_spec(RECIPES / f"{method.recipe}.yaml"), method.changes, of_setting, size.changes)
    changes: list[Document] = [{"tasks": {"difficulty": "hard" if hard else "standard"}}]
    if setting in size.problems:
        changes.append({"tasks": {"train_problems": size.problems[setting]}})
    if setting == "stability":
        changes.append(
            {"trainer": {"steps": size.long_steps}, "evaluation": {"interval_steps": size.long_interval_steps}}
        )
    if setting == "pushes":
        # What is timed there is training.
        changes.append({"evaluation": {"interval_steps": 1_000_000}})
    if setting == "contaminated":
        stored = {"human_solutions": False, "experience": [{"run": IMPORT_NAME}]}
        changes.append({"tasks": {"reward": {"tests": "public"}}, "offline": stored})
    return PlannedRun(setting, name, seed, "hard" if hard else "standard", merged(document, *changes))
