"""Every run of `spo reproduce`: the methods, the settings, and the contaminated one.

A run is a recipe of `deploy/recipes/`, changed as its setting and its method say. Settings are the report's sections:

    p160          the toy contest with 160 training problems (Fig. 1)
    p32           with 32, the closest to the paper's picture
    hard          a weaker pi0 and no human solutions: successes must be found
    contaminated  a reward that a hard-coded answer passes, and offline data full of such answers
    2a 2b 2c      the ablations (Fig. 2)
    pushes        weights pushed every step against every ten (3.2)
    stability     online only, for 500 steps

The contaminated setting: a reward of one public test, and stored experience that prints its answer.
The toy contest as task files in which one of a problem's twelve tests decides the reward, and an import in the
experience store of programs that do nothing but print that test's output. Evaluation still runs all tests.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from spo import redis_keys
from spo.experience.columns import StoredTrajectory
from spo.experience.store import ExperienceStore, Origin
from spo.spec.section import PAPER_BETA, read_spec
from spo.tasks.problem import Problem
from spo.tasks.records import read_jsonl
from spo.tasks.toy import toy_tasks
from spo.v1.prompt_pb2 import SOURCE_OTHER_RUN, Prompt
from spo.v1.trajectory_pb2 import FINISH_REASON_STOP, Trajectory

RECIPES = Path(__file__).parents[2] / "deploy" / "recipes"
# JSON documents: specs, results and reports; those of the second kind are only read.
Document = dict[str, Any]
ReadDocument = Mapping[str, Any]

Difficulty = Literal["standard", "hard"]
SETTINGS = ("p160", "p32", "hard", "contaminated", "2a", "2b", "2c", "pushes", "stability")

EXAMINED_PROBLEMS = 40


@dataclass(frozen=True)
class Method:
    """A row of a table: a recipe and what is changed in it."""

    recipe: str
    changes: ReadDocument = field(default_factory=dict)


def _losses(*terms: Document) -> Document:
    return {"algorithm": {"losses": list(terms)}}


def _mix(online: float, **offline: float) -> Document:
    """Offline shares hold correct trajectories only, except those whose name ends in _all."""
    parts: list[Document] = [{"source": "online", "share": online}] if online else []
    for name, share in offline.items():
        source = name.removesuffix("_all")
        parts.append({"source": source, "share": share, "correct_only": source == name})
    return {"replay": {"mix": parts}}


def merged(base: ReadDocument, *changes: ReadDocument) -> Document:
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


# The name of the stored experience of which a share is hard-coded answers.
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
    # Without offline data: only the reward is weak.
    "grpo": MAIN["grpo"],
    "online_memory": Method("toy/online_memory"),
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
    # The paper's beta with values at a temperature of 1, which memory keeps alive.
    "online_memory_soft": Method("toy/online_memory_soft"),
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


@dataclass(frozen=True)
class Size:
    """How large the runs are; the shape of the plan does not depend on it."""

    seeds: int
    changes: ReadDocument
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
    "contaminated": ("spo_squared", "grpo", "online_memory"),
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
        "online_memory_soft",
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


def contaminate(document: ReadDocument, folder: Path, experience_place: str) -> Document:
    """The document on task files in `folder`, with the hard-coded programs as stored experience; writes both."""
    tasks = document["tasks"]
    toy = toy_tasks(tasks["train_problems"], tasks["evaluation_problems"], tasks.get("seed", 0))
    train = _write_tasks(folder / f"train-{len(toy.train)}.jsonl", toy.train)
    held_out = _write_tasks(folder / f"held-out-{len(toy.evaluation)}.jsonl", toy.evaluation)
    _store_hacks(ExperienceStore(experience_place), list(read_jsonl(train)))
    files = {
        "kind": "jsonl",
        "path": str(train.absolute()),
        "evaluation_path": str(held_out.absolute()),
        # Statements of a small grammar resemble each other; copies there are none.
        "near_duplicate_similarity": 1.0,
    }
    return merged(document, {"tasks": files})


def training_task(document: ReadDocument) -> Document:
    """A task set whose held-out problems are what a contaminated document trained on: there, hacks succeed."""
    tasks = document["tasks"]
    return {
        "kind": "jsonl",
        "path": tasks["evaluation_path"],
        "evaluation_path": tasks["path"],
        "evaluation_problems": min(tasks["train_problems"], EXAMINED_PROBLEMS),
        "near_duplicate_similarity": 1.0,
    }


def _write_tasks(path: Path, problems: Iterable[Problem]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(_row(problem)) + "\n" for problem in problems))
    return path


def _row(problem: Problem) -> Document:
    return {
        "statement": problem.statement,
        "response_format": "raw",
        "difficulty": problem.difficulty,
        "tests": [
            {"stdin": test.stdin.decode(), "stdout": test.stdout.decode(), "public": index == 0}
            for index, test in enumerate(problem.tests.tests)
        ],
    }


def _store_hacks(store: ExperienceStore, problems: Iterable[Problem]) -> None:
    """One file of one name, whatever how often: the same programs under the same ids."""
    origin = Origin(run=IMPORT_NAME, kind="import", task_set="jsonl", licence="made by spo reproduce")
    store.write(origin, "programs", [_hack(problem) for problem in problems])


def _hack(problem: Problem) -> StoredTrajectory:
    program = f"print({problem.tests.tests[0].stdout.decode().strip().replace(' ', ',')})"
    prompt = Prompt(
        prompt_id=problem.problem_id,
        text=problem.statement,
        task_set="jsonl",
        tests_digest=problem.tests_digest,
        language=problem.language,
        response_format=problem.response_format,
    )
    trajectory = Trajectory(
        trajectory_id=redis_keys.trajectory_id(IMPORT_NAME, problem.problem_id, 0, 0, 0),
        run_id=IMPORT_NAME,
        prompt_id=problem.problem_id,
        source=SOURCE_OTHER_RUN,
        response_text=program,
        finish_reason=FINISH_REASON_STOP,
        sampler="hard-coded",
    )
    return StoredTrajectory(trajectory, prompt)
