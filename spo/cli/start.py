"""`spo init`, `spo plan` and `spo convert`: a commented job for a model and problems that fits this machine, or from
verl and TRL.
"""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated, Literal

import typer
import yaml

from spo.cli.jobs import what_is_not_read
from spo.cli.tasks import (
    SUFFIXES_OF_SPECS,
    Preview,
    previews,
    print_preview,
    print_response,
    probed_prompts,
    prompt_counter,
    tasks_and_model,
)
from spo.console import ExitCode, Output, console, error_console, print_document, print_rows
from spo.errors import InvalidInput
from spo.local.judge_client import AUTO
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
from spo.spec.tasks import ComparisonName, ExtractionName, TasksSpec
from spo.tasks.answer import ANSWER_LANGUAGE
from spo.tasks.foreign import OWN_PROBLEMS, Findings, read_foreign, spec_lines
from spo.tasks.foreign_answers import Wish
from spo.tasks.load import MOST_PROBED, PROBE_SAMPLES, Learnability, learnability, load_tasks, probe_document
from spo.tasks.problem import Problem
from spo.tasks.records import Record, jsonl_problem

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
NO_VALUES = "value: null  # nothing here reads Qhat_0"
# The recipe that remembers, as `deploy/recipes/toy/online_memory.yaml` has it.
GROUP = 8
MIX: list[dict[str, object]] = [
    {"source": "online", "share": 0.6666666666666667},
    {"source": "memory", "share": 0.3333333333333333},
]
LOSSES: list[dict[str, object]] = [
    {"objective": "grpo", "normalise": "deviation", "sources": ["online"]},
    {"objective": "supervised", "sources": ["memory"], "coefficient": 0.1},
]

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

# Of a file that is looked at: shown, and read to know what it is.
SHOWN_ROWS, LOOKED_AT = 3, 100

convert = typer.Typer(no_args_is_help=True, help="Files of verl, TRL and others as files of this platform.")
data = typer.Typer(no_args_is_help=True, help="What a file of other projects is, and how the platform takes it.")


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
    """Of the problems: how many, tokens of the longest prompt and solution (0: none has one), what decides.

    given: fields of the `tasks` section that was handed over, which stay as they are.
    """

    path: Path | None
    kind: str
    problems: int
    prompt_tokens: int
    solution_tokens: int
    with_solutions: int
    decided_by: str
    given: Mapping[str, object] = field(default_factory=dict)


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


def look_at_problems(
    wanted: TasksSpec, problems: Sequence[Problem], model: ModelFacts, stated: Collection[str] = ()
) -> TaskFacts:
    """stated: names of fields that the person has set. Raises InvalidInput where there are no problems."""
    if not problems:
        raise InvalidInput(f"{wanted.path or wanted.kind} holds no problem", code="invalid_tasks")
    read = sorted(problems, key=lambda problem: -len(problem.statement))[:MOST_TOKENIZED]
    solutions = [solution for problem in read for solution in problem.human_solutions[:1]]
    answers = sum(problem.language == ANSWER_LANGUAGE for problem in problems)
    decided = {0: "tests of programs", len(problems): "answers"}.get(answers, "tests of programs, and answers")
    if "verifier" in stated and wanted.verifier.kind != "program":
        decided = f"the verifier of kind {wanted.verifier.kind} below"
    return TaskFacts(
        Path(wanted.path).absolute() if wanted.path else None,
        wanted.kind,
        len(problems),
        max(model.count_tokens(problem.statement) for problem in read),
        max(map(model.count_tokens, solutions), default=0),
        sum(bool(problem.human_solutions) for problem in problems),
        decided,
        wanted.model_dump(mode="json", include=set(stated) - {"kind", "path"}, exclude_unset=True),
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
    name: str,
    model: ModelFacts,
    tasks: TaskFacts,
    machine: MachineFacts,
    probed: Learnability | None = None,
    *,
    system: str = "",
) -> str:
    """The file's text; it is a valid JobSpec. Raises InvalidInput where none can be made of it.

    system: the system prompt of the problems' source.
    """
    sections = _sections(model, tasks, machine)
    if system:
        sections["model"].append(Field("chat", {"system": system}, "as the rows had it"))
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
        lines += [f"{section}:" if fields else NO_VALUES, *(field.line() for field in fields)]
    return "\n".join(lines) + "\n"


def _sections(model: ModelFacts, tasks: TaskFacts, machine: MachineFacts) -> Sections:
    tiny = model.shape.parameters < RATES[1][0]
    prompt, response = _lengths(model, tasks)
    rate, source = next((rate, source) for least, rate, source in RATES if model.shape.parameters >= least)
    steps, prompts_per_batch = (500, 8) if machine.accelerated else (100, 2)
    # Two thirds of a batch are fresh groups, one third is memory.
    fresh = prompts_per_batch * GROUP
    also = [Field("memory", {"also": ["human"]}, "people's answers count as found")] if tasks.with_solutions else []
    batch = fresh * 3 // 2
    prompts = f"the longest prompt has {tasks.prompt_tokens} tokens, {model.counted_by}"
    return {
        "model": [
            Field("path", str(model.path)),
            Field("dtype", "float32" if tiny else "bfloat16", "float32 costs nothing at this size" if tiny else ""),
            Field("max_prompt_tokens", prompt, prompts),
            Field("max_response_tokens", response, _why_response(tasks)),
        ],
        "tasks": _task_fields(tasks),
        "algorithm": [
            Field("losses", LOSSES, "fresh groups by GRPO, what memory holds by token: docs/results/memory.md")
        ],
        "value": [],
        "rollout": [
            Field("samples_per_prompt", GROUP),
            Field("temperature", 1.0),
            Field("top_p", 1.0, "as the objective's importance ratios suppose"),
            Field("unsolved_share", 0.5, "of the prompts go to those without a right answer so far"),
        ],
        "offline": [
            Field("human_solutions", bool(tasks.with_solutions), f"{tasks.with_solutions} problems have some"),
            Field("keep_reference_samples", value=False),
        ],
        "replay": [
            Field("mix", MIX, "shares of each batch"),
            Field("unit", "group"),
            *also,
            Field("max_staleness", 4),
            Field("samples_per_insert", 1.0, "every rollout is learned from once, and again where it is remembered"),
            Field("max_times_sampled", 1),
            Field("min_online", fresh),
            Field("error_buffer", fresh),
        ],
        "trainer": [
            Field("steps", steps),
            Field("batch_size", batch, "trajectories a step"),
            Field("learning_rate", rate, source),
            Field("update_interval", 1),
        ],
        "evaluation": [
            Field("interval_steps", max(1, steps // 5)),
            Field("samples", 10, "of each held-out problem"),
            Field("ks", [1, 10]),
        ],
    }


def _task_fields(tasks: TaskFacts) -> list[Field]:
    decided = f"decided by {tasks.decided_by}"
    fields = [Field("kind", tasks.kind, "" if tasks.path else decided)]
    if tasks.path:
        fields.append(Field("path", str(tasks.path), decided))
    if tasks.path and not {"evaluation_problems", "evaluation_path"} & set(tasks.given):
        held_out = min(MOST_EVALUATED, tasks.problems // 10) if tasks.problems >= LEAST_SPLIT else 0
        why = "split off the file, and never trained on" if held_out else "too few to split"
        fields.append(Field("evaluation_problems", held_out, why))
    return [*fields, *(Field(name, value, "as it was given") for name, value in tasks.given.items())]


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


def _fit(sections: Sections, name: str, model: ModelFacts, machine: MachineFacts) -> list[str]:
    """Change what must be for the machine, as `spo plan` says; returns what to tell of it."""
    spec = parse_job_spec(yaml.safe_load(_text(name, sections, ())))
    plan = plan_job(spec, model.shape, machine.devices, Device(memory_bytes=machine.device_bytes))
    told = f"The trainer needs {in_gigabytes(plan.trainer.peak)} on each of its devices (`spo plan`)"
    if plan.changes is None:
        return [f"{told}: no setting makes it fit here, take a smaller model or more devices."]
    for setting, value in plan.changes.items():
        if setting == "lora":
            sections["model"].append(Field("lora", {"rank": value}, "all weights do not fit"))
            rates = sections["trainer"]
            place = next(index for index, each in enumerate(rates) if each.name == "learning_rate")
            rate = rates[place].value
            assert isinstance(rate, float)
            rates[place] = Field("learning_rate", rate * ADAPTER_FACTOR, "an adapter learns with ten times as much")
        else:
            sections["trainer"].append(Field(setting, value, "so that it fits"))
    return [f"{told}{'' if not plan.changes else ', more than there is; what makes it fit is set below'}."]


def _of_probe(probed: Learnability | None) -> list[str]:
    if probed is None:
        return ["Not probed: `spo tasks probe FILE` says which problems the model can learn from."]
    counts = f"{probed.learnable} learnable, {probed.unsolved} never solved, {probed.solved} always solved"
    return [f"Probed with {probed.samples} samples each: {counts}.", *probed.suggestions]


def init(
    first: Annotated[Path, typer.Argument(metavar="MODEL", help="Folder of the model to start from.", exists=True)],
    second: Annotated[
        Path,
        typer.Argument(
            metavar="TASKS", help="Problems of any project, or a `tasks` section; in either order.", exists=True
        ),
    ],
    out: Annotated[Path, typer.Option("--out", help="File to write; one that is there stays.")] = Path("job.yaml"),
    kind: Annotated[
        str | None, typer.Option("--kind", help="Of a file of problems: jsonl, taco, ...; default: as its rows say.")
    ] = None,
    *,
    probe: Annotated[
        bool, typer.Option("--probe", help="Ask the running platform what the model makes of the problems first.")
    ] = False,
    timeout: Annotated[float, typer.Option("--timeout", help="Longest wait for the probe, seconds.")] = 86_400,
) -> None:
    """Look at a model and problems and write a commented job whose settings fit them and this machine."""
    model, tasks = (second, first) if (second / "config.json").is_file() else (first, second)
    if out.exists():
        raise InvalidInput(f"{out} is there already; name another with --out", code="unwritable_file")
    about = look_at_model(model)
    wanted, system = _wanted_tasks(tasks, kind, out)
    problems = load_tasks(wanted.model_copy(update={"evaluation_problems": 0})).train
    # A file of problems says nothing but where it is.
    facts = look_at_problems(wanted, problems, about, wanted.model_fields_set if _is_spec(tasks) else ())
    if lost := what_is_not_read([problem.statement for problem in problems[:LOOKED_AT]], about.count_tokens):
        error_console.print(f"warning: {lost}", markup=False, highlight=False, soft_wrap=True)
    machine = look_at_machine()
    name = f"{model.absolute().name} on {Path(wanted.path).stem if wanted.path else tasks.stem}"
    text = write_job(name, about, facts, machine, system=system)
    if probe:
        document = probe_document(yaml.safe_load(text), PROBE_SAMPLES, MOST_PROBED)
        found = learnability(probed_prompts(document, MOST_PROBED, timeout))
        text = write_job(name, about, facts, machine, found, system=system)
    _write(out, text)
    console.print(f"{out}: {facts.problems} problems, {machine.words}", markup=False, highlight=False, soft_wrap=True)
    console.print(f"next: spo job submit {out} --wait", markup=False, highlight=False, soft_wrap=True)


def _wanted_tasks(file: Path, kind: str | None, out: Path) -> tuple[TasksSpec, str]:
    """The tasks of a file, and the system prompt of its rows; rows of another project are converted beside the job."""
    if kind is not None or file.is_dir() or _is_spec(file):
        return tasks_and_model(file, kind or "jsonl", read_spec)[0], ""
    # A file may be long, and what it is stands in its first rows.
    found = read_foreign(file, most=LOOKED_AT)
    if not found.read or set(found.shapes) == {OWN_PROBLEMS} or not (found.taken or found.refused):
        return tasks_and_model(file, "jsonl", read_spec)[0], ""
    if found.makes == "experience":
        message = (
            f"{file} holds responses, no problems: `spo data look {file}` says how they are imported and learned from"
        )
        raise InvalidInput(message, code="invalid_tasks")
    if len(found.kinds) == 1 and (read_by := next(iter(found.kinds))) and file.suffix in (".jsonl", ".gz", ".parquet"):
        return tasks_and_model(file, read_by, read_spec)[0], ""
    whole = convert_rows(file, {}, leave_out=True)
    converted = out.with_name(f"{file.name.partition('.')[0]}_converted.jsonl")
    _write(converted, _json_lines(whole.rows))
    console.print(f"{converted}: {len(whole.rows)} problems", markup=False, highlight=False, soft_wrap=True)
    for line in _said_of(whole.findings):
        error_console.print(line, markup=False, highlight=False, soft_wrap=True)
    has_one = len(whole.systems) == 1 and whole.findings.systems.total() == whole.findings.taken
    return tasks_and_model(converted, "jsonl", read_spec)[0], whole.systems[0] if has_one else ""


def _is_spec(file: Path) -> bool:
    """Whether a file is a job or its `tasks` section; one of JSON may be a list of rows instead."""
    if file.suffix not in SUFFIXES_OF_SPECS:
        return False
    with file.open(encoding="utf-8", errors="replace") as opened:
        return file.suffix != ".json" or not opened.read(1024).lstrip().startswith("[")


def plan(
    file: Annotated[Path, typer.Argument(help="The job's spec.")],
    gpus: Annotated[int, typer.Option(min=1, help="Devices of the trainer.")] = 8,
    gpu_memory: Annotated[float, typer.Option(min=1, help="Of each device, GB.")] = 80,
    model_shape: Annotated[str | None, typer.Option(help="A published model's sizes in place of the folder's.")] = None,
    redis_memory: Annotated[float, typer.Option(min=0, help="maxmemory of Redis, GB; 0: not asked.")] = 0,
    output: Annotated[Output, typer.Option("--output", "-o")] = Output.TABLE,
) -> None:
    """Memory of every role, sizes on disk, modelled speed; fails when it does not fit, saying what would.

    A share of the mix that nothing learns from is a warning.
    """
    document = read_spec(file)
    document.setdefault("model", {}).setdefault("path", "/models/pi0")
    spec = parse_job_spec(document)
    shape = named_shape(model_shape) if model_shape else shape_of_folder(Path(spec.model.path))
    device = Device(memory_bytes=int(gpu_memory * GIGABYTE))
    found = plan_job(spec, shape, gpus, device, int(redis_memory * GIGABYTE))
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
    """Rows for a file of problems or of experience, and the one system prompt that stood before all questions."""

    rows: list[dict[str, object]]
    systems: tuple[str, ...]
    findings: Findings


def convert_rows(
    path: Path, rule: Mapping[str, str], answer: str | None = None, *, leave_out: bool = False
) -> ConvertedRows:
    """Convert a file of another project; `rule` decides for rows that do not say it, `answer` names a column.

    Raises InvalidInput with the place of each bad row, unless those are left out.
    """
    found = read_foreign(path, Wish(rule, answer))
    if not found.rows or (found.refused and not leave_out):
        raise found.refusal()
    return ConvertedRows(found.rows, tuple(found.systems), found)


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


AnswerOption = Annotated[str | None, typer.Option("--answer", help="The column of the right answer.")]
ExtractionOption = Annotated[
    ExtractionName | None,
    typer.Option("--extraction", help="Where a response has its answer; default: where the prompt asks for it."),
]
ComparisonOption = Annotated[
    ComparisonName | None, typer.Option("--comparison", help="When it is right; default: as the answers need.")
]
MarkerOption = Annotated[str, typer.Option("--marker", help="Of the extraction after_marker or xml_tag.")]


def _rule(extraction: str | None, comparison: str | None, marker: str) -> dict[str, str]:
    given = {"extraction": extraction, "comparison": comparison, "marker": marker}
    return {name: value for name, value in given.items() if value}


@convert.command("rows")
def rows(
    files: Annotated[
        tuple[Path, Path],
        typer.Argument(metavar="FILE OUT", help="Their rows; the JSONL file to write: one that is there stays."),
    ],
    answer: AnswerOption = None,
    extraction: ExtractionOption = None,
    comparison: ComparisonOption = None,
    marker: MarkerOption = "",
    *,
    leave_out: Annotated[
        bool, typer.Option("--leave-out", help="Write the other rows where some cannot be taken.")
    ] = False,
) -> None:
    """Rows of another project as problems, or as experience where they hold rated responses.

    `spo data look FILE` says first what a file is. Data sources that verl scores itself keep its rules.
    """
    source, out = files
    found = convert_rows(source, _rule(extraction, comparison, marker), answer, leave_out=leave_out)
    _write(out, _json_lines(found.rows))
    _tell(f"{out}: {len(found.rows)} {'problems' if found.findings.makes == 'problems' else 'responses'}")
    for line in _said_of(found.findings):
        error_console.print(line, markup=False, highlight=False, soft_wrap=True)
    for line in _next_commands(found.findings, out, is_written=True):
        _tell(line)


def _json_lines(rows: Iterable[Mapping[str, object]]) -> str:
    return "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)


def _said_of(found: Findings) -> Iterator[str]:
    """What was changed or left out, each thing once with its number of rows."""
    for text, count in found.added.most_common():
        yield f"{count} rows: their prompt did not ask for what decides, so this stands behind it: {text}"
    for text, count in found.notes.most_common():
        yield f"{count} rows: {text}"
    for reason in found.reasons():
        yield f"left out: {reason}"
    if len(found.systems) == 1 and found.systems.total() == found.taken:
        said = json.dumps(next(iter(found.systems)), ensure_ascii=False)[:300]
        yield f"they had a system prompt: say it as model.chat.system: {said}"
    elif found.systems:
        yield f"{found.systems.total()} rows: their system prompts differ, so each stands before its question"


def _next_commands(found: Findings, out: Path, *, is_written: bool) -> Iterator[str]:
    """What to do with a file of this kind."""
    if found.makes == "problems":
        return
    tasks = out.with_suffix(".tasks.yaml")
    problems = out.with_suffix(".problems.jsonl")
    if is_written:
        statements = dict.fromkeys(str(row.get("statement", "")) for row in found.rows)
        _write(problems, _json_lines({"statement": text, "arguments": {}} for text in statements if text))
        _write(tasks, spec_lines(found, problems))
        yield f"{problems}: {len(statements)} questions that they answer; {tasks}: the tasks that hold these"
    judge = "" if all("reward" in row for row in found.rows) else " --judge all"
    yield f"next: spo experience import {out} --name {found.run} --tasks {tasks}{judge}"
    if found.are_preferences:
        yield f"then: spo job submit {tasks} --model FOLDER --wait"


@data.command("look")
def look(
    file: Annotated[Path, typer.Argument(help="Rows of any project: JSONL, JSON, Parquet or Arrow.", exists=True)],
    answer: AnswerOption = None,
    extraction: ExtractionOption = None,
    comparison: ComparisonOption = None,
    marker: MarkerOption = "",
    output: Annotated[Output, typer.Option("--output", "-o")] = Output.TABLE,
) -> None:
    """Say what a file is, show three of its rows as they would be asked and judged, and write the lines of the spec."""
    found = read_foreign(file, Wish(_rule(extraction, comparison, marker), answer))
    if not found.rows:
        raise found.refusal()
    where, runs = os.environ.get("SPO_SANDBOX_JUDGE_ADDRESS", AUTO), os.environ.get("SPO_LAUNCHER_RUNS_PATH", "runs")
    shown: list[Preview] = []
    if found.makes == "problems":
        first = [jsonl_problem(Record(str(file), row)) for row in found.rows[:SHOWN_ROWS]]
        shown = list(previews(first, lambda statement: statement, where, Path(runs)))
    out = file.with_name(f"{file.name.partition('.')[0]}_converted.jsonl")
    is_experience = found.makes == "experience"
    lines = spec_lines(found, out.with_suffix(".problems.jsonl") if is_experience else out)
    commands = []
    if is_experience or str(out.absolute()) in lines:
        commands = [f"spo convert rows {file} {out}{' --leave-out' if found.refused else ''}"]
    commands += [
        line.removeprefix("next: ").removeprefix("then: ") for line in _next_commands(found, out, is_written=False)
    ]
    if output is Output.TABLE:
        _print_look(found, shown, lines, commands)
        return
    document: dict[str, object] = {"file": str(file), "rows": found.read, "taken": found.taken, "makes": found.makes}
    document |= {"shapes": dict(found.shapes), "notes": list(_said_of(found)), "left_out": found.refused}
    document |= {"previews": [asdict(one) for one in shown], "converted": found.rows[:SHOWN_ROWS]}
    print_document(document | {"spec": lines, "commands": commands}, output)


def _print_look(found: Findings, shown: Sequence[Preview], lines: str, commands: Sequence[str]) -> None:
    names = ", ".join(f"{count} of {name}" for name, count in found.shapes.most_common())
    _tell(f"{found.path}: {found.read} rows, {names}; taken as {found.makes}")
    for line in _said_of(found):
        _tell(line)
    for place, one in enumerate(shown, start=1):
        print_preview(place, one)
    for row in found.rows[:SHOWN_ROWS] if found.makes == "experience" else ():
        print_response(row)
    console.rule("in the job's spec", align="left")
    _tell(lines.rstrip())
    for command in commands:
        _tell(f"next: {command}")


def _tell(text: str) -> None:
    console.print(text, markup=False, highlight=False, soft_wrap=True)


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
    _tell(f"{out}: {len(found.carried)} settings carried over, {len(found.left)} not (named in it)")


def _write(out: Path, text: str) -> None:
    try:
        with out.open("x", encoding="utf-8") as file:
            file.write(text)
    except FileExistsError:
        raise InvalidInput(f"{out} is there already; name another", code="unwritable_file") from None
    except OSError as error:
        raise InvalidInput(f"cannot write {out}: {error.strerror}", code="unwritable_file") from None
