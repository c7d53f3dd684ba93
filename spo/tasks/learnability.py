"""The baseline probe: which training problems a model never solves, always solves, or can learn from.

Asked for on the command line and on the submit page; a probe is a job of no steps.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from spo.errors import InvalidInput

PROBE_SAMPLES = 8
MOST_PROBED = 1000
# Of a job's spec, what decides which problems a model meets, and how it is asked.
PROBED_SECTIONS = ("model", "tasks", "seed")
SAMPLING = ("temperature", "top_p")
BINS = 10
BAR = 40
# From here on a share of all problems is worth a word.
MANY = 0.5


class ProbedPrompt(Protocol):
    """How the model did on a problem, as REST and SDK tell it; None until it is known."""

    @property
    def samples(self) -> int | None: ...
    @property
    def successes(self) -> int | None: ...
    @property
    def lowest_reward(self) -> float | None: ...
    @property
    def highest_reward(self) -> float | None: ...
    @property
    def with_solutions(self) -> bool: ...


@dataclass(frozen=True)
class Learnability:
    """Problems by how the model did on them; histogram: problems by success rate, in tenths, 1 in the last one."""

    problems: int
    samples: int
    unsolved: int
    solved: int
    learnable: int
    unknown: int
    unsolved_with_solutions: int
    mean_success: float | None
    histogram: tuple[int, ...]
    suggestions: tuple[str, ...]


def probe_document(
    spec: Mapping[str, object], samples: int = PROBE_SAMPLES, problems: int = MOST_PROBED, model: str | None = None
) -> dict[str, object]:
    """The job that probes a spec's model, or another one, on its problems.

    Raises InvalidInput for what is no job's spec.
    """
    sections = {name: spec[name] for name in PROBED_SECTIONS if name in spec}
    named, wanted = sections.get("model", {}), sections.get("tasks", {})
    if not isinstance(named, dict) or not isinstance(wanted, dict):
        raise InvalidInput("a job's spec has the sections `model` and `tasks`", code="invalid_job_spec")
    named = {name: value for name, value in named.items() if name != "lora"}
    if model is not None:
        named["path"] = model
    limit = wanted.get("train_problems")
    fewer = min(limit, problems) if isinstance(limit, int) else problems
    asked = spec.get("value")
    sampling = {name: asked[name] for name in SAMPLING if name in asked} if isinstance(asked, dict) else {}
    return {
        **sections,
        "name": f"probe of {spec.get('name', 'a job')}"[:200],
        "labels": {"probe": "true"},
        "model": named,
        "tasks": {**wanted, "train_problems": fewer},
        "value": {**sampling, "samples": samples, "unsolved": "keep"},
        "offline": {"human_solutions": False},
        "trainer": {"steps": 0},
    }


def learnability(prompts: Sequence[ProbedPrompt]) -> Learnability:
    """What a probe found; a problem whose samples earned different rewards is learnable."""
    kinds: dict[str, list[ProbedPrompt]] = {"unsolved": [], "solved": [], "learnable": [], "unknown": []}
    for prompt in prompts:
        kinds[kind_of(prompt)].append(prompt)
    known = [prompt for prompt in prompts if prompt.samples]
    rates = [(prompt.successes or 0) / (prompt.samples or 1) for prompt in known]
    histogram = [0] * BINS
    for rate in rates:
        histogram[min(BINS - 1, int(rate * BINS))] += 1
    samples = max((prompt.samples or 0 for prompt in known), default=0)
    with_solutions = sum(prompt.with_solutions for prompt in kinds["unsolved"])
    counts = {kind: len(members) for kind, members in kinds.items()}
    return Learnability(
        problems=len(prompts),
        samples=samples,
        **counts,
        unsolved_with_solutions=with_solutions,
        mean_success=sum(rates) / len(rates) if rates else None,
        histogram=tuple(histogram),
        suggestions=tuple(_suggestions(counts, samples, with_solutions)),
    )


def kind_of(prompt: ProbedPrompt) -> str:
    """unsolved, solved, learnable, or unknown where nothing was sampled."""
    if not prompt.samples:
        return "unknown"
    if prompt.lowest_reward != prompt.highest_reward:
        return "learnable"
    return "solved" if prompt.successes == prompt.samples else "unsolved"


def _suggestions(counts: Mapping[str, int], samples: int, with_solutions: int) -> list[str]:
    unsolved, solved, learnable = counts["unsolved"], counts["solved"], counts["learnable"]
    known = unsolved + solved + learnable
    found: list[str] = []
    if not known:
        return ["nothing was sampled: `spo job events` of the probe says why"]
    if unsolved:
        most = 1 - 0.05 ** (1 / samples)
        found.append(
            f"{unsolved} unsolved: their success rate may still be up to {most:.0%} (95 %); `value.unsolved: drop` "
            "leaves them out, `retry_hotter` looks for a first success"
        )
    if with_solutions:
        found.append(f"{with_solutions} unsolved ones come with solutions: a share of `human` in replay.mix uses them")
    if unsolved > MANY * known:
        found.append("most are unsolved: take easier problems, a stronger model, or train on solutions first (sft)")
    if solved > MANY * known:
        found.append("most are solved already: take harder problems; these teach little")
    if not learnable:
        found.append("none is learnable: with these problems an online run would have nothing to go by")
    elif learnable < unsolved + solved:
        needed = math.ceil(known / learnable)
        found.append(f"one prompt in {needed} teaches something: choose those, or expect so many times the sampling")
    return found


def histogram_lines(found: Learnability) -> list[str]:
    """One line per tenth of the success rate, with a bar."""
    most = max(found.histogram, default=0) or 1
    return [
        f"{index / BINS:.1f} to {(index + 1) / BINS:.1f} {count:6d} {'#' * math.ceil(BAR * count / most)}"
        for index, count in enumerate(found.histogram)
    ]
