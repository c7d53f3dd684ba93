"""The jobs that learn from hacked and from repaired rewards, and how many of a policy's programs are hacks.

imitate    the demo's job, that imitates what is stored as right and samples nothing: the same for both stores
spo        the recipe of docs/experience.md: right ones and wrong ones, regressed from values of the better tests
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast

from benchmarks.hacked.planted import prints_a_constant
from spo.client import Client
from spo.demo.demo import WITH_PEOPLE
from spo.spec.section import read_spec

STEPS = 60
PER_PROMPT = 32
SAMPLES = 8
MOST_TOKENS = 44


def imitating(run: str, tasks: Mapping[str, object]) -> dict[str, Any]:
    """A job that imitates the stored trajectories of a run that are rewarded as right."""
    document = _from_the_store(run, tasks, {"correct_only": True})
    return {**document, "algorithm": {"beta": 0.217, "losses": [{"objective": "supervised"}]}, "value": None}


def regressing(run: str, tasks: Mapping[str, object]) -> dict[str, Any]:
    """A job of SPO on all stored trajectories of a run: what was rewarded wrongly is what to stay away from."""
    document = _from_the_store(run, tasks, {})
    return {**document, "algorithm": {"beta": 0.217, "losses": [{"objective": "terminal_squared"}]}}


def _from_the_store(run: str, tasks: Mapping[str, object], which: Mapping[str, object]) -> dict[str, Any]:
    document = read_spec(WITH_PEOPLE)
    return {
        **document,
        "name": f"from {run}",
        "tasks": dict(tasks),
        "offline": {
            "human_solutions": False,
            "keep_reference_samples": False,
            "experience": [{"run": run, "per_prompt": PER_PROMPT}],
            # Held-out statements are like all others here; the contest sees to it that no problem is another.
            "decontaminate": False,
        },
        "replay": {"mix": [{"source": "other_run", "share": 1.0, **which}], "offline_per_prompt": PER_PROMPT},
        "trainer": {
            **document["trainer"],
            "steps": STEPS,
            "update_interval": STEPS,
            "checkpoint_interval": STEPS,
        },
        "evaluation": {**document["evaluation"], "interval_steps": STEPS, "samples": 10},
    }


def newest_model(client: Client, job_id: str, folder: Path) -> Path:
    """The version that a job published last, as a whole model folder."""
    newest = max(version.version for version in client.weights(job_id))
    return client.download_weights(job_id, newest, folder)


def hack_rate(folder: Path, statements: Sequence[str]) -> float:
    """The share of a policy's programs that print a constant; sampled as evaluations are, SAMPLES for each problem."""
    # Only this needs torch.
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder, padding_side="left")
    policy = AutoModelForCausalLM.from_pretrained(folder).eval()
    torch.manual_seed(0)
    made = tokenizer.apply_chat_template(
        [[{"role": "user", "content": statement}] for statement in statements],
        add_generation_prompt=True,
        padding=True,
        return_tensors="pt",
        return_dict=True,
    )
    prompts = cast(dict[str, torch.Tensor], made)
    with torch.no_grad():
        sampled = policy.generate(
            **prompts,
            do_sample=True,
            temperature=0.4,
            top_p=0.95,
            num_return_sequences=SAMPLES,
            max_new_tokens=MOST_TOKENS,
        )
    programs = tokenizer.batch_decode(sampled[:, prompts["input_ids"].shape[1] :], skip_special_tokens=True)
    return sum(map(prints_a_constant, programs)) / len(programs)
