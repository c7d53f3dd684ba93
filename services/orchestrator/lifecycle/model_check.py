"""Whether a job's model can serve its prompts: found out before the job takes a place, not by the engine's death.

The facts of config.json are compared here. Tokenizer and chat template are run by `spo.model.check_tokenizer`, a
confined process; what it found is remembered by content, so submitting a spec again costs nothing.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from blake3 import blake3

from services.orchestrator.datasets.check import INHERITED
from services.orchestrator.lifecycle.teacher_check import teacher_faults
from services.orchestrator.replicas.registry import ReplicaRegistry
from spo.errors import FieldViolation, InternalError, InvalidInput, NotReady
from spo.model.adapter_folder import ALL_LINEAR, adapted_layers, tensor_shapes
from spo.model.folder import ModelFolder, inspect_model_folder
from spo.observability.logs import get_logger
from spo.spec.job_spec import JobSpec, ModelSpec
from spo.tasks.problem import Problem, TaskSets

log = get_logger("model-check")

# The longest prompts of a job are checked while the request waits, all of them before it is estimated.
PROMPTS_AT_SUBMIT = 1000
CPU_SECONDS = 20
CPU_SECONDS_PER_PROMPT = 0.02
# So much longer may it take on a machine that is busy.
WALL_FACTOR = 3
REMEMBERED = 256
NAMED_PROMPTS = 5
SAMPLE_PROMPT = ("sample", "Write a program that prints the sum of two numbers.")


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
    found = _ask(request, int(CPU_SECONDS + CPU_SECONDS_PER_PROMPT * len(prompts)))
    with _lock:
        _remembered[key] = found
        while len(_remembered) > REMEMBERED:
            _remembered.popitem(last=False)
    return found


def _content(folder: ModelFolder, model: ModelSpec, prompt_ids: Sequence[str]) -> str:
    """A digest of all that decides the answer; the ids of prompts are digests of their texts."""
    digest = blake3(json.dumps([model.max_prompt_tokens, model.chat_format.address, *prompt_ids]).encode())
    for file in (folder.path / "config.json", *folder.tokenizer_files):
        digest.update(file.name.encode() + b"\0" + blake3(file.read_bytes()).digest())
    # Too large to be read each time: a copy keeps their times, another file has others.
    weights = set(folder.safetensors_files)
    digest.update(repr([stamp[1:] for file, stamp in folder.content if file in weights]).encode())
    return digest.hexdigest()


def _ask(request: dict[str, object], cpu_seconds: int) -> CheckedPrompts:
    command = [sys.executable, "-m", "spo.model.check_tokenizer", str(cpu_seconds)]
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
        message = f"the model's tokenizer could not be tried in {WALL_FACTOR * cpu_seconds} s; try again"
        raise NotReady(message, code="checks_busy") from None
    lines = ran.stdout.splitlines() or [b'{"stage": "it is started"}']
    if ran.returncode == 0:
        report = json.loads(lines[-1])
        faults = tuple(FieldViolation(pointer, message) for pointer, message in report["faults"])
        return CheckedPrompts(faults, dict(report["too_long"]))
    return CheckedPrompts((FieldViolation("/model/path", _why_it_died(ran, lines, cpu_seconds)),), {})


def _why_it_died(ran: subprocess.CompletedProcess[bytes], lines: list[bytes], cpu_seconds: int) -> str:
    """What the model did to its reader. Raises NotReady, InternalError when it was somebody else's doing."""
    at = next((json.loads(line)["stage"] for line in reversed(lines) if line.startswith(b'{"stage"')), "it is started")
    if ran.returncode == -signal.SIGXCPU:
        return f"its tokenizer or chat template works for more than {cpu_seconds} s while {at}"
    if ran.returncode in (-signal.SIGABRT, -signal.SIGSEGV) or b"MemoryError" in ran.stderr[-2000:]:
        return f"its tokenizer or chat template takes too much memory, or breaks its reader, while {at}"
    log.error("a tokenizer could not be tried", status=ran.returncode, stage=at, stderr=ran.stderr[-4000:].decode())
    if ran.returncode < 0:
        raise NotReady("the process that tries tokenizers was ended; try again", code="checks_busy")
    raise InternalError("tokenizers cannot be tried here; the orchestrator's log says why")


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
