"""Estimates Qhat_0: reads prompts from the stream `estimates`, samples pi0, has the samples judged, counts successes.

A fixed number of samples is taken at once. With `value.sequential` a prompt gets one round of samples and goes to the
end of the stream, until its interval is narrow enough: so a prior can be learned from all prompts' first rounds before
any prompt gets a second, and a job can train by what the rounds so far tell. `prompt_estimate.py` says how another
worker goes on after one was killed.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass, field, replace

from services.value_estimation import redis_keys as own_keys
from services.value_estimation.population import Population
from services.value_estimation.prompt_estimate import PromptEstimate, decider, sampler
from services.value_estimation.reference import References
from services.value_estimation.refreshed_values import value_under
from services.value_estimation.samples import SampleMaker, write_solution
from services.value_estimation.service_clients import ServiceClients
from services.value_estimation.settings import Settings
from services.value_estimation.stored_experience import StoredImport, StoredSelections
from services.value_estimation.stream_workers import decoded, is_wanted, work_through
from spo import redis_keys
from spo.algorithm.value_posterior import JEFFREYS, BetaPrior, soft_value_estimate
from spo.algorithm.value_prior import PromptFeatures
from spo.errors import NotReady
from spo.messaging.redis_client import RedisClient
from spo.messaging.run_status import run_state, write_of_run
from spo.spec.job_spec import JobSpec, RewardSpec, SequentialSpec, ValueSpec
from spo.spec.job_state import JobState
from spo.spec.prompt_values import evidence_of
from spo.spec.section import SAMPLED_SOURCES
from spo.v1.value_pb2 import EstimateRequest, PromptValue

NO_PRIOR = BetaPrior(0.0, 0.0)


@dataclass
class ValueWorker:
    """Estimates prompts_in_flight prompts at once, one thread each, so that engine and judge overlap."""

    client: RedisClient
    references: References
    clients: ServiceClients
    settings: Settings
    name: str
    population: Population = field(init=False)
    selections: StoredSelections = field(init=False)

    def __post_init__(self) -> None:
        self.population = Population(self.client)
        self.selections = StoredSelections(self.client, self.settings.experience_place)

    def run(self, stop: threading.Event) -> None:
        """Work until stop is set."""

        def process(raw: bytes) -> bytes | None:
            return None if self.estimate(decoded(EstimateRequest, raw)) else raw

        work_through(self.client, redis_keys.estimates(), self.name, self.settings, process, stop)

    def estimate(self, request: EstimateRequest) -> bool:
        """Make the prompt's offline trajectories and write its value; nothing when that is done or no longer wanted.

        False when the prompt needs another round after the others'. Raises NotReady when a service was away too long,
        NotFound (code "unknown_run") when the job was deleted meanwhile: no key of it comes back.
        """
        version = request.reference_version
        key = redis_keys.run_values_under(request.run_id, version) if version else redis_keys.run_values(request.run_id)
        if self.client.hexists(key, request.prompt.prompt_id) or not is_wanted(self.client, request.run_id):
            return True
        try:
            return self._estimate_under(request, key) if version else self._estimate(request)
        except NotReady:
            # The replicas of a cancelled run serve another one: waiting would be in vain.
            if is_wanted(self.client, request.run_id):
                raise
            return True

    def _may_go_on(self, run_id: str) -> bool:
        """Whether calls for a run are worth waiting for: a paused one has given its replicas back."""
        return is_wanted(self.client, run_id) and run_state(self.client, run_id) is not JobState.PAUSED

    def _estimate_under(self, request: EstimateRequest, key: str) -> bool:
        spec = self.references.spec(request.run_id)
        clients = replace(self.clients, wanted=lambda: is_wanted(self.client, request.run_id))
        value = value_under(request, clients, spec, self.settings.chunk_samples)
        write_of_run(self.client, request.run_id, ("HSET", key, request.prompt.prompt_id, value.SerializeToString()))
        return True

    def _estimate(self, request: EstimateRequest) -> bool:
        run_id, spec = request.run_id, self.references.spec(request.run_id)
        if not self._may_go_on(run_id):
            raise NotReady("the job is paused; its prompts are estimated when it goes on")
        clients = replace(self.clients, wanted=lambda: self._may_go_on(run_id))
        maker = SampleMaker(run_id, self.references.of(run_id), clients, spec.tasks.reward)
        estimate = self._open(request, spec, maker)
        if not estimate.imports_are_noted:
            self._import_human(maker, request, spec)
            self._import_stored(maker, request, spec)
            estimate.note_imports(_features(maker, request, spec))
            if _learns_without_values(spec):
                return False
        estimate.recall()
        prior = self._sample(estimate)
        if prior is None:
            return False
        estimate.sample_offline_only()
        estimate.remember()
        self._finish(run_id, _value(estimate, prior))
        return True

    def _finish(self, run_id: str, value: PromptValue) -> None:
        """Write the final value in place of the provisional one."""
        write_of_run(
            self.client,
            run_id,
            ("HSET", redis_keys.run_values(run_id), value.prompt_id, value.SerializeToString()),
            ("HDEL", redis_keys.provisional_values(run_id), value.prompt_id),
        )

    def _open(self, request: EstimateRequest, spec: JobSpec, maker: SampleMaker) -> PromptEstimate:
        prompt, reward = request.prompt, spec.tasks.reward
        sampler_settings = sampler(request.sampling, spec.model.chat_format) + (
            "" if reward == RewardSpec() else f" r={reward.model_dump_json()}"
        )
        model_hash, judge_version = maker.reference.model_hash, maker.clients.judge_version(prompt)
        return PromptEstimate(
            self.client,
            request,
            spec,
            spec.value or ValueSpec(),
            maker,
            own_keys.value_key(
                model_hash, prompt.prompt_id, decider(prompt), sampler_settings, judge_version, spec.tasks.reward
            ),
            redis_keys.digest(model_hash, sampler_settings, judge_version),
            self.settings.chunk_samples,
        )

    def _import_human(self, maker: SampleMaker, request: EstimateRequest, spec: JobSpec) -> None:
        if request.human_solutions:
            limit = spec.model.max_response_tokens
            judged = spec.offline.judge_human_solutions
            human = maker.import_human(request.prompt, request.human_solutions, limit, judged=judged)
            if human:
                maker.clients.append(request.run_id, human)

    def _import_stored(self, maker: SampleMaker, request: EstimateRequest, spec: JobSpec) -> None:
        """Append published wrong solutions, and what earlier runs and imports hold of the prompt."""
        prompt, limit = request.prompt, spec.model.max_response_tokens
        found = maker.import_human(prompt, request.wrong_solutions, limit, correct=False)
        if request.import_experience:
            stored = self.selections.of(request.run_id, spec).of(prompt)
            found += StoredImport(maker, spec, maker.clients.judge_version(prompt)).trajectories(prompt, stored)
        if found:
            maker.clients.append(request.run_id, found)

    def _sample(self, estimate: PromptEstimate) -> BetaPrior | None:
        """Sample as the budget says; returns the prior of the finished value, or None when another round is needed.

        A fixed number of samples has no prior: its value is the plain frequency, the paper's estimate.
        """
        sequential, most = estimate.value.sequential, estimate.request.sampling.samples
        if sequential is None:
            estimate.sample_until(most)
            return NO_PRIOR
        known = estimate.counted().samples
        first = min(sequential.first_samples, most)
        if known >= first:
            # Only now: a fit costs as much as many samples, and by the second round it covers all prompts.
            prior = self._prior(estimate, sequential)
            if known >= most or self._is_narrow(estimate, prior, sequential):
                return prior
        estimate.sample_until(first if known < first else min(known + sequential.round_samples, most))
        self._record(estimate)
        self._publish_so_far(estimate, sequential)
        return None

    def _publish_so_far(self, estimate: PromptEstimate, sequential: SequentialSpec) -> None:
        """Write what is known after a round, so that a job may train by it. The posterior mean holds at any stop."""
        value = _value(estimate, self._prior(estimate, sequential))
        value.provisional = True
        run_id = estimate.request.run_id
        key = redis_keys.provisional_values(run_id)
        write_of_run(self.client, run_id, ("HSET", key, value.prompt_id, value.SerializeToString()))

    def _is_narrow(self, estimate: PromptEstimate, prior: BetaPrior, sequential: SequentialSpec) -> bool:
        evidence = evidence_of(_value(estimate, prior), estimate.spec)
        found = soft_value_estimate(evidence, estimate.spec.algorithm.temperature_of_values)
        return found.high - found.low <= sequential.interval_width

    def _record(self, estimate: PromptEstimate) -> None:
        prompt_id, counts = estimate.request.prompt.prompt_id, estimate.counted()
        if counts.samples:
            self.population.record(estimate.population_key, prompt_id, counts, estimate.features())

    def _prior(self, estimate: PromptEstimate, sequential: SequentialSpec) -> BetaPrior:
        if sequential.prior == "jeffreys" or estimate.counted().rewards:
            return JEFFREYS
        prompt_id = estimate.request.prompt.prompt_id
        return self.population.prior_of(estimate.population_key, prompt_id, estimate.features())


def _value(estimate: PromptEstimate, prior: BetaPrior) -> PromptValue:
    counts = estimate.counted()
    return PromptValue(
        prompt_id=estimate.request.prompt.prompt_id,
        value_key=estimate.value_key,
        samples=counts.samples,
        successes=counts.successes,
        rewards=counts.rewards,
        prior_successes=prior.successes,
        prior_failures=prior.failures,
    )


def _learns_without_values(spec: JobSpec) -> bool:
    """Whether offline trajectories teach before their prompts have values: then all are imported before any sampling.

    Only where prompts come in rounds anyway; elsewhere each prompt is done at once.
    """
    if spec.value is None or spec.value.sequential is None:
        return False
    offline = {part.source for part in spec.replay.mix if part.share > 0} - SAMPLED_SOURCES
    return not all(map(spec.reads_values_of, offline))


def _features(maker: SampleMaker, request: EstimateRequest, spec: JobSpec) -> PromptFeatures:
    """ln pi0 of people's correct programs, and the statement's tokens; empty where no prior is asked for."""
    if spec.value is None or spec.value.sequential is None:
        return PromptFeatures()
    prompt, reference = request.prompt, maker.reference
    texts = [write_solution(program, prompt) for program in (*request.human_solutions, *request.further_solutions)]
    asked = reference.encode_prompt(prompt.text)
    responses = [reference.encode_response(text) for text in texts if reference.chat.cut(text) == text]
    fitting = [response for response in responses if len(response) <= spec.model.max_response_tokens]
    scored = reference.logprobs([asked] * len(fitting), fitting) if fitting else []
    return PromptFeatures(tuple(sum(logprobs) for logprobs in scored), tuple(sorted(set(asked))))
