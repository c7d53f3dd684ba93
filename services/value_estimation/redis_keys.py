"""Redis keys that only value-estimation knows; those that others read are in spo.redis_keys. Same conventions."""

from __future__ import annotations

from spo.redis_keys import digest
from spo.spec.tasks import RewardSpec


def value_counts(value_key_digest: str) -> str:
    """Hash: part -> `samples:successes`, with rewards where they are shares; outlives runs. Value-estimation."""
    return f"spo:value-estimation:counts:{value_key_digest}"


def reference_deaths(work: str) -> str:
    """Hash: in_company, alone (begun and never ended), reason of loading a reference; expires an hour after the last.
    Value-estimation."""
    return f"spo:value-estimation:deaths:{digest(work)}"


def value_population(population_digest: str) -> str:
    """Hash: prompt id -> JSON {samples, successes, features} of prompts sampled alike, outlives runs. Value-estimation.

    The digest is of (reference hash, sampler, judge version, reward).
    """
    return f"spo:value-estimation:population:{population_digest}"


def value_origin(value_key_digest: str, extra_sampler: str) -> str:
    """String: id of a run whose replay buffer holds the counted and the extra samples, scored. Value-estimation."""
    return f"spo:value-estimation:origin:{digest(value_key_digest, extra_sampler)}"


def pivotal_labels(labels_digest: str) -> str:
    """Hash: position -> `rollouts:successes` of pi0 from that prefix, outlives runs. Value-estimation.

    The digest is of (reference hash, prompt, tests, sampler, judge version, response tokens).
    """
    return f"spo:value-estimation:labels:{labels_digest}"


def value_key(
    reference_hash: str, prompt_id: str, tests_digest: str, sampler: str, judge_version: str, reward: RewardSpec
) -> str:
    """Digest under which a prompt's success counts outlive runs; beta is not in it (docs: keys that outlive a run).

    Scores between right and wrong are counted as rewards, so another map from one to the other is another key.
    """
    mapped = () if reward == RewardSpec() else (reward.model_dump_json(),)
    return digest(reference_hash, prompt_id, tests_digest, sampler, judge_version, *mapped)
