"""Configurations of verl and TRL as JobSpecs: what has a counterpart is carried over, the rest is named."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import yaml

from spo.errors import InvalidInput
from spo.spec.job_spec import parse_job_spec

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
    text = _text(trainer, spec, left, fields)
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


def _text(trainer: str, spec: Mapping[str, object], left: Sequence[str], fields: Mapping[str, object]) -> str:
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
