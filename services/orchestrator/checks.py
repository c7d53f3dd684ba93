"""What is checked before a job is accepted: spec, model, tokenizer, teacher, problems and a followed run, and what
speaks against its plan.

Whether a job's model can serve its prompts: found out before the job takes a place, not by the engine's death.
The facts of config.json are compared here. Tokenizer and chat template are run by `spo.model.check_model`, a
confined process; what it found is remembered by content, so submitting a spec again costs nothing.

What speaks against a spec: what nothing learns from, rate, temperature, and the plan on devices of live replicas.
Warnings, never a refusal.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from blake3 import blake3

from services.orchestrator.datasets import INHERITED, TaskLibrary
from services.orchestrator.jobs import JobStore
from services.orchestrator.replicas import LiveReplica, ReplicaRegistry
from spo.errors import FieldViolation, InternalError, InvalidInput, NotFound, NotReady
from spo.model.folder import ALL_LINEAR, ONE_NAME, ModelFolder, adapted_layers, inspect_model_folder, tensor_shapes
from spo.observability import get_logger
from spo.rpc.pools import AddressRules
from spo.spec.job_spec import JobSpec, ModelSpec, parse_job_spec
from spo.spec.plan import (
    LIKELY_SHARE,
    ModelShape,
    engine_warnings,
    known_shape,
    limit_warnings,
    memory_advice,
    unlearned_shares,
    value_warnings,
)
from spo.spec.section import LEAST_OF_ADAPTERS, LIVING_NATS_PER_TOKEN, AlgorithmSpec
from spo.spec.tasks import HttpVerifier, ModelVerifier, verifiers_in
from spo.tasks.problem import Problem, TaskSets

POINTER = "/algorithm/teacher/path"
# What gives tokens their ids. Templates and the names of special tokens may differ: prompts are the student's.
DECISIVE = frozenset({"tokenizer.json", "tokenizer.model", "vocab.json", "merges.txt", "added_tokens.json"})

log = get_logger("model-check")

# The longest prompts of a job are checked while the request waits, all of them before it is estimated.
PROMPTS_AT_SUBMIT = 1000
CPU_SECONDS = 20
CPU_SECONDS_PER_PROMPT = 0.02
# vLLM is imported for a parser that is named.
PARSER_CPU_SECONDS = 60
# For the names of a model's tensors: most of it is torch's start.
NAMES_CPU_SECONDS = 60
LAYER = re.compile(r"(?:model\.)?(?:language_model\.)?(?:model\.)?layers\.(\d+)\.")
# So much longer may it take on a machine that is busy.
WALL_FACTOR = 3
REMEMBERED = 256
NAMED_PROMPTS = 5
SAMPLE_PROMPT = ("sample", "Write a program that prints the sum of two numbers.")

MAX_DEPTH = 32


def teacher_faults(
    student: ModelFolder, algorithm: AlgorithmSpec, here: Callable[[str], Path]
) -> Iterator[FieldViolation]:
    """What speaks against the folder that `algorithm.teacher` names; nothing where it names none.

    here: the folder of a model's path on this machine; raises NotReady while it is fetched.
    """
    if algorithm.teacher is None:
        return
    try:
        teacher = inspect_model_folder(here(algorithm.teacher.path))
    except InvalidInput as error:
        yield from (FieldViolation(POINTER, each.message) for each in error.violations)
        return
    ours, theirs = _digests(student), _digests(teacher)
    if ours != theirs:
        names = ", ".join(sorted(name for name in ours.keys() | theirs.keys() if ours.get(name) != theirs.get(name)))
        yield FieldViolation(POINTER, f"its tokenizer is not the student's, {names} differ: it would read other tokens")
    small, large = (folder.config.get("vocab_size") for folder in (teacher, student))
    if isinstance(small, int) and isinstance(large, int) and small < large:
        yield FieldViolation(POINTER, f"it knows {small} ids of tokens, fewer than the student's {large}")


def _digests(folder: ModelFolder) -> dict[str, bytes]:
    return {file.name: blake3(file.read_bytes()).digest() for file in folder.tokenizer_files if file.name in DECISIVE}


def state_in_words(jobs: JobStore, job_id: str) -> str:
    """The state of a job that others may follow, "deleted" for one that is no more."""
    try:
        return jobs.state(job_id).value
    except NotFound:
        return "deleted"


@dataclass(frozen=True)
class CheckedPrompts:
    """What the confined process found: faults, and the tokens of each prompt that has too many, by id."""

    faults: tuple[FieldViolation, ...]
    too_long: dict[str, int]


class ModelCheck:
    """Checks models for jobs; safe from several threads. max_share: of the training prompts that may be too long.

    here: the folder of a model's path on this machine; raises NotReady while it is fetched.
    """

    def __init__(self, replicas: ReplicaRegistry, max_share: float, here: Callable[[str], Path] = Path) -> None:
        self.replicas = replicas
        self.here = here
        self.max_share = max_share
        self._running: dict[str, _Background] = {}

    def at_submit(self, spec: JobSpec, tasks: TaskSets | None) -> list[FieldViolation]:
        """What is wrong with the model for the longest of these prompts; without tasks, for a sample prompt.

        Raises NotReady (code "checks_busy") when the machine has no time to find out.
        """
        folder, faults = self._of_folder(spec)
        if folder is None or faults:
            return faults
        problems = [*tasks.train, *tasks.evaluation] if tasks else []
        longest = sorted(problems, key=lambda problem: len(problem.statement), reverse=True)[:PROMPTS_AT_SUBMIT]
        found = checked_prompts(folder, spec.model, longest)
        return [*found.faults, *self._too_many(spec, tasks, found)] if tasks else list(found.faults)

    def of_all_prompts(self, job_id: str, spec: JobSpec, tasks: TaskSets) -> dict[str, int]:
        """Training prompts that are too long, but few enough to go on without them: their tokens, by id.

        Raises NotReady while the check runs, in a thread of its own; InvalidInput (code "model_refused") in words.
        """
        folder, faults = self._of_folder(spec)
        if folder is None or faults:
            raise _in_words(faults)
        problems = [*tasks.train, *tasks.evaluation]
        if job_id not in self._running:
            self._running[job_id] = _Background(folder, spec.model, problems)
        background = self._running[job_id]
        if not background.is_done:
            raise NotReady(f"the model's tokenizer is tried on all {len(problems)} prompts", code="checks_busy")
        del self._running[job_id]
        found = background.result()
        faults = [*found.faults, *self._too_many(spec, tasks, found)]
        if faults:
            raise _in_words(faults)
        return found.too_long

    def _of_folder(self, spec: JobSpec) -> tuple[ModelFolder | None, list[FieldViolation]]:
        try:
            folder = inspect_model_folder(self.here(spec.model.path))
        except InvalidInput as error:
            return None, list(error.violations)
        engines = [replica.head_sizes for replica in self.replicas.live() if replica.pool == "inference"]
        faults = [*_config_faults(folder, spec.model, engines), *_adapter_faults(folder, spec.model)]
        if not faults:
            faults = name_faults(folder, adapter=spec.model.lora is not None)
        return folder, [*faults, *teacher_faults(folder, spec.algorithm, self.here)]

    def _too_many(self, spec: JobSpec, tasks: TaskSets, found: CheckedPrompts) -> Iterator[FieldViolation]:
        """An evaluation needs every held-out prompt; of the training prompts a few may be left out."""
        for name, problems, share in (("training", tasks.train, self.max_share), ("held-out", tasks.evaluation, 0.0)):
            long = [problem.problem_id for problem in problems if problem.problem_id in found.too_long]
            if len(long) > share * len(problems):
                named = ", ".join(f"{prompt_id} has {found.too_long[prompt_id]}" for prompt_id in long[:NAMED_PROMPTS])
                more = f" and {len(long) - NAMED_PROMPTS} more" if len(long) > NAMED_PROMPTS else ""
                yield FieldViolation(
                    "/model/max_prompt_tokens",
                    f"{len(long)} of {len(problems)} {name} prompts have more than {spec.model.max_prompt_tokens} "
                    f"tokens: {named}{more}",
                )


class _Background:
    """The check of all prompts of a job, in a thread."""

    def __init__(self, folder: ModelFolder, model: ModelSpec, problems: Sequence[Problem]) -> None:
        self._found: CheckedPrompts | None = None
        self._error: Exception | None = None
        self._thread = threading.Thread(
            target=self._run, args=(folder, model, problems), name="model-check", daemon=True
        )
        self._thread.start()
        # What is remembered is there at once.
        self._thread.join(0.2)

    @property
    def is_done(self) -> bool:
        return not self._thread.is_alive()

    def result(self) -> CheckedPrompts:
        if self._found is None:
            raise self._error or InternalError("the check of a model ended without a result")
        return self._found

    def _run(self, folder: ModelFolder, model: ModelSpec, problems: Sequence[Problem]) -> None:
        try:
            self._found = checked_prompts(folder, model, problems)
        except Exception as error:
            self._error = error


_remembered: OrderedDict[str, CheckedPrompts] = OrderedDict()
_lock = threading.Lock()


def checked_prompts(folder: ModelFolder, model: ModelSpec, problems: Sequence[Problem]) -> CheckedPrompts:
    """The folder's tokenizer and template tried on these prompts. Raises NotReady, InternalError."""
    prompts = [(problem.problem_id, problem.statement) for problem in problems] or [SAMPLE_PROMPT]
    vocabulary = _number(folder.config, "vocab_size")
    key = _content(folder, model, [prompt_id for prompt_id, _ in prompts])
    with _lock:
        if key in _remembered:
            _remembered.move_to_end(key)
            return _remembered[key]
    request = {
        "folder": str(folder.path),
        "max_prompt_tokens": model.max_prompt_tokens,
        "vocabulary": vocabulary,
        "chat": asdict(model.chat_format),
        "prompts": prompts,
    }
    beside = 0 if model.chat.tool_parser == "auto" else PARSER_CPU_SECONDS
    found = _ask("tokenizer", request, int(beside + CPU_SECONDS + CPU_SECONDS_PER_PROMPT * len(prompts)))
    _remember(key, found)
    return found


def name_faults(folder: ModelFolder, *, adapter: bool) -> list[FieldViolation]:
    """Why the trainer cannot build it, or engines would refuse what it publishes. Raises NotReady, InternalError.

    adapter: nothing else is published. Without torch here the trainer finds it out before its first step.
    """
    shapes = tensor_shapes(folder.safetensors_files)
    layers = _number(folder.config, "num_hidden_layers")
    numbers = (match for name in shapes if (match := LAYER.match(name)))
    foreign = next((match for match in numbers if layers is not None and int(match[1]) >= layers), None)
    if foreign and not adapter:
        message = (
            f"its folder holds {foreign.string}, and the model {layers} layers: the trainer knows no more than those"
        )
        return [FieldViolation("/model/path", message)]
    if folder.config.get("model_type") in ONE_NAME or find_spec("torch") is None:
        return []
    told = json.dumps([adapter, folder.config, sorted(shapes.items())], sort_keys=True)
    key = blake3(told.encode()).hexdigest()
    with _lock:
        known = _remembered.get(key)
    if known is None:
        known = _ask("names", {"folder": str(folder.path), "adapter": adapter}, NAMES_CPU_SECONDS)
        _remember(key, known)
    return list(known.faults)


def _remember(key: str, found: CheckedPrompts) -> None:
    with _lock:
        _remembered[key] = found
        while len(_remembered) > REMEMBERED:
            _remembered.popitem(last=False)


def _content(folder: ModelFolder, model: ModelSpec, prompt_ids: Sequence[str]) -> str:
    """A digest of all that decides the answer; the ids of prompts are digests of their texts."""
    chat = model.chat_format
    digest = blake3(json.dumps([model.max_prompt_tokens, chat.address, chat.tool_parser, *prompt_ids]).encode())
    for file in (folder.path / "config.json", *folder.tokenizer_files):
        digest.update(file.name.encode() + b"\0" + blake3(file.read_bytes()).digest())
    # Too large to be read each time: a copy keeps their times, another file has others.
    weights = set(folder.safetensors_files)
    digest.update(repr([stamp[1:] for file, stamp in folder.content if file in weights]).encode())
    return digest.hexdigest()


def _ask(work: str, request: dict[str, object], cpu_seconds: int) -> CheckedPrompts:
    command = [sys.executable, "-m", "spo.model.check_model", work, str(cpu_seconds)]
    # Without our secrets, and without the network.
    environment = {name: os.environ[name] for name in INHERITED if name in os.environ}
    environment |= {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", "OMP_NUM_THREADS": "1"}
    try:
        ran = subprocess.run(
            command,
            input=json.dumps(request).encode(),
            capture_output=True,
            env=environment,
            timeout=WALL_FACTOR * cpu_seconds,
            check=False,
        )
    except subprocess.TimeoutExpired:
        message = f"the model could not be tried in {WALL_FACTOR * cpu_seconds} s; try again"
        raise NotReady(message, code="checks_busy") from None
    lines = ran.stdout.splitlines() or [b'{"stage": "it is started"}']
    if ran.returncode == 0:
        report = json.loads(lines[-1])
        faults = tuple(FieldViolation(pointer, message) for pointer, message in report["faults"])
        return CheckedPrompts(faults, dict(report["too_long"]))
    tried = "its tokenizer or chat template" if work == "tokenizer" else "its config.json"
    return CheckedPrompts((FieldViolation("/model/path", _why_it_died(tried, ran, lines, cpu_seconds)),), {})


def _why_it_died(tried: str, ran: subprocess.CompletedProcess[bytes], lines: list[bytes], cpu_seconds: int) -> str:
    """What the model did to its reader. Raises NotReady, InternalError when it was somebody else's doing."""
    at = next((json.loads(line)["stage"] for line in reversed(lines) if line.startswith(b'{"stage"')), "it is started")
    if ran.returncode == -signal.SIGXCPU:
        return f"{tried} works for more than {cpu_seconds} s while {at}"
    if ran.returncode in (-signal.SIGABRT, -signal.SIGSEGV) or b"MemoryError" in ran.stderr[-2000:]:
        return f"{tried} takes too much memory, or breaks its reader, while {at}"
    log.error("a model could not be tried", status=ran.returncode, stage=at, stderr=ran.stderr[-4000:].decode())
    if ran.returncode < 0:
        raise NotReady("the process that tries models was ended; try again", code="checks_busy")
    raise InternalError("models cannot be tried here; the orchestrator's log says why")


def _config_faults(
    folder: ModelFolder, model: ModelSpec, engines: Sequence[frozenset[int]]
) -> Iterator[FieldViolation]:
    """engines: the head sizes of each live inference replica; empty: it takes all, or has not said."""
    if not folder.has_tokenizer:
        yield FieldViolation("/model/path", f"{folder.path} holds no tokenizer")
    quantised = folder.config.get("quantization_config")
    if quantised:
        method = quantised.get("quant_method", "") if isinstance(quantised, dict) else ""
        yield FieldViolation("/model/path", f"its weights are quantised ({method}), which the trainer cannot train")
    positions = _number(folder.config, "max_position_embeddings", "n_positions")
    tokens = model.max_prompt_tokens + model.max_response_tokens
    if positions is not None and tokens > positions:
        message = f"prompt and response have {tokens} tokens together, and the model {positions} positions"
        yield FieldViolation("/model/max_response_tokens", message)
    size = _head_size(folder)
    if size is not None and engines and all(sizes and size not in sizes for sizes in engines):
        known = ", ".join(map(str, sorted(frozenset[int]().union(*engines))))
        yield FieldViolation(
            "/model/path", f"its attention heads have {size} dimensions; the engines here know {known}"
        )


def _adapter_faults(folder: ModelFolder, model: ModelSpec) -> Iterator[FieldViolation]:
    """Targets of the adapter that are no linear layer of the model, by the names in its files."""
    if model.lora is None or isinstance(model.lora.targets, str):
        return
    shapes = tensor_shapes(folder.safetensors_files)
    for index, target in enumerate(model.lora.targets):
        if not adapted_layers(shapes, [target]):
            known = ", ".join(sorted({layer.rpartition(".")[2] for layer in adapted_layers(shapes, ALL_LINEAR)}))
            message = f"the model has no linear layer {target}; it has {known or 'none'}"
            yield FieldViolation(f"/model/lora/targets/{index}", message)


def _head_size(folder: ModelFolder) -> int | None:
    given = _number(folder.config, "head_dim")
    width, heads = _number(folder.config, "hidden_size"), _number(folder.config, "num_attention_heads")
    return given or (width // heads if width and heads else None)


def _number(config: dict[str, object], *names: str) -> int | None:
    """The first of these fields that is a positive number, also where a model of several parts keeps its text part."""
    text = config.get("text_config")
    for part in (config, text if isinstance(text, dict) else {}):
        for name in names:
            value = part.get(name)
            if isinstance(value, int) and value > 0:
                return value
    return None


def _in_words(faults: Sequence[FieldViolation]) -> InvalidInput:
    """For the failure of a job, which is one text."""
    told = "; ".join(f"{fault.pointer}: {fault.message}" for fault in faults)
    return InvalidInput(f"the model cannot serve the job: {told}", code="model_refused", violations=tuple(faults))


@dataclass(frozen=True)
class PlanWarnings:
    """Compares specs with the replicas that live now; a role that none has told of is left out.

    redis_bytes: maxmemory of Redis, 0: without one.
    """

    replicas: ReplicaRegistry
    redis_bytes: Callable[[], int] = lambda: 0

    def of(self, spec: JobSpec, mean_tokens: float | None = None) -> list[FieldViolation]:
        """A pointer to a field that would help, and why, for each role in which the job fits nobody's devices.

        mean_tokens: length of the job's responses so far; None before any is known.
        """
        found = [*unlearned_shares(spec), *_of_rates(spec), *_of_temperature(spec, mean_tokens), *_of_sharpness(spec)]
        shape = known_shape(Path(spec.model.path))
        found += limit_warnings(spec, shape, self.redis_bytes())
        if shape is None:
            return found
        live = [replica for replica in self.replicas.live() if replica.device_memory_bytes]
        pools = {pool: [each for each in live if each.pool == pool] for pool in {replica.pool for replica in live}}
        found += _of_trainers(spec, shape, pools.get("trainer", []))
        # What an engine may take on a CPU is a setting of its own.
        engines = [each.device_memory_bytes for each in pools.get("inference", []) if each.accelerated]
        found += engine_warnings(spec, shape, engines)
        found += value_warnings(spec, shape, [each.device_memory_bytes for each in pools.get("value-estimation", [])])
        return found


def _of_rates(spec: JobSpec) -> Iterator[FieldViolation]:
    if spec.model.lora and spec.trainer.learning_rate < LEAST_OF_ADAPTERS:
        yield FieldViolation(
            "/trainer/learning_rate",
            f"an adapter learns at about ten times the rate of all weights: {LEAST_OF_ADAPTERS:g} at least, and this "
            f"is {spec.trainer.learning_rate:g}",
        )


def _of_sharpness(spec: JobSpec) -> Iterator[FieldViolation]:
    """Where Qhat_0 is that of a sharper policy than the one whose log-probs stand for pi0."""
    value = spec.value
    if value is None or not any(term.needs("value") for term in spec.algorithm.losses):
        return
    for name, usual in (("temperature", 1.0), ("top_p", 1.0)):
        if getattr(value, name) != usual:
            yield FieldViolation(
                f"/value/{name}",
                f"Qhat_0 is then that of pi0 as it is sampled here, and the loss's log pi0 is at {name} 1: "
                "their difference is a bias of every residual of the prompt",
            )


def _of_temperature(spec: JobSpec, mean_tokens: float | None) -> Iterator[FieldViolation]:
    """Where no likely length makes the nats per token those of runs that live."""
    if not spec.algorithm.regresses_log_ratios:
        return
    longest = mean_tokens or float(spec.model.max_response_tokens)
    shortest = mean_tokens or LIKELY_SHARE * longest
    span, (lowest, highest) = spec.tasks.reward.scale, LIVING_NATS_PER_TOKEN
    least, most = (spec.algorithm.nats_per_token(tokens, span) for tokens in (longest, shortest))
    if least <= highest and most >= lowest:
        return
    asked = f"{least:.2g}" if f"{least:.2g}" == f"{most:.2g}" else f"{least:.2g} to {most:.2g}"
    lengths = (
        f"{mean_tokens:.0f} tokens, the mean so far," if mean_tokens else f"{shortest:.0f} to {longest:.0f} tokens"
    )
    one = AlgorithmSpec(beta=1, beta_per=spec.algorithm.beta_per)
    low, high = one.nats_per_token(longest, span) / highest, one.nats_per_token(shortest, span) / lowest
    yield FieldViolation(
        "/algorithm/beta",
        f"asks each token of a response for {asked} nats of log-ratio; runs that stayed stable ask for {lowest:g} to "
        f"{highest:g}, which with responses of {lengths} is a beta of {low:.2g} to {high:.2g}",
    )


def _of_trainers(spec: JobSpec, shape: ModelShape, trainers: Sequence[LiveReplica]) -> Iterator[FieldViolation]:
    found = [
        memory_advice(spec, shape, len(trainer.device_memory_bytes), min(trainer.device_memory_bytes))
        for trainer in trainers
    ]
    if not found or any(advice.fits for advice in found):
        return
    # The one that lacks the least.
    advice = min(found, key=lambda each: each.needed_bytes / each.usable_bytes)
    helps = next(iter(advice.changes or {}), "")
    pointer = "/model/lora" if helps == "lora" else f"/trainer/{helps}".rstrip("/")
    yield FieldViolation(pointer, f"the job does not fit the trainer: {advice.words}")


@dataclass(frozen=True)
class SpecCheck:
    """What a spec must pass, whether it is submitted or made by a fork."""

    library: TaskLibrary
    model: ModelCheck
    addresses: AddressRules

    def accept(self, body: bytes, admitted: Callable[[JobSpec], JobSpec] = lambda spec: spec) -> JobSpec:
        """Return the resolved spec of a request body; `admitted` refuses what is not the caller's, and resolves names.

        Raises InvalidInput: code "malformed_json" (HTTP 400), or as `require_possible`.
        """
        document = parse_json(body)
        if isinstance(document, dict):
            # As a resolved spec comes back: it may be submitted as it is.
            document.pop("warnings", None)
        spec = admitted(parse_job_spec(document))
        self.require_possible(spec)
        return spec

    def require_possible(self, spec: JobSpec) -> None:
        """Refuse a spec unless its problems are there, and its model can serve them.

        Raises InvalidInput (code "invalid_job_spec") with a pointer to each fault, NotReady when the machine has no
        time to find out.
        """
        tasks = None
        violations: list[FieldViolation] = []
        try:
            tasks = self._problems(spec)
        except InvalidInput as error:
            violations += error.violations or [FieldViolation("/tasks/path", error.message)]
        violations = [*self.model.at_submit(spec, tasks), *violations, *self._faults_of_addresses(spec)]
        violations += _sources_that_stay_empty(spec, tasks)
        if violations:
            raise InvalidInput(
                "the job cannot run as it is specified", code="invalid_job_spec", violations=tuple(violations)
            )

    def _faults_of_addresses(self, spec: JobSpec) -> Iterator[FieldViolation]:
        """What verifiers would refuse to call; by which address a name is reached, they find out when they call it."""
        for pointer, verifier in verifiers_in(spec.tasks.verifier):
            match verifier:
                case HttpVerifier():
                    address, field = verifier.url, "url"
                case ModelVerifier(address=str(address)):
                    field = "address"
                case _:
                    continue
            try:
                self.addresses.require_named(address, f"/tasks/{pointer}/{field}")
            except InvalidInput as error:
                yield from error.violations

    def _problems(self, spec: JobSpec) -> TaskSets:
        tasks = self.library.load(spec.tasks)
        if not tasks.train:
            raise InvalidInput("there is no training problem in it")
        return tasks


def _sources_that_stay_empty(spec: JobSpec, tasks: TaskSets | None) -> list[FieldViolation]:
    """Shares of a batch that no problem would ever fill: the job would fail at its first step."""
    if tasks is None or not tasks.train or not spec.trainer.steps:
        return []
    right = spec.offline.human_solutions and any(problem.human_solutions for problem in tasks.train)
    wrong = spec.offline.wrong_human_solutions and any(problem.wrong_solutions for problem in tasks.train)
    return [
        FieldViolation(
            f"/replay/mix/{index}",
            f"none of the {len(tasks.train)} training problems comes with solutions by people, which this share is "
            "drawn from",
        )
        for index, part in enumerate(spec.replay.mix)
        if part.source == "human" and part.share > 0 and not (right or (wrong and not part.correct_only))
    ]


def parse_json(body: bytes) -> Any:
    """Decode a JSON body. Raises InvalidInput (code "malformed_json").

    NaN, integers of more than 64 bits, a key twice and absurd depth are refused as well.
    """
    try:
        document = json.loads(body, parse_constant=_refuse_constant, parse_int=_integer, object_pairs_hook=_unique)
        _check_depth(document, 0)
    except (ValueError, RecursionError) as error:
        reason = "nested too deep" if isinstance(error, RecursionError) else str(error)
        raise InvalidInput(f"the body is not valid JSON: {reason[:200]}", code="malformed_json") from None
    return document


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not a number in JSON")


def _integer(text: str) -> int:
    number = int(text)
    if abs(number) >= 2**63:
        raise ValueError(f"{text[:30]} needs more than 64 bits")
    return number


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    members = dict(pairs)
    if len(members) < len(pairs):
        raise ValueError("a key appears twice in one object")
    return members


def _check_depth(node: Any, depth: int) -> None:
    if depth > MAX_DEPTH:
        raise ValueError(f"nested deeper than {MAX_DEPTH}")
    for child in node.values() if isinstance(node, dict) else node if isinstance(node, list) else ():
        _check_depth(child, depth + 1)
