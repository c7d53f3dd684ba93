"""Who races: jobs on the platform by recipe, TRL's trainers by setting; all from the same pi0, each with a name.

A name stands for all that is run together: `spo` is the first run and the second one, which starts from what the first
has stored. The search of GRPO's settings is the `grpo*` among them; the cheapest to .80 counts.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from benchmarks.race.peer import Stage
from spo.demo.demo import RECIPE
from spo.spec.section import read_spec

FIRST, SECOND = "first run", "second run, from the first one's experience"
BUDGET_CPU_SECONDS = 250.0
MOST_STEPS = 2000
GRPO: Mapping[str, Any] = {"num_generations": 8, "num_iterations": 4, "learning_rate": 1e-3, "beta": 0.087}
ONE_STEP: Mapping[str, Any] = {"num_iterations": 1, "learning_rate": 5e-4}
SFT = Stage("sft", 100, {"learning_rate": 8e-4})
# Ends before SFT has reached .80, so that there is something left to learn.
SHORT_SFT = Stage("sft", 10, {"learning_rate": 8e-4})


@dataclass(frozen=True)
class Jobs:
    """Jobs on one platform of their own, by the name of what they show."""

    documents: Mapping[str, Mapping[str, Any]]

    def settings(self, contestant: str) -> str:
        """What a reader needs to know of how it ran."""
        document = self.documents[contestant]
        trainer = document["trainer"]
        return f"recipe {document['name']}, {trainer['steps']} steps of {trainer['batch_size']}"


@dataclass(frozen=True)
class Trainers:
    """TRL's trainers, one after the other."""

    contestant: str
    stages: tuple[Stage, ...]

    def settings(self, contestant: str) -> str:
        """What the stages got beside what all get."""
        return "; then ".join(
            f"{stage.trainer} " + ", ".join(f"{name} {value}" for name, value in stage.settings.items())
            for stage in self.stages
        )


Contestant = Jobs | Trainers


def contestants() -> dict[str, Contestant]:
    """All, by name."""
    return {
        "spo": Jobs({FIRST: _recipe("thrifty"), SECOND: _recipe("thrifty_second")}),
        "spo-with-people": Jobs({"SPO, people's programs imitated": _recipe("with_people")}),
        "spo-online": Jobs(
            {
                "a run that remembers, rollouts alone": _recipe("online_memory"),
                "a second one, from what the first has found": _recipe("online_memory_second"),
            }
        ),
        "sft": Trainers("TRL SFT", (SFT,)),
        "sft-grpo": Trainers("TRL SFT, then GRPO", (SHORT_SFT, _grpo(**ONE_STEP))),
        "grpo": Trainers("TRL GRPO", (_grpo(),)),
        "grpo-dr": Trainers("TRL Dr. GRPO", (_grpo(loss_type="dr_grpo", scale_rewards="none"),)),
        "grpo-one-step": Trainers("TRL GRPO, one step per sampling", (_grpo(**ONE_STEP),)),
        "grpo-one-step-faster": Trainers("TRL GRPO, one step, 1e-3", (_grpo(**{**ONE_STEP, "learning_rate": 1e-3}),)),
        "grpo-one-step-no-kl": Trainers("TRL GRPO, one step, no KL", (_grpo(**{**ONE_STEP, "beta": 0.0}),)),
    }


def searched_settings() -> list[str]:
    """The labels of GRPO's settings, from pi0, that were tried."""
    found = contestants().items()
    return [each.contestant for name, each in found if name.startswith("grpo") and isinstance(each, Trainers)]


def identity(contestant: Contestant) -> str:
    """A text that changes with whatever the contestant runs."""
    parts: Any = contestant.documents if isinstance(contestant, Jobs) else [vars(each) for each in contestant.stages]
    return json.dumps([parts, BUDGET_CPU_SECONDS], sort_keys=True, default=str)


def _grpo(**changes: Any) -> Stage:
    return Stage("grpo", MOST_STEPS, {**GRPO, **changes})


def _recipe(name: str) -> dict[str, Any]:
    return read_spec(RECIPE.with_name(f"{name}.yaml"))
