"""Qhat_0 under a later reference: a published weight version of the run takes the place of pi0 (section 6)."""

from __future__ import annotations

import time
from collections.abc import Iterator

from services.value_estimation import redis_keys as own_keys
from services.value_estimation.counts import count, total
from services.value_estimation.prompt_estimate import sampler
from services.value_estimation.service_clients import ServiceClients
from spo.observability import metrics
from spo.spec.job_spec import RewardSpec
from spo.spec.reward import needs_all_tests, reward_of
from spo.tasks.problem import extract_program
from spo.v1.prompt_pb2 import SOURCE_REFERENCE, PromptGroup, Sampling
from spo.v1.trajectory_pb2 import Trajectory
from spo.v1.value_pb2 import EstimateRequest, PromptValue


def value_under(
    request: EstimateRequest, clients: ServiceClients, reward: RewardSpec, chunk_samples: int
) -> PromptValue:
    """The success frequency of the request's reference version, stored under a key with that version's digest.

    Its samples are not kept: the replay buffer has others of the policy. Raises NotReady when a service was away too
    long.
    """
    prompt = request.prompt
    found = total(
        count(_judged(group, clients.generate(group), clients, reward), reward)
        for group in _groups(request, chunk_samples)
    )
    metrics.VALUE_SAMPLES.inc(found.samples)
    return PromptValue(
        prompt_id=prompt.prompt_id,
        value_key=own_keys.value_key(
            request.reference_hash,
            prompt.prompt_id,
            prompt.tests_digest,
            sampler(request.sampling),
            clients.judge_version(),
        ),
        samples=found.samples,
        successes=found.successes,
        rewards=found.rewards,
    )


def _groups(request: EstimateRequest, size: int) -> Iterator[PromptGroup]:
    for start in range(0, request.sampling.samples, size):
        part = Sampling()
        part.CopyFrom(request.sampling)
        part.samples = min(size, request.sampling.samples - start)
        part.seed = (request.sampling.seed + start) % 2**63
        yield PromptGroup(
            group_id=f"under-{request.reference_version}-{start}-{request.prompt.prompt_id[:24]}",
            run_id=request.run_id,
            prompt=request.prompt,
            sampling=part,
            policy_version=request.reference_version,
            source=SOURCE_REFERENCE,
            dispatched_unix_ms=int(time.time() * 1000),
        )


def _judged(
    group: PromptGroup, trajectories: list[Trajectory], clients: ServiceClients, reward: RewardSpec
) -> list[Trajectory]:
    programs = [extract_program(sample.response_text, group.prompt.response_format) for sample in trajectories]
    verdicts = clients.judge_programs(group.prompt, programs, all_tests=needs_all_tests(reward))
    for trajectory, verdict in zip(trajectories, verdicts, strict=True):
        trajectory.reward = reward_of(verdict, reward)
    return trajectories
