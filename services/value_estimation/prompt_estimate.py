"""The progress of one prompt's estimate: its counts, the population that gives a prior, and its value under a later
reference.

Progress is written to one Redis hash per run and prompt, after the trajectories are in the replay buffer. So when a
worker is killed, the next one repeats at most one chunk, under the same trajectory ids, and counts nothing twice.

    imported       features of the prompt, JSON: human solutions and stored experience are in the buffer
    recalled       counts of an earlier run
    value-START    counts of the samples from START on
    extra-START, retry-START   the same for offline data that does not count

What the other prompts say about a prompt: a Beta prior of its success rate, fitted over the task set. Empirical Bayes:
the successes c of n samples of a prompt follow a Beta-binomial whose mean depends on the prompt's features by a
logistic regression, and whose strength (pseudo samples) is common to all but for a factor: a rare success is predicted
less well in absolute terms and better in relative ones, so the strength goes with 1 / sqrt(rate). Features that say
nothing get little weight, prompts that have little in common get a weak prior. Only the engines' images have scipy.
Axes: P prompt, F feature.
"""

from __future__ import annotations

import json
import math
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from zlib import crc32

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import minimize, minimize_scalar
from scipy.special import betaln, expit, psi

from services.value_estimation.samples import SampleMaker, ServiceClients
from spo import observability, redis_keys
from spo.algorithm.values import JEFFREYS, BetaPrior
from spo.errors import InvalidInput
from spo.messaging.redis_client import RedisClient
from spo.messaging.run_specs import write_of_run
from spo.model.chat import ChatFormat
from spo.rpc.client import samples_per_message
from spo.spec.job_spec import JobSpec, RewardSpec, ValueSpec
from spo.spec.reward import has_succeeded, needs_all_tests, reward_of
from spo.spec.section import record_from_json, record_of
from spo.tasks.problem import has_verdict, program_of
from spo.v1.prompt_pb2 import SOURCE_REFERENCE, Prompt, PromptGroup, Sampling
from spo.v1.trajectory_pb2 import Trajectory
from spo.v1.value_pb2 import EstimateRequest, PromptValue

# A fit to fewer would mostly describe the prompt itself.
FEWEST_PROMPTS = 24
REFIT_GROWTH = 1.1
REFIT_SECONDS = 10.0
# Pause per second of a fit: fits over many prompts are slow, and workers should mostly sample.
REFIT_PAUSE = 20.0

IMPORTED, RECALLED, VALUE, EXTRA, RETRY = "imported", "recalled", "value", "extra", "retry"

Array = NDArray[np.float64]

# Standard deviations of the weights' normal priors: a likelihood is believed at once, a word only when many prompts
# speak for it. The strength is log-normal about one pseudo sample, Jeffreys' strength.
LIKELIHOOD_DEVIATION, WORD_DEVIATION, INTERCEPT_DEVIATION, LOG_STRENGTH_DEVIATION = 1.0, 0.1, 5.0, 2.0
LOG_STRENGTH_BOUNDS = (-7.0, 9.0)
SMALLEST_RATE = 1e-7
# The rate at which `strength` is meant.
ORDINARY_RATE = 0.05
FOLDS = 10
# Words are folded into so many; a collision only blurs.
WORD_BUCKETS = 256


@dataclass(frozen=True)
class Counts:
    """`successes` of `samples`; `rewards` holds every reward where a failure can earn more than the worst one."""

    samples: int = 0
    successes: int = 0
    rewards: tuple[float, ...] = ()

    def __add__(self, other: Counts) -> Counts:
        return Counts(self.samples + other.samples, self.successes + other.successes, self.rewards + other.rewards)

    def encode(self) -> str:
        """The text that `decode` reads."""
        rewards = ",".join(f"{reward:.9g}" for reward in self.rewards)
        return f"{self.samples}:{self.successes}" + (f":{rewards}" if rewards else "")

    @classmethod
    def decode(cls, text: bytes) -> Counts:
        """The inverse of `encode`."""
        samples, successes, *rewards = text.decode().split(":")
        return cls(int(samples), int(successes), tuple(map(float, rewards[0].split(","))) if rewards else ())


def count(trajectories: Sequence[Trajectory], reward: RewardSpec) -> Counts:
    """The counts of judged trajectories, with their rewards where one is neither the best nor the worst."""
    rewards = tuple(trajectory.reward for trajectory in trajectories)
    varies = reward.score == "share_of_tests" or any(_is_between(one, reward) for one in rewards)
    successes = sum(has_succeeded(trajectory, reward) for trajectory in trajectories)
    return Counts(len(rewards), successes, rewards if varies else ())


def total(parts: Iterable[Counts], reward: RewardSpec) -> Counts:
    """The sum of counts, with all rewards where any part has its own."""
    found = list(parts)
    if any(part.rewards for part in found):
        found = [replace(part, rewards=part.rewards or _best_and_worst(part, reward)) for part in found]
    return sum(found, Counts())


def _best_and_worst(part: Counts, reward: RewardSpec) -> tuple[float, ...]:
    return (reward.best,) * part.successes + (reward.shift,) * (part.samples - part.successes)


def _is_between(earned: float, reward: RewardSpec) -> bool:
    # Rewards are float32 on the wire.
    near = 1e-6 * (reward.scale + abs(reward.shift))
    return min(abs(earned - reward.best), abs(earned - reward.shift)) > near


@dataclass(frozen=True)
class Fit:
    """A fitted model, the number of prompts it was fitted to, and the seconds it took."""

    prompts: int
    model: PriorModel | None
    done_at: float
    seconds: float


@dataclass
class Population:
    """Prompts of all runs; a key names those with the same reference, sampler, judge and reward."""

    client: RedisClient
    _fits: dict[str, Fit] = field(default_factory=dict, init=False)
    _lock: threading.Lock = field(default_factory=threading.Lock, init=False)

    def record(self, key: str, prompt_id: str, counts: Counts, features: PromptFeatures) -> None:
        """Store a prompt's counts so far, in place of its earlier ones."""
        document = {"samples": counts.samples, "successes": counts.successes, "features": asdict(features)}
        self.client.hset(redis_keys.value_population(key), prompt_id, json.dumps(document))

    def prior_of(self, key: str, prompt_id: str, features: PromptFeatures) -> BetaPrior:
        """The prior of a prompt, fitted to the samples of other prompts; Jeffreys' prior while these are few."""
        known = self.client.hlen(redis_keys.value_population(key))
        with self._lock:
            fit = self._fits.get(key, Fit(0, None, 0.0, 0.0))
            is_old = time.monotonic() > fit.done_at + max(REFIT_SECONDS, REFIT_PAUSE * fit.seconds)
            if known >= FEWEST_PROMPTS and (known >= REFIT_GROWTH * fit.prompts or is_old):
                fit = self._fits[key] = self._fit(key)
        return fit.model.prior_of(prompt_id, features) if fit.model else JEFFREYS

    def _fit(self, key: str) -> Fit:
        began = time.monotonic()
        stored = self.client.hgetall(redis_keys.value_population(key))
        names = sorted(stored)
        documents = [json.loads(stored[name]) for name in names]
        model = fit_prior(
            [name.decode() for name in names],
            [document["successes"] for document in documents],
            [document["samples"] for document in documents],
            [record_of(PromptFeatures, document["features"]) for document in documents],
        )
        return Fit(len(names), model, time.monotonic(), time.monotonic() - began)


@dataclass(frozen=True)
class PromptEstimate:
    """One prompt of one run; value_key names its counts across runs, population_key the prompts sampled alike."""

    client: RedisClient
    request: EstimateRequest
    spec: JobSpec
    value: ValueSpec
    maker: SampleMaker
    value_key: str
    population_key: str
    chunk_samples: int

    @property
    def keeps_samples(self) -> bool:
        return self.spec.offline.keep_reference_samples

    def counted(self) -> Counts:
        """The counts of the value so far."""
        done = self._done().items()
        parts = (Counts.decode(text) for name, text in done if name.startswith((RECALLED, f"{VALUE}-")))
        return total(parts, self.spec.tasks.reward)

    def features(self) -> PromptFeatures:
        """The prompt's features, as they were stored with its imports."""
        noted = self._done().get(IMPORTED)
        return record_from_json(PromptFeatures, noted) if noted else PromptFeatures()

    def note_imports(self, features: PromptFeatures) -> None:
        """Store that human solutions and stored experience are in the buffer, and the prompt's features."""
        self._note(IMPORTED, json.dumps(asdict(features)))

    @property
    def imports_are_noted(self) -> bool:
        return self.client.hexists(self._progress, IMPORTED)

    def recall(self) -> None:
        """Take over the counts of an earlier run under the same key, and its samples where they are kept; only once.

        Where they are fewer than this run needs, the rest is sampled in addition.
        """
        if any(name != IMPORTED for name in self._done()):
            return
        stored = self.client.hgetall(redis_keys.value_counts(self.value_key))
        counts = total(map(Counts.decode, stored.values()), self.spec.tasks.reward)
        if not counts.samples:
            return
        if self.keeps_samples:
            origin = self.client.get(self._origin)
            found = self.maker.recall_reference(self.request.prompt, origin.decode()) if origin else []
            if not found:
                # The counts are known, but their samples are gone or were others: both are made again.
                return
            self.maker.clients.append(self.request.run_id, found)
        self._note(RECALLED, counts.encode())

    def sample_until(self, wanted: int) -> None:
        """Sample pi0 until `wanted` samples are counted, chunk by chunk."""
        self._sample(VALUE, self.request.sampling, self.counted().samples, wanted)

    def sample_offline_only(self) -> None:
        """Sample what becomes offline data without counting: extra samples, and hotter ones where none succeeded.

        Nothing where an earlier run's were taken over with its counts.
        """
        if not self.keeps_samples or RECALLED in self._done():
            return
        extra = self.request.extra_sampling
        self._sample(EXTRA, extra, self._samples_of(EXTRA), extra.samples)
        if self.value.unsolved == "retry_hotter" and not self.counted().successes:
            hotter = _hotter(self.request.sampling, self.value)
            self._sample(RETRY, hotter, self._samples_of(RETRY), hotter.samples)

    def remember(self) -> None:
        """Store the counts for later runs, unless more are stored already, and the run that holds the samples."""
        counts = self.counted()
        if not counts.samples:
            return
        key = redis_keys.value_counts(self.value_key)
        stored = self.client.hgetall(key)
        if counts.samples >= total(map(Counts.decode, stored.values()), self.spec.tasks.reward).samples:
            with self.client.pipeline(transaction=True) as pipe:
                pipe.delete(key)
                pipe.hset(key, "all", counts.encode())
                pipe.execute()
            if self.keeps_samples:
                self.client.set(self._origin, self.request.run_id)

    def _sample(self, kind: str, sampling: Sampling, start: int, end: int) -> None:
        model = self.spec.model
        most = min(self.chunk_samples, samples_per_message(model.max_prompt_tokens + model.max_response_tokens))
        while start < end:
            part = Sampling()
            part.CopyFrom(sampling)
            part.samples = min(most, end - start)
            # By its start: samples in addition to an earlier run's are new ones, whatever the sizes of chunks.
            part.seed = (sampling.seed + start) % 2**63
            name = f"{kind}-{start}"
            found = self.maker.sample_reference(self.request.prompt, part, name)
            self._store(name, found)
            start += len(found)

    def _store(self, name: str, found: Sequence[Trajectory]) -> None:
        if self.keeps_samples:
            self.maker.clients.append(self.request.run_id, found)
        self._note(name, count(found, self.spec.tasks.reward).encode())
        observability.VALUE_SAMPLES.inc(len(found))

    def _note(self, name: str, value: str) -> None:
        run_id = self.request.run_id
        index = ("SADD", redis_keys.prompts_in_progress(run_id), self.request.prompt.prompt_id)
        write_of_run(self.client, run_id, index, ("HSET", self._progress, name, value))

    def _samples_of(self, kind: str) -> int:
        parts = (Counts.decode(text) for name, text in self._done().items() if name.startswith(f"{kind}-"))
        return total(parts, self.spec.tasks.reward).samples

    def _done(self) -> dict[str, bytes]:
        stored = self.client.hgetall(self._progress)
        return {name.decode(): text for name, text in stored.items()}

    @property
    def _progress(self) -> str:
        return redis_keys.value_progress(self.request.run_id, self.request.prompt.prompt_id)

    @property
    def _origin(self) -> str:
        """Key of the id of the run that holds the samples; extra samples and the precision are part of it."""
        extra = self.request.extra_sampling
        beside = f"{extra.samples} {sampler(extra, self.spec.model.chat_format)} {self.spec.model.dtype}"
        if self.value.unsolved == "retry_hotter":
            beside += f" retry {self.value.retry_samples} {self.value.retry_temperature:g}"
        return redis_keys.value_origin(self.value_key, beside)


def sampler(sampling: Sampling, chat: ChatFormat) -> str:
    """The sampling settings and the writing of prompts that a value depends on, as text."""
    settings = f"T={sampling.temperature_min:g}..{sampling.temperature_max:g}"
    settings += f" p={sampling.top_p:g} n={sampling.max_tokens}"
    return settings + (f" chat={chat.address}" if chat.address else "")


def decider(prompt: Prompt) -> str:
    """What decides about responses to a prompt, as text: its tests, and the environment that answers its turns."""
    said = f" {prompt.environment} {prompt.environment_json}" if prompt.environment else ""
    return prompt.tests_digest + said


def _hotter(sampling: Sampling, value: ValueSpec) -> Sampling:
    hotter = Sampling()
    hotter.CopyFrom(sampling)
    hotter.samples = value.retry_samples
    hotter.temperature_min = hotter.temperature_max = value.retry_temperature
    hotter.top_p = 1.0
    # Their seeds must differ from those of the counted samples.
    hotter.seed = int(redis_keys.digest("retry", str(sampling.seed))[:15], 16)
    return hotter


def value_key_of(
    reference_hash: str, prompt_id: str, tests_digest: str, sampler: str, judge_version: str, reward: RewardSpec
) -> str:
    """Digest under which a prompt's success counts outlive runs; beta is not in it (docs: keys that outlive a run).

    Scores between right and wrong are counted as rewards, so another map from one to the other is another key.
    """
    mapped = () if reward == RewardSpec() else (reward.model_dump_json(),)
    return redis_keys.digest(reference_hash, prompt_id, tests_digest, sampler, judge_version, *mapped)


def value_under(request: EstimateRequest, clients: ServiceClients, spec: JobSpec, chunk_samples: int) -> PromptValue:
    """The success frequency of the request's reference version, stored under a key with that version's digest.

    Its samples are not kept: the replay buffer has others of the policy. Raises NotReady when a service was away too
    long.
    """
    prompt, reward = request.prompt, spec.tasks.reward
    groups = _groups(request, min(chunk_samples, samples_per_message(request.sampling.max_tokens)))
    parts = (count(_judged(group, clients.generate(group), clients, reward), reward) for group in groups)
    found = total(parts, reward)
    observability.VALUE_SAMPLES.inc(found.samples)
    return PromptValue(
        prompt_id=prompt.prompt_id,
        value_key=value_key_of(
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


@dataclass(frozen=True)
class PromptFeatures:
    """What is known of a prompt before any sample.

    `solution_logprobs` are ln pi0 of whole programs known to be right, nats: where pi0 likes them, it will write such
    programs itself. `words` are the statement's token ids.
    """

    solution_logprobs: tuple[float, ...] = ()
    words: tuple[int, ...] = ()

    def row(self) -> Array:
        """One row of the design: three likelihood columns, then one column per bucket of words."""
        logprobs = self.solution_logprobs
        likelihood = [1.0, max(logprobs), sum(logprobs) / len(logprobs)] if logprobs else [0.0, 0.0, 0.0]
        present = np.zeros(WORD_BUCKETS)
        present[[word % WORD_BUCKETS for word in self.words]] = 1.0
        return np.concatenate([likelihood, present])


@dataclass(frozen=True)
class RateModel:
    """A logistic regression on standardised features."""

    centre_F: Array
    scale_F: Array
    weights_F: Array
    intercept: float

    def rate(self, features_F: Array) -> float:
        """The success rate expected of a prompt."""
        return float(expit(self.intercept + ((features_F - self.centre_F) / self.scale_F) @ self.weights_F))


@dataclass(frozen=True)
class PriorModel:
    """One regression per fold, fitted to the other folds, and the strength that their predictions deserve.

    strength: pseudo samples of a prompt of ordinary rate.
    """

    rates: tuple[RateModel, ...]
    strength: float

    def prior_of(self, prompt_id: str, features: PromptFeatures) -> BetaPrior:
        """The prior of a prompt; its own samples have no part in it."""
        rate = min(max(self.rates[fold_of(prompt_id)].rate(features.row()), SMALLEST_RATE), 1 - SMALLEST_RATE)
        strength = self.strength * math.sqrt(ORDINARY_RATE / rate)
        return BetaPrior(strength * rate, strength * (1 - rate))


def fold_of(prompt_id: str) -> int:
    """The fold of a prompt, the same in every process."""
    return crc32(prompt_id.encode()) % FOLDS


def fit_prior(
    prompt_ids: Sequence[str], successes: Sequence[int], samples: Sequence[int], features: Sequence[PromptFeatures]
) -> PriorModel:
    """Fit the prior of each fold to the prompts of the others. Raises InvalidInput on impossible counts.

    Cross-fitting keeps a prompt's samples from being counted in its prior and again in its posterior, and the strength,
    found on predictions of prompts that a regression has not seen, honest.
    """
    successes_P, samples_P = np.asarray(successes, dtype=np.float64), np.asarray(samples, dtype=np.float64)
    if not len(prompt_ids) == len(successes_P) == len(samples_P) == len(features) > 0:
        raise InvalidInput("a prior is fitted to one or more prompts, each with its counts and features")
    if (successes_P < 0).any() or (successes_P > samples_P).any():
        raise InvalidInput("a prior is fitted to successes of samples")
    features_PF = np.stack([found.row() for found in features])
    folds_P = np.array([fold_of(prompt_id) for prompt_id in prompt_ids])
    rates = [
        _fit(features_PF[kept], successes_P[kept], samples_P[kept]) for kept in (folds_P != f for f in range(FOLDS))
    ]
    predicted_P = np.array([rates[fold].rate(row_F) for fold, row_F in zip(folds_P, features_PF, strict=True)])
    predicted_P = predicted_P.clip(SMALLEST_RATE, 1 - SMALLEST_RATE)

    def loss(log_strength: float) -> float:
        strength_P = np.exp(log_strength) * np.sqrt(ORDINARY_RATE / predicted_P)
        likelihood = _log_likelihood(strength_P * predicted_P, strength_P * (1 - predicted_P), successes_P, samples_P)
        return float(0.5 * (log_strength / LOG_STRENGTH_DEVIATION) ** 2 - likelihood.sum())

    found = minimize_scalar(loss, bounds=LOG_STRENGTH_BOUNDS, method="bounded")
    return PriorModel(tuple(rates), float(np.exp(found.x)))


def _fit(features_PF: Array, successes_P: Array, samples_P: Array) -> RateModel:
    """The most probable regression under the Beta-binomial, weights and strength together."""
    count = features_PF.shape[1]
    if not len(features_PF):
        return RateModel(np.zeros(count), np.ones(count), np.zeros(count), 0.0)
    centre_F, scale_F = features_PF.mean(axis=0), features_PF.std(axis=0)
    # A column that is the same for all prompts says nothing, about unseen prompts either.
    varies_F = scale_F > 1e-6
    scale_F[~varies_F] = 1.0
    design_PF = (features_PF[:, varies_F] - centre_F[varies_F]) / scale_F[varies_F]
    deviations_F = np.full(count, WORD_DEVIATION)
    deviations_F[: count - WORD_BUCKETS] = LIKELIHOOD_DEVIATION
    deviations = np.concatenate([deviations_F[varies_F], [INTERCEPT_DEVIATION, LOG_STRENGTH_DEVIATION]])
    start = np.zeros(len(deviations))
    start[-2] = np.log((successes_P.sum() + 0.5) / ((samples_P - successes_P).sum() + 0.5))
    found = minimize(
        _loss,
        start,
        args=(design_PF, successes_P, samples_P, deviations),
        jac=True,
        method="L-BFGS-B",
        bounds=[(None, None)] * (len(start) - 1) + [LOG_STRENGTH_BOUNDS],
    )
    weights_F = np.zeros(count)
    weights_F[varies_F] = found.x[:-2]
    return RateModel(centre_F, scale_F, weights_F, float(found.x[-2]))


def _log_likelihood(a_P: Array, b_P: Array, successes_P: Array, samples_P: Array) -> Array:
    """ln of the Beta-binomial, without the binomial coefficient."""
    found_P: Array = betaln(successes_P + a_P, samples_P - successes_P + b_P) - betaln(a_P, b_P)
    return found_P


def _loss(x: Array, design_PF: Array, successes_P: Array, samples_P: Array, deviations: Array) -> tuple[float, Array]:
    """Minus the log posterior of (weights, intercept, log strength), and its gradient."""
    strength = np.exp(x[-1])
    rate_P = np.clip(expit(design_PF @ x[:-2] + x[-2]), SMALLEST_RATE, 1 - SMALLEST_RATE)
    a_P, b_P = strength * rate_P, strength * (1 - rate_P)
    failures_P = samples_P - successes_P
    loss = 0.5 * ((x / deviations) ** 2).sum() - _log_likelihood(a_P, b_P, successes_P, samples_P).sum()
    both_P = psi(strength) - psi(samples_P + strength)
    slope_a_P = psi(successes_P + a_P) - psi(a_P) + both_P
    slope_b_P = psi(failures_P + b_P) - psi(b_P) + both_P
    slope_logit_P = (slope_a_P - slope_b_P) * strength * rate_P * (1 - rate_P)
    slope_log_strength = (slope_a_P * a_P + slope_b_P * b_P).sum()
    slopes = np.concatenate([design_PF.T @ slope_logit_P, [slope_logit_P.sum()], [slope_log_strength]])
    return float(loss), x / deviations**2 - slopes
