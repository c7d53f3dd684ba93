"""The rows of every table: which recipe of `deploy/recipes/`, and what is changed in it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from spo.spec.algorithm import PAPER_BETA

RECIPES = Path(__file__).parents[2] / "deploy" / "recipes"
Document = dict[str, Any]


@dataclass(frozen=True)
class Method:
    """A row of a table: a recipe and what is changed in it."""

    recipe: str
    changes: Mapping[str, Any] = field(default_factory=dict)


def _losses(*terms: Document) -> Document:
    return {"algorithm": {"losses": list(terms)}}


def _mix(online: float, **offline: float) -> Document:
    """Offline shares hold correct trajectories only, except those whose name ends in _all."""
    parts: list[Document] = [{"source": "online", "share": online}] if online else []
    for name, share in offline.items():
        source = name.removesuffix("_all")
        parts.append({"source": source, "share": share, "correct_only": source == name})
    return {"replay": {"mix": parts}}


def merged(base: Mapping[str, Any], *changes: Mapping[str, Any]) -> Document:
    """The base with the changes' members in place of its own, section by section; a changed null stays null."""
    document = dict(base)
    for change in changes:
        for name, value in change.items():
            before = document.get(name)
            if isinstance(before, Mapping) and isinstance(value, Mapping):
                document[name] = merged(before, value)
            elif not (name in document and before is None and isinstance(value, Mapping)):
                document[name] = value
    return document


_HALF_GROUP_CENTRED = merged(
    _losses(
        {"objective": "group_centred_squared", "sources": ["online"]},
        {"objective": "terminal_squared", "sources": ["reference", "human"]},
    ),
    {"replay": {"unit": "group"}},
)
MAIN = {
    "half_online_squared": Method("toy/half_online_squared"),
    "half_online_cross_entropy": Method("toy/half_online_cross_entropy"),
    "half_online_group_centred": Method("toy/half_online_squared", _HALF_GROUP_CENTRED),
    "online_squared": Method("toy/online_squared"),
    "online_cross_entropy": Method("toy/online_cross_entropy"),
    "online_group_centred": Method("toy/online_group_centred"),
    "ppo": Method("toy/ppo"),
    "grpo": Method("toy/grpo"),
    "a_star_po": Method("toy/a_star_po"),
    "supervised": Method("toy/sft"),
    "expert_iteration": Method("toy/expert_iteration"),
}
# What the demo does: people's and old successes are imitated, SPO learns from the policy's own samples.
_BESIDE = _losses(
    {"objective": "terminal_squared", "sources": ["online"]},
    {"objective": "supervised", "sources": ["reference", "human"], "coefficient": 0.5},
)
_DEMO_RATE = {"trainer": {"learning_rate": 8e-4, "learning_rate_schedule": "cosine", "learning_rate_floor": 0.1}}
_NO_HUMANS = {"offline": {"human_solutions": False}}
_HALF_OWN = merged(_NO_HUMANS, _mix(0.5, reference=0.5))
HARD = {
    **{
        name: Method(method.recipe, merged(method.changes, _HALF_OWN))
        for name, method in MAIN.items()
        if "half" in name
    },
    "half_online_mixed_quality": Method(
        "toy/half_online_cross_entropy", merged(_NO_HUMANS, _mix(0.5, reference_all=0.5))
    ),
    **{name: MAIN[name] for name in ("online_group_centred", "ppo", "grpo", "a_star_po", "expert_iteration")},
    "supervised": Method("toy/sft", merged(_NO_HUMANS, _mix(0, reference=1.0))),
    "imitation_beside_spo": Method("toy/sft", merged(_BESIDE, _NO_HUMANS, _mix(0.25, reference=0.75), _DEMO_RATE)),
    "supervised_demo_rate": Method("toy/sft", merged(_NO_HUMANS, _mix(0, reference=1.0), _DEMO_RATE)),
    "half_online_demo_rate": Method("toy/half_online_squared", merged(_HALF_OWN, _DEMO_RATE)),
}


# The name of the stored experience that `contamination` writes.
IMPORT_NAME = "hard-coded-answers"
# Of the offline successes, so many only print the answer of the public test.
HACKED_SHARE = 0.45
# Under pi0, nats per token: programs that people would call programs are well above.
LIKELY_ENOUGH = -2.0
_SPO_TERM = {"objective": "terminal_cross_entropy", "epsilon": 0.3}
_SPO_RATES = {"trainer": {"learning_rate": 5e-4}, **merged(_losses(_SPO_TERM), {"algorithm": {"beta": PAPER_BETA}})}
_SUPERVISED_ONLINE = _mix(0.5, reference=0.5 * (1 - HACKED_SHARE), other_run=0.5 * HACKED_SHARE)
# Old successes 1/4 of the batch, HACKED_SHARE of them hacked; new successes 1/4; failures, new and old, the rest.
_MIXED_OUTCOMES = {
    "replay": {
        "mix": [
            {"source": "online", "share": 0.5, "sampler": "outcome_balanced"},
            {"source": "reference", "share": 0.355, "sampler": "outcome_balanced"},
            {"source": "other_run", "share": 0.145},
        ]
    }
}
_ITERATED = Method(
    "toy/sft",
    merged(
        _SUPERVISED_ONLINE,
        {"replay": {"mix": [{**part, "correct_only": True} for part in _SUPERVISED_ONLINE["replay"]["mix"]]}},
    ),
)
CONTAMINATED = {
    "supervised": Method("toy/sft", _mix(0, reference=1 - HACKED_SHARE, other_run=HACKED_SHARE)),
    "expert_iteration": _ITERATED,
    "expert_iteration_filtered": Method(
        _ITERATED.recipe,
        merged(_ITERATED.changes, _losses({"objective": "supervised", "min_reference_logprob": LIKELY_ENOUGH})),
    ),
    "spo_cross_entropy": Method("toy/half_online_cross_entropy", merged(_SPO_RATES, _MIXED_OUTCOMES)),
    "spo_squared": Method("toy/half_online_squared", _MIXED_OUTCOMES),
}
ABLATIONS = {
    setting: {
        path.stem: Method(f"ablations/{setting}/{path.stem}")
        for path in sorted((RECIPES / "ablations" / setting).glob("*.yaml"))
    }
    for setting in ("2a", "2b", "2c")
}


def _pushed(recipe: str, every: int) -> Method:
    steps = {"trainer": {"update_interval": every, "steps": 100, "checkpoint_interval": 100}}
    return Method(recipe, merged(steps, {"tasks": {"evaluation_problems": 16}}))


PUSHES = {
    f"{name}_every_{every}": _pushed(recipe, every)
    for name, recipe in (("spo", "toy/half_online_cross_entropy"), ("ppo", "toy/ppo"))
    for every in (1, 10)
}


def _damped(mean_part: float) -> Document:
    """Squared regression whose part along a group's mean residual is scaled by mean_part; Qhat_0 stays in the loss.

    A group of n: sum d^2 = sum (d - mean d)^2 + n (mean d)^2, and group_centred_squared is n / (n - 1) of the first.
    """
    centred = (1 - mean_part) * 3 / 4
    terms = (
        {"objective": "group_centred_squared", "coefficient": centred},
        {"objective": "terminal_squared", "coefficient": mean_part},
    )
    return merged(_losses(*terms), {"replay": {"unit": "group"}})


_PAPERS = {"algorithm": {"beta": PAPER_BETA}}
STABILITY = {
    "online_squared": MAIN["online_squared"],
    "online_group_centred": MAIN["online_group_centred"],
    "online_damped_0.1": Method("toy/online_squared", _damped(0.1)),
    "online_damped_0.3": Method("toy/online_squared", _damped(0.3)),
    "online_squared_hotter": Method("toy/online_squared", {"rollout": {"temperature": [0.5, 1.0]}}),
    "online_cross_entropy": MAIN["online_cross_entropy"],
    "half_online_squared": MAIN["half_online_squared"],
    "half_online_group_centred": MAIN["half_online_group_centred"],
    # Where the study saw the squared loss collapse soonest.
    "online_squared_paper_beta": Method("toy/online_squared", _PAPERS),
    "online_group_centred_paper_beta": Method("toy/online_group_centred", _PAPERS),
    "online_damped_0.1_paper_beta": Method("toy/online_squared", merged(_damped(0.1), _PAPERS)),
    "online_damped_0.02_paper_beta": Method("toy/online_squared", merged(_damped(0.02), _PAPERS)),
    "online_cross_entropy_paper_beta": Method("toy/online_cross_entropy", _PAPERS),
}
METHODS: dict[str, dict[str, Method]] = {
    "p160": MAIN,
    "p32": MAIN,
    "hard": HARD,
    "contaminated": CONTAMINATED,
    **ABLATIONS,
    "pushes": PUSHES,
    "stability": STABILITY,
}
