"""The conversations of a group: each goes on by itself, token in, token out, its turns sampled in one batch with all
others.

One conversation while it is sampled: its tokens in order, whose they are, and what the engine is fed next.
Token in, token out: the tokens that were sampled are kept and fed again as they are, and only what the environment
says is made into tokens. So the policy's next turn begins after exactly the tokens that are trained on.

What a group asks of the engine: its prompt in tokens, and how each of its samples is drawn.
"""

from __future__ import annotations

import threading
import time
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial

import numpy as np
from transformers import PreTrainedTokenizerBase

from services.inference.engine import Sample, SampleRequest
from services.inference.engine_thread import SampleGroup
from services.inference.environment_pool import EnvironmentPool
from services.inference.replica import Assignment
from services.inference.weights import Weights
from spo import redis_keys
from spo.errors import InternalError, InvalidInput, Unreachable
from spo.model.chat import ChatFormat
from spo.model.tokenizer import decode_response, encode_observation, encode_prompt, opens_reasoning
from spo.spec.section import HIGHEST_TEMPERATURE, LOWEST_TEMPERATURE
from spo.spec.tasks import setup_from_json
from spo.v1 import trajectory_pb2 as wire
from spo.v1.environment_service_pb2 import Observation
from spo.v1.prompt_pb2 import SOURCE_ONLINE, PromptGroup, Sampling
from spo.v1.verdict_pb2 import Verdict

MAX_SAMPLES = 100_000
# Tokenizers keep state between calls and are not thread-safe.
TOKENIZER = threading.Lock()


@dataclass(frozen=True)
class Draw:
    """How one sample of a group is drawn."""

    temperature: float
    seed: int


def draws_of(sampling: Sampling) -> list[Draw]:
    """One per sample: its temperature from U(min, max) and its own seed, both decided by the group's seed.

    Raises InvalidInput on sampling that no engine does.
    """
    _check_sampling(sampling)
    generator = np.random.default_rng(sampling.seed)
    temperatures = generator.uniform(sampling.temperature_min, sampling.temperature_max, sampling.samples)
    seeds = generator.integers(0, 2**63 - 1, sampling.samples)
    return [Draw(float(temperature), int(seed)) for temperature, seed in zip(temperatures, seeds, strict=True)]


def environment_seeds(group: PromptGroup, draws: list[Draw]) -> list[int]:
    """What decides the chances of each sample's environment: in rollouts the group's own seed, for all of them.

    Samples of a group are compared with each other, so they play one game: what they earn more than the others is then
    what they did, and not the luck of the draw. Estimates and evaluations average over games, one for each sample.
    """
    if group.source == SOURCE_ONLINE:
        return [group.sampling.seed] * len(draws)
    return [draw.seed for draw in draws]


def turn_seed(seed: int, turn: int) -> int:
    """The seed of a conversation's turn: that of its sample for the first, and one made of both for each later one."""
    return int(redis_keys.digest("turn", str(seed), str(turn))[:15], 16) if turn else seed


def sample_requests(
    prompt_token_ids: tuple[int, ...], sampling: Sampling, prefix: tuple[int, ...] = ()
) -> list[SampleRequest]:
    """One request per sample; for the engine the response's given prefix is a part of the prompt."""
    draws = draws_of(sampling)
    room = sampling.max_tokens - len(prefix)
    if room < 1:
        raise InvalidInput(f"a prefix of {len(prefix)} tokens leaves no room in a response of {sampling.max_tokens}")
    return [
        SampleRequest((*prompt_token_ids, *prefix), draw.temperature, sampling.top_p, room, draw.seed) for draw in draws
    ]


def prompt_tokens(assignment: Assignment, group: PromptGroup, text: str) -> tuple[int, ...]:
    """The tokens of a group's prompt, after which its responses fit. Raises InvalidInput (code "prompt_too_long")."""
    model = assignment.spec.model
    with TOKENIZER:
        token_ids = tuple(encode_prompt(assignment.tokenizer, text, model.chat_format))
    if len(token_ids) > model.max_prompt_tokens:
        raise InvalidInput(
            f"the prompt has {len(token_ids)} tokens, more than max_prompt_tokens {model.max_prompt_tokens}",
            code="prompt_too_long",
        )
    room = assignment.engine_spec.max_tokens - len(token_ids)
    if group.sampling.max_tokens > room:
        raise InvalidInput(
            f"{group.sampling.max_tokens} response tokens do not fit: the model has room for {room} after the prompt",
            code="prompt_too_long",
        )
    return token_ids


def end_token_ids(assignment: Assignment) -> tuple[int, ...]:
    """The tokens that end what the model writes."""
    with TOKENIZER:
        return assignment.end_token_ids


def _check_sampling(sampling: Sampling) -> None:
    low, high = sampling.temperature_min, sampling.temperature_max
    if not 1 <= sampling.samples <= MAX_SAMPLES:
        raise InvalidInput(f"a group has 1 to {MAX_SAMPLES} samples, not {sampling.samples}")
    if sampling.max_tokens < 1:
        raise InvalidInput("max_tokens must be at least 1")
    # As the wire rounds it. vLLM would sample hotter than this without saying so, and refuse what is hotter than high.
    lowest = float(np.float32(LOWEST_TEMPERATURE))
    if not (low == high == 0 or lowest <= low <= high <= HIGHEST_TEMPERATURE):
        raise InvalidInput(
            f"temperatures must be {LOWEST_TEMPERATURE:g} <= min <= max <= {HIGHEST_TEMPERATURE:g}, or both 0, "
            f"not {low:g} and {high:g}"
        )
    if not 0 < sampling.top_p <= 1:
        raise InvalidInput(f"top_p must be in (0, 1], not {sampling.top_p}")


_CUT = "\n[...]\n"


@dataclass(frozen=True)
class TurnRules:
    """What all episodes of a group share: how turns are written, and where an episode is cut."""

    tokenizer: PreTrainedTokenizerBase
    chat: ChatFormat
    end_token_ids: tuple[int, ...]
    top_p: float
    # Tokens of actions and observations together.
    max_tokens: int
    max_turns: int
    max_observation_tokens: int

    def shortened(self, text: str) -> str:
        """An observation's text with its middle left out where it has too many tokens."""
        token_ids = self.tokenizer.encode(text, add_special_tokens=False)
        if len(token_ids) <= self.max_observation_tokens:
            return text
        half = self.max_observation_tokens // 2
        head = self.tokenizer.decode(token_ids[: self.max_observation_tokens - half])
        tail = self.tokenizer.decode(token_ids[len(token_ids) - half :]) if half else ""
        return f"{head}{_CUT}{tail}"


@dataclass(eq=False)
class Episode:
    """One sample of a group. `finished`: it goes on no further; `stopped`: because its environment ended it."""

    rules: TurnRules
    draw: Draw
    prompt_token_ids: tuple[int, ...]
    # Opaque, the environment's own; it is handed back and told to nobody else.
    state: bytes
    verdict: Verdict | None = None
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    segments: list[wire.Segment] = field(default_factory=list)
    text: str = ""
    reasoning_characters: int = 0
    turns: int = 0
    version_first: int = 0
    version_last: int = 0
    stopped: bool = False
    finished: bool = False

    def request(self) -> SampleRequest:
        """What the engine is asked for next: the policy's next turn after all that was said."""
        rules = self.rules
        return SampleRequest(
            (*self.prompt_token_ids, *self.token_ids),
            self.draw.temperature,
            rules.top_p,
            rules.max_tokens - len(self.token_ids),
            turn_seed(self.draw.seed, self.turns),
            rules.chat.stop,
            rules.end_token_ids,
        )

    def act(self, sample: Sample) -> str:
        """Take up what was sampled; returns what the environment is told of it: the text after its reasoning.

        An action that was cut, for want of room, ends the episode.
        """
        rules = self.rules
        text = decode_response(rules.tokenizer, sample.token_ids, rules.chat)
        context = (*self.prompt_token_ids, *self.token_ids)
        opened = opens_reasoning(rules.tokenizer, context, rules.chat)
        reasoned = rules.chat.reasoning_length(text, opened=opened)
        self.reasoning_characters = len(self.text) + reasoned if reasoned else 0
        if not self.turns:
            self.version_first = sample.version_first
        # After a rollback a turn's version is an older one.
        self.version_last = max(self.version_last, sample.version_last)
        self.turns += 1
        self._append(wire.SEGMENT_KIND_ACTION, sample.token_ids, sample.logprobs, text)
        self.finished = not sample.stopped
        return text[reasoned:]

    def observe(self, observation: Observation) -> None:
        """Take up what the environment says; ends the episode where it is done, or has no turn or no room left."""
        self.state = observation.state
        if observation.HasField("verdict"):
            self.verdict = observation.verdict
        action = self.segments[-1]
        action.label = observation.label
        if observation.HasField("score"):
            action.score = observation.score
        self.stopped = observation.done
        self.finished = observation.done or self.turns >= self.rules.max_turns
        if not self.finished:
            self._listen(observation)

    def _listen(self, observation: Observation) -> None:
        rules = self.rules
        text = rules.shortened(observation.text)
        token_ids = encode_observation(rules.tokenizer, text, rules.chat, said=self.token_ids)
        # What the policy cannot answer any more is left out: the last segment is always its own.
        if len(self.token_ids) + len(token_ids) >= rules.max_tokens:
            self.finished = True
            return
        self._append(wire.SEGMENT_KIND_OBSERVATION, token_ids, [0.0] * len(token_ids), text)
        self.segments[-1].label = observation.label

    def _append(
        self, kind: int, token_ids: tuple[int, ...] | list[int], logprobs: tuple[float, ...] | list[float], text: str
    ) -> None:
        self.token_ids += token_ids
        self.logprobs += logprobs
        self.text += text
        self.segments.append(wire.Segment(kind=kind, tokens=len(token_ids), characters=len(text)))  # type: ignore[arg-type]


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

    def result(self, timeout_seconds: float) -> wire.RolloutGroup:
        """The finished group. Raises Unreachable after timeout_seconds, or what engine or environment raised."""
        try:
            finished = self.future.result(timeout_seconds)
        except TimeoutError:
            self.cancel()
            raise Unreachable(f"the group's conversations did not end in {timeout_seconds:.1f} s") from None
        now = int(time.time() * 1000)
        trajectories = [self._trajectory(index, episode, now) for index, episode in enumerate(finished)]
        return wire.RolloutGroup(request=self.request, trajectories=trajectories)

    def begin(self, draws: list[Draw]) -> None:
        """Ask the environment for first observations and begin each conversation with one."""
        try:
            seeds = environment_seeds(self.request, draws)
            observations = self.environments.begin(self.request.prompt, seeds, self._is_wanted)
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
        may_switch = not self.assignment.spec.algorithm.anchors_by_rollouts
        run_id, tenant = self.request.run_id, self.assignment.tenant
        try:
            samples = SampleGroup(run_id, [episode.request()], self.weights, self.alone, may_switch, tenant=tenant)
            self._running[episode] = samples
            samples.future.add_done_callback(partial(self._sampled, episode))
            self.assignment.engine.submit(samples)
        except Exception as error:
            # Whoever called has nobody to tell it: the group would wait for ever.
            self._fail(error)
            return
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

    def _trajectory(self, index: int, episode: Episode, now: int) -> wire.Trajectory:
        group = self.request
        return wire.Trajectory(
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
            finish_reason=wire.FINISH_REASON_STOP if episode.stopped else wire.FINISH_REASON_LENGTH,
            sampler=self.assignment.sampler,
            created_unix_ms=now,
            hops=[wire.Hop(service="inference", at_unix_ms=now)],
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
