"""The conversations of one group: each goes on by itself, its turns are sampled in one batch with all others."""

from __future__ import annotations

import threading
import time
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial

from services.inference.engine import Sample
from services.inference.engine_thread import SampleGroup
from services.inference.environment_pool import EnvironmentPool
from services.inference.episodes.episode import Episode, TurnRules
from services.inference.replica import Assignment
from services.inference.sampling import TOKENIZER, Draw, draws_of, end_token_ids, prompt_tokens
from services.inference.weights import Weights
from spo import redis_keys
from spo.errors import InternalError, InvalidInput, Unreachable
from spo.spec.environment import setup_from_json
from spo.v1.environment_service_pb2 import Observation
from spo.v1.prompt_pb2 import PromptGroup
from spo.v1.trajectory_pb2 import FINISH_REASON_LENGTH, FINISH_REASON_STOP, Hop, RolloutGroup, Trajectory


@dataclass(eq=False)
class StartedEpisodes:
    """A group of conversations; the future is done when all of them are.

    Nothing of a conversation is anywhere but here: a replica that dies begins it anew elsewhere, an environment that
    dies takes its next turn in another process.
    """

    request: PromptGroup
    assignment: Assignment
    environments: EnvironmentPool
    weights: Weights | None
    rules: TurnRules
    alone: bool
    future: Future[list[Episode]] = field(default_factory=Future)
    _episodes: list[Episode] = field(default_factory=list)
    _running: dict[Episode, SampleGroup] = field(default_factory=dict)
    _settling: threading.Lock = field(default_factory=threading.Lock)

    @property
    def awaits_environment(self) -> bool:
        """Whether some conversation is at its environment's turn, which has deadlines of its own."""
        return len(self._running) < sum(not episode.finished for episode in self._episodes) or not self._episodes

    def cancel(self) -> None:
        """Abort the group's sequences and ask for no further turn, unless it is finished."""
        self.future.cancel()
        for samples in list(self._running.values()):
            samples.future.cancel()

    def result(self, timeout_seconds: float) -> RolloutGroup:
        """The finished group. Raises Unreachable after timeout_seconds, or what engine or environment raised."""
        try:
            finished = self.future.result(timeout_seconds)
        except TimeoutError:
            self.cancel()
            raise Unreachable(f"the group's conversations did not end in {timeout_seconds:.1f} s") from None
        now = int(time.time() * 1000)
        trajectories = [self._trajectory(index, episode, now) for index, episode in enumerate(finished)]
        return RolloutGroup(request=self.request, trajectories=trajectories)

    def begin(self, draws: list[Draw]) -> None:
        """Ask the environment for first observations and begin each conversation with one."""
        try:
            observations = self.environments.begin(self.request.prompt, [draw.seed for draw in draws], self._is_wanted)
            self._episodes += map(self._episode, draws, observations)
        except Exception as error:
            self._fail(error)
            return
        for episode in list(self._episodes):
            self._sample(episode)

    def _episode(self, draw: Draw, first: Observation) -> Episode:
        if first.done:
            name = self.request.prompt.environment
            raise InternalError(f"environment {name} ends an episode before its first turn", code="environment_broken")
        with TOKENIZER:
            said = self.rules.shortened(first.text)
        text = f"{self.request.prompt.text}\n\n{said}" if said else self.request.prompt.text
        token_ids = prompt_tokens(self.assignment, self.request, text)
        return Episode(self.rules, draw, token_ids, first.state, first.verdict if first.HasField("verdict") else None)

    def _sample(self, episode: Episode) -> None:
        """Submit the policy's next turn to the engine."""
        samples = SampleGroup(self.request.run_id, [episode.request()], self.weights, self.alone)
        self._running[episode] = samples
        samples.future.add_done_callback(partial(self._sampled, episode))
        try:
            self.assignment.engine.submit(samples)
        except Exception as error:
            self._fail(error)
        if not self._is_wanted():
            # Cancelled just before it was noted above.
            samples.future.cancel()

    def _sampled(self, episode: Episode, samples: Future[list[Sample]]) -> None:
        """Called by the engine's thread, which is not held up: the environment is asked in another."""
        self._running.pop(episode, None)
        if samples.cancelled() or not self._is_wanted():
            return
        try:
            (sample,) = samples.result()
            self.environments.run(partial(self._go_on, episode, sample))
        except Exception as error:
            self._fail(error)

    def _go_on(self, episode: Episode, sample: Sample) -> None:
        """Tell the environment what was said and let the policy go on, unless the conversation is over."""
        try:
            with TOKENIZER:
                action = episode.act(sample)
            if not episode.finished and self._is_wanted():
                observation = self.environments.step(self.request.prompt, episode.state, action, self._is_wanted)
                with TOKENIZER:
                    episode.observe(observation)
        except Exception as error:
            self._fail(error)
            return
        if not episode.finished:
            self._sample(episode)
        elif all(other.finished for other in self._episodes):
            self._settle(None)

    def _is_wanted(self) -> bool:
        return not self.future.done()

    def _fail(self, error: Exception) -> None:
        """The whole group fails with it, as it does where one sample's failure ends a group in the engine."""
        self._settle(error)
        for samples in list(self._running.values()):
            samples.future.cancel()

    def _settle(self, error: Exception | None) -> None:
        """End the group, once: several of its conversations may end it at the same time."""
        with self._settling:
            if self.future.done() or not self.future.set_running_or_notify_cancel():
                return
            if error is None:
                self.future.set_result(self._episodes)
            else:
                self.future.set_exception(error)

    def _trajectory(self, index: int, episode: Episode, now: int) -> Trajectory:
        group = self.request
        return Trajectory(
            trajectory_id=redis_keys.trajectory_id(
                group.run_id, group.group_id, index, group.attempt, episode.version_first
            ),
            group_id=group.group_id,
            run_id=group.run_id,
            prompt_id=group.prompt.prompt_id,
            sample_index=index,
            attempt=group.attempt,
            source=group.source,
            prompt_token_ids=episode.prompt_token_ids,
            response_token_ids=episode.token_ids,
            sampling_logprobs=episode.logprobs,
            response_text=episode.text,
            reasoning_characters=episode.reasoning_characters,
            policy_version_first=episode.version_first,
            policy_version_last=episode.version_last,
            temperature=episode.draw.temperature,
            top_p=self.rules.top_p,
            seed=episode.draw.seed,
            finish_reason=FINISH_REASON_STOP if episode.stopped else FINISH_REASON_LENGTH,
            sampler=self.assignment.sampler,
            created_unix_ms=now,
            hops=[Hop(service="inference", at_unix_ms=now)],
            verdict=episode.verdict,
            segments=episode.segments,
        )


def start_episodes(
    assignment: Assignment, environments: EnvironmentPool, group: PromptGroup, weights: Weights | None, *, alone: bool
) -> StartedEpisodes:
    """Begin a group's conversations. Raises InvalidInput on a group whose conversations can never be sampled."""
    if group.response_prefix_token_ids:
        raise InvalidInput("a conversation does not go on from given response tokens", code="bad_environment")
    setup = setup_from_json(group.prompt.environment_json)
    rules = TurnRules(
        assignment.tokenizer,
        assignment.spec.model.chat_format,
        end_token_ids(assignment),
        group.sampling.top_p,
        group.sampling.max_tokens,
        setup.max_turns,
        setup.max_observation_tokens,
    )
    started = StartedEpisodes(group, assignment, environments, weights, rules, alone)
    environments.run(partial(started.begin, draws_of(group.sampling)))
    return started
