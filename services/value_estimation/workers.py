"""Estimates Qhat_0 and finds pivotal tokens: reads prompts from streams, samples pi0, has the samples judged, counts
successes.

Estimates Qhat_0: reads prompts from the stream `estimates`, samples pi0, has the samples judged, counts successes.
A fixed number of samples is taken at once. With `value.sequential` a prompt gets one round of samples and goes to the
end of the stream, until its interval is narrow enough: so a prior can be learned from all prompts' first rounds before
any prompt gets a second, and a job can train by what the rounds so far tell. `prompt_estimate.py` says how another
worker goes on after one was killed.

Pivotal Token Search as a service (paper 3.1.3): where along a response does pi0's chance of success change?
    stream `pivotal` -> a prompt's stored correct trajectories -> bisect by rollouts of pi0 from their prefixes
                     -> the same trajectories with annotations, into the replay buffer as source `annotated`

The ends of a search cost nothing: S_0 is the prompt's value, and a finished correct response succeeds for certain.
Resumable by prefix: labels are kept under a digest that outlives the run, so a killed worker's successor, or a later
run with the same reference, repeats no rollout that was counted.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

from services.value_estimation.prompt_estimate import (
    Population,
    PromptEstimate,
    PromptFeatures,
    decider,
    sampler,
    value_key_of,
    value_under,
)
from services.value_estimation.reference import Reference, References
from services.value_estimation.samples import (
    SampleMaker,
    ServiceClients,
    StoredImport,
    StoredSelections,
    write_solution,
)
from services.value_estimation.settings import Settings
from spo import observability, redis_keys
from spo.algorithm.values import JEFFREYS, BetaPrior, next_positions, soft_value_estimate
from spo.errors import InvalidInput, NotReady
from spo.messaging.redis_client import RedisClient
from spo.messaging.run_specs import run_state, write_of_run
from spo.messaging.streams.entries import Entry, decoded, depth
from spo.messaging.streams.stage import Consumer, StageRunner
from spo.spec.job_spec import JobSpec, PivotalSpec, RewardSpec, SequentialSpec, ValueSpec
from spo.spec.reward import evidence_of, has_succeeded
from spo.spec.section import SAMPLED_SOURCES, WANTED, JobState
from spo.v1.prompt_pb2 import SOURCE_ANNOTATED, Prompt, Sampling, Source
from spo.v1.trajectory_pb2 import FINISH_REASON_STOP, Annotation, Hop, Trajectory
from spo.v1.value_pb2 import EstimateRequest, PivotalRequest, PromptValue

NO_PRIOR = BetaPrior(0.0, 0.0)

IDLE_POLL_SECONDS = 0.5


def is_wanted(client: RedisClient, run_id: str) -> bool:
    """Whether the run may still use the results of its requests."""
    return run_state(client, run_id) in WANTED


def work_through(
    client: RedisClient,
    stream: str,
    name: str,
    settings: Settings,
    process: Callable[[Entry], bytes | None],
    stop: threading.Event,
) -> None:
    """Call `process` with each of the stream's entries until stop, so many of each run at once.

    An entry is kept alive until `process` returns. None finishes it; a payload goes to the end of the stream instead.
    """
    consumer = Consumer(client, stream, redis_keys.VALUE_GROUP, name, settings.reclaim_seconds)

    def finish(entries: list[Entry]) -> None:
        for entry in entries:
            remaining = process(entry)
            if remaining is None:
                consumer.finish([entry])
            else:
                consumer.forward(entry, stream, remaining)

    StageRunner(consumer, finish, threads=settings.prompts_in_flight).run(stop)


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

        def process(entry: Entry) -> bytes | None:
            return None if self.estimate(decoded(EstimateRequest, entry)) else entry.payload

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
        keeps = spec.trainer.reference == "sampler"
        maker = SampleMaker(run_id, self.references.of(run_id), clients, spec.tasks.reward, keeps)
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
            value_key_of(
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


@dataclass(frozen=True)
class RolloutCount:
    """`successes` of `rollouts` from a prefix."""

    rollouts: int
    successes: int

    @property
    def rate(self) -> float:
        return self.successes / self.rollouts


@dataclass(frozen=True)
class Search:
    """What the searches in the trajectories of one prompt share; `start` is the count of the empty prefix."""

    prompt: Prompt
    spec: JobSpec
    value: ValueSpec
    pivotal: PivotalSpec
    maker: SampleMaker
    judge_version: str
    start: RolloutCount | None

    def labels_digest(self, trajectory: Trajectory) -> str:
        """The digest of everything that a trajectory's labels depend on; they are stored under it."""
        value, chat = self.value, self.spec.model.chat_format.address
        return redis_keys.digest(
            self.maker.reference.model_hash,
            self.prompt.prompt_id,
            self.prompt.tests_digest,
            self.spec.tasks.reward.model_dump_json(),
            f"T={value.temperature:g} p={value.top_p:g} n={self.spec.model.max_response_tokens}"
            + (f" chat={chat}" if chat else ""),
            self.judge_version,
            str(list(trajectory.response_token_ids)),
        )


@dataclass
class PivotalWorker:
    """Searches prompts_in_flight prompts at once."""

    client: RedisClient
    references: References
    clients: ServiceClients
    settings: Settings
    name: str

    def run(self, stop: threading.Event) -> None:
        """Work until stop is set."""
        stream, name = redis_keys.pivotal(), f"{self.name}-pivotal"
        work_through(
            self.client,
            stream,
            name,
            self.settings,
            lambda entry: self.annotate(decoded(PivotalRequest, entry), stop),
            stop,
        )

    def annotate(self, request: PivotalRequest, stop: threading.Event) -> None:
        """Annotate a prompt's trajectories and store that it is done; nothing when it is, or is no longer wanted.

        Raises NotReady when a service was away too long, or when stop came first, and InvalidInput (code
        "prefix_of_conversation") for a prompt that an environment answers.
        """
        run_id, prompt = request.run_id, request.prompt
        if not is_wanted(self.client, run_id) or self.client.hexists(redis_keys.run_pivotal(run_id), prompt.prompt_id):
            return
        spec = self.references.spec(run_id)
        if spec.value is None or spec.value.pivotal is None:
            raise InvalidInput(f"run {run_id} asks for no pivotal tokens", code="not_asked_for")
        if prompt.environment:
            # Nobody waits for it: the other prompts' searches count.
            write_of_run(self.client, run_id, ("HSET", redis_keys.run_pivotal(run_id), prompt.prompt_id, 0))
            raise InvalidInput(
                f"prompt {prompt.prompt_id} is answered in the environment {prompt.environment!r}, which cannot go on "
                "from a prefix: there is no search for pivotal tokens",
                code="prefix_of_conversation",
            )
        try:
            if spec.value.pivotal.when == "idle":
                self._await_idle(run_id, stop)
            search = self._search(run_id, prompt, spec, spec.value, spec.value.pivotal, self.references.of(run_id))
            done = [self._annotated(search, trajectory) for trajectory in self._trajectories(search)]
        except NotReady:
            # The replicas of an ended run serve another one: waiting would be in vain.
            if is_wanted(self.client, run_id):
                raise
            return
        write_of_run(self.client, run_id, ("HSET", redis_keys.run_pivotal(run_id), prompt.prompt_id, sum(done)))

    def _search(
        self, run_id: str, prompt: Prompt, spec: JobSpec, value: ValueSpec, pivotal: PivotalSpec, reference: Reference
    ) -> Search:
        clients = replace(self.clients, wanted=lambda: is_wanted(self.client, run_id))
        maker = SampleMaker(run_id, reference, clients, spec.tasks.reward)
        stored = self.client.hget(redis_keys.run_values(run_id), prompt.prompt_id)
        known = PromptValue.FromString(stored or b"")
        start = RolloutCount(known.samples, known.successes) if known.samples else None
        return Search(prompt, spec, value, pivotal, maker, maker.clients.judge_version(prompt), start)

    def _trajectories(self, search: Search) -> list[Trajectory]:
        """The finished correct trajectories to search, ordered by the digests of their labels."""
        found: dict[str, Trajectory] = {}
        for source in search.pivotal.sources:
            code = Source.Value(f"SOURCE_{source.upper()}")
            for sample in search.maker.clients.stored_samples(search.maker.run_id, search.prompt.prompt_id, code):
                # The rollouts of a search are not searched themselves.
                # Nor are conversations, which no rollout can take up in the middle.
                searched = not (sample.group_id.startswith("pivotal-") or sample.segments)
                if has_succeeded(sample, search.spec.tasks.reward) and searched:
                    found.setdefault(search.labels_digest(sample), sample)
        finished = {digest: sample for digest, sample in found.items() if sample.finish_reason == FINISH_REASON_STOP}
        return [finished[digest] for digest in sorted(finished)[: search.pivotal.trajectories_per_prompt]]

    def _annotated(self, search: Search, trajectory: Trajectory) -> bool:
        """Search one trajectory and store it with its labels; False when the budget allowed no rollout."""
        labels = search.labels_digest(trajectory)
        length = len(trajectory.response_token_ids)
        counts = {length: RolloutCount(1, 1)} | ({0: search.start} if search.start else {})
        counts |= {} if search.pivotal.keep_rollouts else self._known(labels)
        visited = sum(0 < position < length for position in counts)
        while visited < search.pivotal.positions_per_trajectory:
            rates = {position: count.rate for position, count in counts.items()}
            room = search.pivotal.positions_per_trajectory - visited
            positions = next_positions(length, rates, threshold=search.pivotal.threshold, limit=room)
            affordable = [position for position in positions if self._reserve(search, labels, position)]
            for position in affordable:
                counts[position] = self._roll_out(search, trajectory, labels, position)
            visited += len(affordable)
            if len(affordable) < len(positions) or not positions:
                break
        inner = {position: count for position, count in counts.items() if 0 < position < length}
        if not inner:
            return False
        search.maker.clients.append(search.maker.run_id, [_with_annotations(search.maker.run_id, trajectory, counts)])
        return True

    def _known(self, labels: str) -> dict[int, RolloutCount]:
        stored = self.client.hgetall(redis_keys.pivotal_labels(labels))
        pairs = {int(position): text.split(b":") for position, text in stored.items()}
        return {
            position: RolloutCount(int(rollouts), int(successes)) for position, (rollouts, successes) in pairs.items()
        }

    def _reserve(self, search: Search, labels: str, position: int) -> bool:
        """Whether the budget allows rollouts from this prefix; a prefix counts once, however often it is asked for."""
        run_id = search.maker.run_id
        key, member = redis_keys.pivotal_visits(run_id), f"{labels}:{position}"
        if write_of_run(self.client, run_id, ("SADD", key, member)) and (
            self.client.scard(key) * search.pivotal.rollouts > search.pivotal.budget_rollouts
        ):
            self.client.srem(key, member)
            return False
        return True

    def _roll_out(self, search: Search, trajectory: Trajectory, labels: str, position: int) -> RolloutCount:
        value, rollouts = search.value, search.pivotal.rollouts
        sampling = Sampling(
            samples=rollouts,
            temperature_min=value.temperature,
            temperature_max=value.temperature,
            top_p=value.top_p,
            max_tokens=search.spec.model.max_response_tokens,
            seed=int(redis_keys.digest(labels, str(position))[:15], 16),
        )
        prefix = trajectory.response_token_ids[:position]
        found = search.maker.sample_reference(
            search.prompt, sampling, f"pivotal-{labels[:16]}-{position}", prefix=prefix
        )
        observability.PIVOTAL_ROLLOUTS.inc(len(found))
        if search.pivotal.keep_rollouts:
            search.maker.clients.append(search.maker.run_id, found)
        count = RolloutCount(len(found), sum(has_succeeded(rollout, search.spec.tasks.reward) for rollout in found))
        self.client.hset(redis_keys.pivotal_labels(labels), str(position), f"{count.rollouts}:{count.successes}")
        return count

    def _await_idle(self, run_id: str, stop: threading.Event) -> None:
        """Wait until no prompt group waits for the engines. Raises NotReady once the run is not wanted any more."""
        while True:
            waiting = depth(self.client, redis_keys.prompts(run_id), redis_keys.INFERENCE_GROUP)
            if not is_wanted(self.client, run_id) or stop.is_set():
                raise NotReady(f"run {run_id} had no idle moment left")
            if waiting.lag + waiting.pending == 0:
                return
            stop.wait(IDLE_POLL_SECONDS)


def _with_annotations(run_id: str, trajectory: Trajectory, counts: Mapping[int, RolloutCount]) -> Trajectory:
    annotated = Trajectory()
    annotated.CopyFrom(trajectory)
    annotated.source = SOURCE_ANNOTATED
    annotated.trajectory_id = redis_keys.trajectory_id(run_id, f"annotated/{trajectory.trajectory_id}", 0, 0, 0)
    del annotated.annotations[:]
    annotated.annotations.extend(
        Annotation(position=position, rollouts=counts[position].rollouts, successes=counts[position].successes)
        for position in sorted(counts)
    )
    annotated.hops.append(Hop(service="value-estimation", at_unix_ms=int(time.time() * 1000)))
    return annotated
