"""Qhat_0 under a later reference: a published weight version of the run takes the place of pi0 (section 6)."""

from __future__ import annotations

import time
from collections.abc import Iterator

from services.value_estimation import redis_keys as own_keys
from services.value_estimation.counts import count, total
from services.value_estimation.prompt_estimate import decider, sampler
from services.value_estimation.service_clients import ServiceClients
from spo.observability import metrics
from spo.rpc.message_sizes import samples_per_message
from spo.spec.job_spec import JobSpec, RewardSpec
from spo.spec.reward import needs_all_tests, reward_of
from spo.tasks.problem import has_verdict, program_of
from spo.v1.prompt_pb2 import SOURCE_REFERENCE, PromptGroup, Sampling
from spo.v1.trajectory_pb2 import Trajectory
from spo.v1.value_pb2 import EstimateRequest, PromptValue


def value_under(request: EstimateRequest, clients: ServiceClients, spec: JobSpec, chunk_samples: int) -> PromptValue:
    """The success frequency of the request's reference version, stored under a key with that version's digest.

    Its samples are not kept: the replay buffer has others of the policy. Raises NotReady when a service was away too
    long.
    """
    prompt, reward = request.prompt, spec.tasks.reward
    groups = _groups(request, min(chunk_samples, samples_per_message(request.sampling.max_tokens)))
    parts = (count(_judged(group, clients.generate(group), clients, reward), reward) for group in groups)
    found = total(parts, reward)
    metrics.VALUE_SAMPLES.inc(found.samples)
    return PromptValue(
        prompt_id=prompt.prompt_id,
        value_key=own_keys.value_key(
            request.reference_hash,
            prompt.prompt_id,
            decider(prompt),
            sampler(request.sampling, spec.model.chat_format),
            clients.judge_version(prompt),
            reward,
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
    undecided = [sample for sample in trajectories if not has_verdict(sample)]
    programs = [program_of(sample, group.prompt.response_format, group.prompt.language) for sample in undecided]
    verdicts = clients.judge_programs(group.prompt, programs, all_tests=needs_all_tests(reward), run_id=group.run_id)
    for trajectory, verdict in zip(undecided, verdicts, strict=True):
        trajectory.verdict.CopyFrom(verdict)
    for trajectory in trajectories:
        trajectory.reward = reward_of(trajectory.verdict, reward)
    return trajectories
