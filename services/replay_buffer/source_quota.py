"""What a batch is asked to hold of each source, and drawing it from the source's window."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from services.replay_buffer.batch_log import MAX_STEP
from services.replay_buffer.sampling_index import SamplingIndex
from services.replay_buffer.store import SOURCE_CODES, source_name
from services.replay_buffer.windows import Candidate
from spo.algorithm.replay_sampling import aged_priority, draw_balanced, draw_ranks, draw_weighted, exact_counts
from spo.errors import FieldViolation, InvalidInput
from spo.spec.job_spec import SourceMix
from spo.spec.section import LIVE_SOURCES
from spo.v1.replay_service_pb2 import SampleBatchRequest


@dataclass(frozen=True)
class SourceQuota:
    """How many trajectories of one source a batch holds, and how they are chosen."""

    rule: SourceMix
    count: int


def quotas_of(request: SampleBatchRequest, index: SamplingIndex) -> list[SourceQuota]:
    """The batch's portions, from the request's mix or else the spec's. Raises InvalidInput by field.

    A request may change shares and correct_only; samplers and filters are the spec's.
    """
    _check_numbers(request)
    rules = _asked(request, index) if request.mix else list(index.spec.replay.mix)
    counts = exact_counts([rule.share for rule in rules], request.batch_size)
    for rule, count in zip(rules, counts, strict=True):
        unit = index.unit_size(rule.source)
        if count % unit:
            fault = f"gives {count} {rule.source} trajectories, no whole number of groups of {unit}"
            raise InvalidInput("a batch holds whole groups", violations=_fault("/batch_size", fault))
    return [SourceQuota(rule, count) for rule, count in zip(rules, counts, strict=True) if count]


def draw_quota(rng: np.random.Generator, index: SamplingIndex, quota: SourceQuota) -> list[Candidate]:
    """What the portion holds, units whole; the generator's state decides."""
    window = index.servable(quota.rule)
    count = quota.count // index.unit_size(quota.rule.source)
    sampler = quota.rule.sampler
    if sampler == "prioritised":
        ranks = draw_weighted(rng, _priorities(index, quota.rule, window), count)
    elif sampler == "per_prompt":
        ranks = draw_balanced(rng, [each.prompt_id for each in window], count)
    elif sampler == "outcome_balanced":
        ranks = draw_balanced(rng, [each.correct for each in window], count)
    else:
        ranks = draw_ranks(rng, len(window), count)
    return [window[rank] for rank in ranks]


def _priorities(index: SamplingIndex, rule: SourceMix, window: Sequence[Candidate]) -> list[float]:
    priorities = []
    for each in window:
        # What was made before training does not age.
        age = index.newest_version(rule.source) - each.version if rule.source in LIVE_SOURCES else 0
        if rule.priority == "value_spread":
            surprises = [index.value_spread(each.prompt_id)]
        else:
            qhat_0 = index.qhat_0(each.prompt_id)
            surprises = [reward - qhat_0 for reward in each.rewards]
        priorities.append(aged_priority(surprises, age, rule.priority_half_life))
    return priorities


def _check_numbers(request: SampleBatchRequest) -> None:
    if request.batch_size < 1:
        raise InvalidInput("a batch holds at least one trajectory", violations=_fault("/batch_size", "must be >= 1"))
    if not 0 <= request.step <= MAX_STEP:
        raise InvalidInput("a batch belongs to a step", violations=_fault("/step", f"must be in [0, {MAX_STEP}]"))


def _asked(request: SampleBatchRequest, index: SamplingIndex) -> list[SourceMix]:
    if any(part.source not in SOURCE_CODES for part in request.mix):
        raise InvalidInput("a mix names known sources", violations=_fault("/mix", "names an unknown source"))
    shares = [part.share for part in request.mix]
    if not all(share >= 0 for share in shares) or abs(sum(shares) - 1) > 1e-6:
        raise InvalidInput("the shares of a mix sum to 1", violations=_fault("/mix", f"sums to {sum(shares):g}"))
    names = [source_name(part.source) for part in request.mix]
    if len(set(names)) < len(names):
        raise InvalidInput("a mix names each source once", violations=_fault("/mix", f"names {', '.join(names)}"))
    return [
        index.rule(name).model_copy(update={"share": part.share, "correct_only": part.correct_only})
        for name, part in zip(names, request.mix, strict=True)
    ]


def _fault(pointer: str, message: str) -> tuple[FieldViolation, ...]:
    return (FieldViolation(pointer, message),)
