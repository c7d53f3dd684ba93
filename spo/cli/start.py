"""`spo init`, `spo plan` and `spo convert`: a commented job for a model and problems that fits this machine, or from
verl and TRL.
"""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Literal

import typer
import yaml
from pydantic import ValidationError

from spo.cli.tasks import probed_prompts, prompt_counter, tasks_and_model
from spo.console import ExitCode, Output, console, error_console, print_document, print_rows
from spo.errors import FieldViolation, InvalidInput
from spo.spec.job_spec import parse_job_spec
from spo.spec.plan import (
    GIGABYTE,
    Device,
    ModelShape,
    in_gigabytes,
    named_shape,
    plan_job,
    rows as plan_rows,
    shape_of_folder,
    unlearned_shares,
)
from spo.spec.section import read_spec
from spo.spec.tasks import ComparisonName, ExtractionName
from spo.tasks.answer import ANSWER_LANGUAGE
from spo.tasks.load import MOST_PROBED, PROBE_SAMPLES, Learnability, learnability, load_tasks, probe_document
from spo.tasks.problem import Problem
from spo.tasks.records import ProblemRow, Record, read_records

PROBE_SECONDS = 10
# So many problems are read through the tokenizer; the longest of more is guessed by characters.
MOST_TOKENIZED = 2000

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

COLUMNS = (
    *("prompt", "question", "problem", "messages", "data_source", "reward_model"),
    *("solution", "answer", "ground_truth", "completion"),
)
ANSWER_COLUMNS = ("ground_truth", "answer", "solution")
# verl's data sources -> how its own scorers find and compare an answer.
RULES: dict[str, dict[str, str]] = {
    "openai/gsm8k": {"extraction": "after_marker", "marker": "####", "comparison": "numeric"},
    "lighteval/MATH": {"extraction": "boxed", "comparison": "math"},
    "DigitalLearningGmbH/MATH-lighteval": {"extraction": "boxed", "comparison": "math"},
    "HuggingFaceH4/MATH-500": {"extraction": "boxed", "comparison": "math"},
}
MOST_FAULTS = 20

Trainer = Literal["verl", "trl"]
# Their field -> ours. What is null, or means "none" by a value <= 0, is left out.
VERL = {
    "trainer.experiment_name": "name",
    "actor_rollout_ref.model.path": "model.path",
    "actor_rollout_ref.model.lora_rank": "model.lora.rank",
    "actor_rollout_ref.model.lora_alpha": "model.lora.alpha",
    "data.max_prompt_length": "model.max_prompt_tokens",
    "data.max_response_length": "model.max_response_tokens",
    "data.train_files": "tasks.path",
    "data.val_files": "tasks.evaluation_path",
    "actor_rollout_ref.rollout.n": "rollout.samples_per_prompt",
    "actor_rollout_ref.rollout.temperature": "rollout.temperature",
    "actor_rollout_ref.rollout.top_p": "rollout.top_p",
    "actor_rollout_ref.actor.optim.lr": "trainer.learning_rate",
    "actor_rollout_ref.actor.optim.weight_decay": "trainer.weight_decay",
    "actor_rollout_ref.actor.optim.lr_warmup_steps": "trainer.warmup_steps",
    "actor_rollout_ref.actor.grad_clip": "trainer.max_grad_norm",
    "actor_rollout_ref.actor.ppo_max_token_len_per_gpu": "trainer.max_tokens_per_micro_batch",
    "actor_rollout_ref.model.enable_gradient_checkpointing": "trainer.activation_checkpointing",
    "trainer.total_training_steps": "trainer.steps",
    "trainer.save_freq": "trainer.checkpoint_interval",
    "trainer.test_freq": "evaluation.interval_steps",
}
TRL = {
    "run_name": "name",
    "seed": "seed",
    "model_name_or_path": "model.path",
    "lora_r": "model.lora.rank",
    "lora_alpha": "model.lora.alpha",
    "max_prompt_length": "model.max_prompt_tokens",
    "max_completion_length": "model.max_response_tokens",
    "num_generations": "rollout.samples_per_prompt",
    "temperature": "rollout.temperature",
    "top_p": "rollout.top_p",
    "max_steps": "trainer.steps",
    "learning_rate": "trainer.learning_rate",
    "weight_decay": "trainer.weight_decay",
    "warmup_steps": "trainer.warmup_steps",
    "max_grad_norm": "trainer.max_grad_norm",
    "gradient_checkpointing": "trainer.activation_checkpointing",
    "save_steps": "trainer.checkpoint_interval",
    "eval_steps": "evaluation.interval_steps",
}
# Why some that people look for are not carried over.
REASONS = {
    "beta": "ours is the temperature of the soft value, not a weight of KL",
    "kl_coef": "algorithm.beta is the temperature of the soft value, not a weight of KL",
    "kl_loss_coef": "algorithm.beta is the temperature of the soft value, not a weight of KL",
    "adv_estimator": "SPO reads values off the policy; docs/baselines.md has GRPO and PPO here",
    "loss_type": "docs/baselines.md has GRPO and its relatives here",
    "dataset_name": "nothing is fetched: `spo convert rows` makes a problem file of a local one",
    "train_batch_size": "prompts run ahead of training here: replay.samples_per_insert bounds by how much",
}

convert = typer.Typer(no_args_is_help=True, help="Files of verl and TRL as files of this platform.")


@dataclass(frozen=True)
class ModelFacts:
    """Of the model: its sizes, its most positions (0: it does not say), whether it has a chat template."""

    path: Path
    shape: ModelShape
    positions: int
    has_template: bool
    count_tokens: Callable[[str], int]
    counted_by: str


@dataclass(frozen=True)
class TaskFacts:
    """Of the problems: how many, tokens of the longest prompt and solution (0: none has one), what decides."""

    path: Path
    kind: str
    problems: int
    prompt_tokens: int
    solution_tokens: int
    with_solutions: int
    decided_by: str


@dataclass(frozen=True)
class MachineFacts:
    """Devices of the trainer, bytes of each that it may have; accelerated: GPUs and no CPU."""

    devices: int
    device_bytes: int
    accelerated: bool
    words: str


def look_at_model(folder: Path) -> ModelFacts:
    """Raises InvalidInput where the folder tells no sizes."""
    shape = shape_of_folder(folder)
    config = json.loads((folder / "config.json").read_text())
    positions = config.get("max_position_embeddings")
    count, how, template = prompt_counter(folder)
    return ModelFacts(folder.absolute(), shape, positions if isinstance(positions, int) else 0, template, count, how)


def look_at_problems(path: Path, kind: str, problems: Sequence[Problem], model: ModelFacts) -> TaskFacts:
    """Raises InvalidInput where there are none."""
    if not problems:
        raise InvalidInput(f"{path} holds no problem", code="invalid_tasks")
    read = sorted(problems, key=lambda problem: -len(problem.statement))[:MOST_TOKENIZED]
    solutions = [solution for problem in read for solution in problem.human_solutions[:1]]
    answers = sum(problem.language == ANSWER_LANGUAGE for problem in problems)
    decided = {0: "tests of programs", len(problems): "answers"}.get(answers, "tests of programs, and answers")
    return TaskFacts(
        path.absolute(),
        kind,
        len(problems),
        max(model.count_tokens(problem.statement) for problem in read),
        max(map(model.count_tokens, solutions), default=0),
        sum(bool(problem.human_solutions) for problem in problems),
        decided,
    )


def look_at_machine() -> MachineFacts:
    """Its GPUs as the driver tells them; where there is none, processors and memory, which all services share."""
    command = ["nvidia-smi", "--query-gpu=memory.total", "--format=csv,noheader,nounits"]
    try:
        asked = subprocess.run(command, capture_output=True, text=True, timeout=PROBE_SECONDS, check=True)
        sizes = [int(line) << 20 for line in asked.stdout.split()]
    except (OSError, ValueError, subprocess.SubprocessError):
        sizes = []
    if sizes:
        words = f"{len(sizes)} GPUs of {min(sizes) / GIGABYTE:.0f} GB"
        if len(sizes) == 1:
            # Rollouts, values and training share it.
            return MachineFacts(1, min(sizes) // 2, accelerated=True, words=f"{words}, half of it for the trainer")
        return MachineFacts(
            len(sizes) // 2, min(sizes), accelerated=True, words=f"{words}, half of them for the trainer"
        )
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    words = f"no GPU, {os.cpu_count()} cores, {memory / GIGABYTE:.0f} GB, a third of it for the trainer"
    return MachineFacts(1, memory // 3, accelerated=False, words=words)


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


def init(
    model: Annotated[Path, typer.Argument(help="Folder of the model to start from.", exists=True, file_okay=False)],
    tasks: Annotated[Path, typer.Argument(help="Problems: a file, a folder, or a `tasks` section.", exists=True)],
    out: Annotated[Path, typer.Option("--out", help="File to write; one that is there stays.")] = Path("job.yaml"),
    kind: Annotated[
        str, typer.Option("--kind", help="Of a file of problems: jsonl, taco, code_contests, ...")
    ] = "jsonl",
    *,
    probe: Annotated[
        bool, typer.Option("--probe", help="Ask the running platform what the model makes of the problems first.")
    ] = False,
    timeout: Annotated[float, typer.Option("--timeout", help="Longest wait for the probe, seconds.")] = 86_400,
) -> None:
    """Look at a model and problems and write a commented job whose settings fit them and this machine."""
    if out.exists():
        raise InvalidInput(f"{out} is there already; name another with --out", code="unwritable_file")
    about = look_at_model(model)
    wanted, _ = tasks_and_model(tasks, kind, read_spec)
    problems = load_tasks(wanted.model_copy(update={"evaluation_problems": 0})).train
    source = Path(wanted.path) if wanted.path else tasks
    facts = look_at_problems(source, wanted.kind, problems, about)
    machine = look_at_machine()
    name = f"{model.absolute().name} on {source.stem}"
    text = write_job(name, about, facts, machine)
    if probe:
        document = probe_document(yaml.safe_load(text), PROBE_SAMPLES, MOST_PROBED)
        found = learnability(probed_prompts(document, MOST_PROBED, timeout))
        text = write_job(name, about, facts, machine, found)
    try:
        with out.open("x", encoding="utf-8") as file:
            file.write(text)
    except OSError as error:
        raise InvalidInput(f"cannot write {out}: {error.strerror}", code="unwritable_file") from None
    console.print(f"{out}: {facts.problems} problems, {machine.words}", markup=False, highlight=False, soft_wrap=True)
    console.print(f"next: spo job submit {out} --wait", markup=False, highlight=False, soft_wrap=True)


def plan(
    file: Annotated[Path, typer.Argument(help="The job's spec.")],
    gpus: Annotated[int, typer.Option(min=1, help="Devices of the trainer.")] = 8,
    gpu_memory: Annotated[float, typer.Option(min=1, help="Of each device, GB.")] = 80,
    model_shape: Annotated[str | None, typer.Option(help="A published model's sizes in place of the folder's.")] = None,
    output: Annotated[Output, typer.Option("--output", "-o")] = Output.TABLE,
) -> None:
    """Memory of every role, sizes on disk, modelled speed; fails when it does not fit, saying what would.

    A share of the mix that nothing learns from is a warning.
    """
    document = read_spec(file)
    document.setdefault("model", {}).setdefault("path", "/models/pi0")
    spec = parse_job_spec(document)
    shape = named_shape(model_shape) if model_shape else shape_of_folder(Path(spec.model.path))
    found = plan_job(spec, shape, gpus, Device(memory_bytes=int(gpu_memory * GIGABYTE)))
    unlearned = list(unlearned_shares(spec))
    if output is Output.TABLE:
        print_rows(plan_rows(found), ("role", "what", "needs"), output)
    else:
        print_document({**found.document(), "spec_warnings": [asdict(each) for each in unlearned]}, output)
    for each in unlearned:
        typer.echo(f"warning: {each.pointer}: {each.message}", err=True)
    for warning in found.warnings:
        typer.echo(f"does not fit: {warning}", err=True)
    if found.warnings:
        raise typer.Exit(ExitCode.INVALID_INPUT)


@dataclass(frozen=True)
class ConvertedRows:
    """Rows for a problem file, and the system prompts that stood before the questions."""

    rows: list[dict[str, object]]
    systems: tuple[str, ...]


def convert_rows(path: Path, rule: Mapping[str, str], answer: str | None = None) -> ConvertedRows:
    """Convert a JSONL or Parquet file; `rule` decides for rows whose data source says nothing, `answer` names a column.

    Raises InvalidInput with the place of each bad row.
    """
    rows: list[dict[str, object]] = []
    systems: dict[str, None] = {}
    faults: list[FieldViolation] = []
    for record in _records(path, answer):
        try:
            row, system = _converted(record, rule, answer)
            ProblemRow.model_validate(row)
        except ValidationError as error:
            faults.append(FieldViolation(record.place, str(error.errors()[0]["msg"])))
        except ValueError as error:
            faults.append(FieldViolation(record.place, str(error)))
        else:
            rows.append(row)
            systems |= {system: None} if system else {}
    if faults or not rows:
        message = f"{len(faults)} rows cannot be converted" if faults else f"{path} holds no row"
        raise InvalidInput(message, code="invalid_tasks", violations=tuple(faults[:MOST_FAULTS]))
    return ConvertedRows(rows, tuple(systems))


def _records(path: Path, answer: str | None) -> Iterator[Record]:
    return read_records(path, (*COLUMNS, answer) if answer else COLUMNS)


def _converted(record: Record, rule: Mapping[str, str], answer: str | None) -> tuple[dict[str, object], str]:
    fields = record.fields
    if not isinstance(fields, dict):
        raise ValueError("a row is a mapping of columns")
    statement, system = _asked(fields)
    chosen = RULES.get(str(fields.get("data_source")), rule)
    row: dict[str, object] = {"statement": statement, "answer": {"expected": [_truth(fields, answer)], **chosen}}
    if completion := _said(fields.get("completion")):
        row["human_solutions"] = [completion]
    return row, system


def _asked(fields: Mapping[str, object]) -> tuple[str, str]:
    """The question and the system prompt before it, of text or of messages."""
    names = ("prompt", "question", "problem", "messages")
    asked = next((fields[name] for name in names if fields.get(name) is not None), None)
    if isinstance(asked, str) and asked:
        return asked, ""
    if not isinstance(asked, Sequence) or not asked:
        raise ValueError(f"no question: it is looked for in {', '.join(names)}")
    said = [(str(turn.get("role")), turn.get("content")) for turn in asked if isinstance(turn, Mapping)]
    system = "\n".join(str(text) for role, text in said if role == "system")
    questions = [text for role, text in said if role != "system"]
    if len(questions) != 1 or not isinstance(questions[0], str):
        raise ValueError("a conversation of several turns: see docs/conversations.md")
    return questions[0], system


def _truth(fields: Mapping[str, object], answer: str | None) -> str:
    reward = fields.get("reward_model")
    found = reward.get("ground_truth") if isinstance(reward, Mapping) else None
    for name in (answer,) if answer else ANSWER_COLUMNS:
        found = fields.get(name) if found is None or answer else found
    if not isinstance(found, str | int | float):
        raise ValueError("no answer: it is looked for in reward_model.ground_truth, " + ", ".join(ANSWER_COLUMNS))
    return str(found)


def _said(completion: object) -> str:
    """A completion as text, of text or of one message."""
    if isinstance(completion, str):
        return completion
    if isinstance(completion, Sequence) and len(completion) == 1 and isinstance(completion[0], Mapping):
        return str(completion[0].get("content", ""))
    return ""


@dataclass(frozen=True)
class ConvertedConfig:
    """The job's file as text; carried: their fields that it holds, left: those that it does not."""

    text: str
    carried: tuple[str, ...]
    left: tuple[str, ...]


def convert_config(trainer: Trainer, document: Mapping[str, object], tasks_path: str | None = None) -> ConvertedConfig:
    """The JobSpec of a configuration; tasks_path: a converted problem file. Raises InvalidInput with pointers."""
    fields = dict(_flat(document, ""))
    names = VERL if trainer == "verl" else TRL
    spec: dict[str, object] = {"tasks": {"kind": "jsonl", "path": "/tasks/train.jsonl"}}
    carried: list[str] = []
    adapter = _number(fields, "actor_rollout_ref.model.lora_rank" if trainer == "verl" else "lora_r")
    for theirs, ours in names.items():
        value = fields.get(theirs)
        if not _says_something(value) or (ours.startswith("model.lora") and not adapter):
            continue
        _put(spec, ours, _path(value) if ours.endswith("path") else value)
        carried.append(theirs)
    batch, parts = _batch_of_verl(fields) if trainer == "verl" else _batch_of_trl(fields)
    if batch:
        _put(spec, "trainer.batch_size", batch)
        carried += parts
    if tasks_path:
        _put(spec, "tasks.path", tasks_path)
    left = tuple(name for name, value in fields.items() if name not in carried and _says_something(value))
    text = _foreign_text(trainer, spec, left, fields)
    parse_job_spec(yaml.safe_load(text))
    return ConvertedConfig(text, tuple(carried), left)


def _says_something(value: object) -> bool:
    negative = isinstance(value, int | float) and not isinstance(value, bool) and value < 0
    return value is not None and value != "" and not negative and not (isinstance(value, str) and "${" in value)


def _number(fields: Mapping[str, object], name: str) -> int:
    value = fields.get(name)
    return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else 0


def _batch_of_verl(fields: Mapping[str, object]) -> tuple[int, tuple[str, ...]]:
    """Trajectories of an update: verl's mini-batch counts prompts."""
    name = "actor_rollout_ref.actor.ppo_mini_batch_size"
    prompts, samples = _number(fields, name), _number(fields, "actor_rollout_ref.rollout.n") or 1
    return prompts * samples, (name,)


def _batch_of_trl(fields: Mapping[str, object]) -> tuple[int, tuple[str, ...]]:
    """Trajectories of an update on one process: TRL's batch counts completions."""
    names = ("per_device_train_batch_size", "gradient_accumulation_steps")
    return _number(fields, names[0]) * (_number(fields, names[1]) or 1), names


def _path(value: object) -> object:
    if isinstance(value, Sequence) and not isinstance(value, str):
        if len(value) != 1:
            raise InvalidInput("one file of problems, not several; convert them into one", code="invalid_job_spec")
        return value[0]
    return value


def _flat(node: Mapping[str, object], prefix: str) -> Iterator[tuple[str, object]]:
    for name, value in node.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def _put(spec: dict[str, object], place: str, value: object) -> None:
    *sections, name = place.split(".")
    node = spec
    for section in sections:
        child = node.setdefault(section, {})
        assert isinstance(child, dict)
        node = child
    node[name] = value


def _foreign_text(trainer: str, spec: Mapping[str, object], left: Sequence[str], fields: Mapping[str, object]) -> str:
    lines = [
        f"# Made from a configuration of {trainer} by `spo convert`; the objective is SPO's own, docs/defaults.md.",
        "#",
    ]
    lines += [f"# not carried over: {name}: {_short(fields[name])}{_reason(name)}" for name in left]
    return "\n".join(lines) + "\n" + yaml.safe_dump(dict(spec), sort_keys=False, allow_unicode=True)


def _reason(name: str) -> str:
    found = REASONS.get(name.rpartition(".")[2])
    return f" ({found})" if found else ""


def _short(value: object) -> str:
    return " ".join(str(value).split())[:80]


@convert.command("rows")
def rows(
    source: Annotated[Path, typer.Argument(help="Their rows, JSONL or Parquet.", exists=True)],
    out: Annotated[Path, typer.Argument(help="Problem file to write, JSONL; one that is there stays.")],
    answer: Annotated[str | None, typer.Option("--answer", help="The column of the right answer.")] = None,
    extraction: Annotated[
        ExtractionName, typer.Option("--extraction", help="Where a response has its answer.")
    ] = "boxed",
    comparison: Annotated[ComparisonName, typer.Option("--comparison", help="When it is right.")] = "math",
    marker: Annotated[str, typer.Option("--marker", help="Of the extraction after_marker or xml_tag.")] = "",
) -> None:
    """Rows with a prompt and an answer as problems; data sources that verl scores itself keep its rules."""
    rule: dict[str, str] = {
        "extraction": extraction,
        "comparison": comparison,
        **({"marker": marker} if marker else {}),
    }
    found = convert_rows(source, rule, answer)
    _write(out, "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in found.rows))
    console.print(f"{out}: {len(found.rows)} problems", markup=False, highlight=False, soft_wrap=True)
    for system in found.systems[:3]:
        say = f"they had a system prompt: say it as model.chat.system: {json.dumps(system, ensure_ascii=False)[:300]}"
        error_console.print(say, markup=False, highlight=False, soft_wrap=True)


@convert.command("config")
def config(
    trainer: Annotated[Literal["verl", "trl"], typer.Argument(help="Whose.")],
    source: Annotated[
        Path, typer.Argument(help="Their YAML or JSON, as verl prints it and `trl grpo --config` reads it.")
    ],
    out: Annotated[Path, typer.Argument(help="Job to write; one that is there stays.")],
    tasks: Annotated[
        Path | None, typer.Option("--tasks", help="The problem file that `spo convert rows` made.")
    ] = None,
) -> None:
    """A job from a configuration; what has no counterpart is named in its comments."""
    found = convert_config(trainer, read_spec(source), str(tasks.absolute()) if tasks else None)
    _write(out, found.text)
    say = f"{out}: {len(found.carried)} settings carried over, {len(found.left)} not (named in it)"
    console.print(say, markup=False, highlight=False, soft_wrap=True)


def _write(out: Path, text: str) -> None:
    try:
        with out.open("x", encoding="utf-8") as file:
            file.write(text)
    except FileExistsError:
        raise InvalidInput(f"{out} is there already; name another", code="unwritable_file") from None
    except OSError as error:
        raise InvalidInput(f"cannot write {out}: {error.strerror}", code="unwritable_file") from None
