"""The commented job that `spo init` writes: settings that follow from the model, the problems and the machine."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass

import yaml

from spo.cli.start.facts import MachineFacts, ModelFacts, TaskFacts
from spo.spec.job_spec import parse_job_spec
from spo.spec.plan.plan import in_gigabytes, plan_job
from spo.spec.plan.speed import Device
from spo.tasks.learnability import Learnability

ROUNDED = 32
# A response to problems that show no solution: of a small model without a template, of others.
SHORT_RESPONSE, LONG_RESPONSE = 128, 1024
MOST_EVALUATED = 200
LEAST_SPLIT = 20
# (parameters from here on, learning rate of all weights, where it is from)
RATES = (
    (300_000_000, 1.0e-6, "what models from half a billion parameters on learn with, docs/defaults.md"),
    (20_000_000, 2.0e-5, "as SmolLM2-135M learns with, deploy/recipes/real"),
    (0, 4.0e-4, "as the toy contest's model learns with, deploy/recipes/toy"),
)
ADAPTER_FACTOR = 10


@dataclass(frozen=True)
class Field:
    """A field of the file with its reason; `value` is written as JSON, which YAML includes."""

    name: str
    value: object
    why: str = ""

    def line(self) -> str:
        """The field as YAML, indented below its section."""
        comment = f"  # {self.why}" if self.why else ""
        return f"  {self.name}: {json.dumps(self.value, ensure_ascii=False)}{comment}"


Sections = dict[str, list[Field]]


def write_job(
    name: str, model: ModelFacts, tasks: TaskFacts, machine: MachineFacts, probed: Learnability | None = None
) -> str:
    """The file's text; it is a valid JobSpec. Raises InvalidInput where none can be made of it."""
    sections = _sections(model, tasks, machine)
    notes = _fit(sections, name, model, machine)
    head = [
        f"# Written by `spo init` for {in_words(model.shape.parameters)} parameters and {tasks.problems} problems.",
        f"# Machine: {machine.words}.",
        *(f"# {note}" for note in notes),
        *(f"# {line}" for line in _of_probe(probed)),
        "# `spo job submit FILE --validate-only` fills in every other field; docs/defaults.md says why they are so.",
    ]
    text = _text(name, sections, head)
    parse_job_spec(yaml.safe_load(text))
    return text


def in_words(count: int) -> str:
    """A number of parameters as people say it."""
    for size, unit in ((10**9, "billion"), (10**6, "million")):
        if count >= size:
            return f"{count / size:.3g} {unit}"
    return f"{count:,}"


def _text(name: str, sections: Sections, head: Sequence[str]) -> str:
    lines = [*head, f"name: {json.dumps(name, ensure_ascii=False)}", "seed: 0"]
    for section, fields in sections.items():
        lines += [f"{section}:", *(field.line() for field in fields)]
    return "\n".join(lines) + "\n"


def _sections(model: ModelFacts, tasks: TaskFacts, machine: MachineFacts) -> Sections:
    tiny = model.shape.parameters < RATES[1][0]
    prompt, response = _lengths(model, tasks)
    rate, source = next((rate, source) for least, rate, source in RATES if model.shape.parameters >= least)
    steps, batch = (500, 128) if machine.accelerated else (100, 32)
    held_out = min(MOST_EVALUATED, tasks.problems // 10) if tasks.problems >= LEAST_SPLIT else 0
    why_held_out = "split off the file, and never trained on" if held_out else "too few to split"
    prompts = f"the longest prompt has {tasks.prompt_tokens} tokens, {model.counted_by}"
    samples = 32 if machine.accelerated else 16
    return {
        "model": [
            Field("path", str(model.path)),
            Field("dtype", "float32" if tiny else "bfloat16", "float32 costs nothing at this size" if tiny else ""),
            Field("max_prompt_tokens", prompt, prompts),
            Field("max_response_tokens", response, _why_response(tasks)),
        ],
        "tasks": [
            Field("kind", tasks.kind),
            Field("path", str(tasks.path), f"decided by {tasks.decided_by}"),
            Field("evaluation_problems", held_out, why_held_out),
        ],
        "value": [
            Field("samples", samples, "of each problem by the model itself, before the first step"),
            Field("unsolved", "floor", "of problems it never solves; drop leaves them out"),
        ],
        "rollout": [Field("samples_per_prompt", 4)],
        "offline": [Field("human_solutions", bool(tasks.with_solutions), f"{tasks.with_solutions} problems have some")],
        "replay": [Field("mix", _mix(tasks), "shares of each batch")],
        "trainer": [
            Field("steps", steps),
            Field("batch_size", batch, "trajectories a step"),
            Field("learning_rate", rate, source),
        ],
        "evaluation": [
            Field("interval_steps", max(1, steps // 5)),
            Field("samples", 10, "of each held-out problem"),
            Field("ks", [1, 10]),
        ],
    }


def _lengths(model: ModelFacts, tasks: TaskFacts) -> tuple[int, int]:
    prompt = _rounded(tasks.prompt_tokens)
    usual = LONG_RESPONSE if model.has_template else SHORT_RESPONSE
    response = _rounded(tasks.solution_tokens * 3 // 2) if tasks.solution_tokens else usual
    if model.positions:
        prompt = min(prompt, max(1, model.positions - 1))
        response = max(1, min(response, model.positions - prompt))
    return prompt, response


def _rounded(count: int) -> int:
    return -(-count // ROUNDED) * ROUNDED


def _why_response(tasks: TaskFacts) -> str:
    if tasks.solution_tokens:
        return f"the longest solution has {tasks.solution_tokens} tokens"
    return "the problems have no solutions to measure; raise it where responses are cut off"


def _mix(tasks: TaskFacts) -> list[dict[str, object]]:
    reference: dict[str, object] = {"source": "reference", "share": 0.5, "correct_only": True}
    if not tasks.with_solutions:
        return [{"source": "online", "share": 0.5}, reference]
    return [{"source": "online", "share": 0.5}, reference | {"share": 0.25}, {"source": "human", "share": 0.25}]


def _fit(sections: Sections, name: str, model: ModelFacts, machine: MachineFacts) -> list[str]:
    """Change what must be for the machine, as `spo plan` says; returns what to tell of it."""
    spec = parse_job_spec(yaml.safe_load(_text(name, sections, ())))
    plan = plan_job(spec, model.shape, machine.devices, Device(memory_bytes=machine.device_bytes))
    told = f"The trainer needs {in_gigabytes(plan.trainer.peak)} on each of its devices (`spo plan`)"
    if plan.changes is None:
        return [f"{told}: no setting makes it fit here, take a smaller model or more devices."]
    for field, value in plan.changes.items():
        if field == "lora":
            sections["model"].append(Field("lora", {"rank": value}, "all weights do not fit"))
            rates = sections["trainer"]
            place = next(index for index, each in enumerate(rates) if each.name == "learning_rate")
            rate = rates[place].value
            assert isinstance(rate, float)
            rates[place] = Field("learning_rate", rate * ADAPTER_FACTOR, "an adapter learns with ten times as much")
        else:
            sections["trainer"].append(Field(field, value, "so that it fits"))
    return [f"{told}{'' if not plan.changes else ', more than there is; what makes it fit is set below'}."]


def _of_probe(probed: Learnability | None) -> list[str]:
    if probed is None:
        return ["Not probed: `spo tasks probe FILE` says which problems the model can learn from."]
    counts = f"{probed.learnable} learnable, {probed.unsolved} never solved, {probed.solved} always solved"
    return [f"Probed with {probed.samples} samples each: {counts}.", *probed.suggestions]
