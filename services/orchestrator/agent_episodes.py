"""Episodes of jobs whose problems agents play in their own programs: leased to runners, ended by them, passed on.

A group of prompts stays on its stream until each of its samples has an outcome or is lost; what runners have said is in
Redis from the moment they are answered, so that whoever leads next goes on with it. A runner that falls silent loses
its episode, which begins anew elsewhere in another session; what it says later changes nothing.
"""

from __future__ import annotations

import json
import random
import threading
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Literal

import redis

from services.orchestrator import redis_keys as own_keys
from services.orchestrator.agents import AgentSession, AgentSessions, CallNode, SessionSecrets, trained_leaves
from services.orchestrator.commit import now_ms
from services.orchestrator.jobs import JobStore, seed_of
from spo import redis_keys
from spo.errors import InvalidInput, LeaseLost, NotFound, NotReady, SpoError
from spo.messaging.streams.entries import Entry, decoded
from spo.messaging.streams.recovery import Outage
from spo.messaging.streams.stage import Consumer
from spo.observability import get_logger
from spo.service.process import in_rounds
from spo.spec.job_spec import JobSpec
from spo.spec.section import JobState, record_of
from spo.spec.tasks import HarnessSpec
from spo.v1 import trajectory_pb2 as wire
from spo.v1.prompt_pb2 import PromptGroup
from spo.v1.verdict_pb2 import OUTCOME_ACCEPTED, OUTCOME_WRONG_ANSWER, Verdict

# A runner that is silent for so long has lost its episodes.
LEASE_SECONDS = 60.0
# After an episode's own limit: for whatever scores it.
SCORING_SECONDS = 900.0
POLL_SECONDS = 0.5
# Groups of a job that are open at once; an episode may take hours.
MOST_OPEN_GROUPS = 64
MOST_ATTEMPTS = 3
RECLAIM_SECONDS = 30.0
CONSUMER = "agents"
MOST_POOLS_ASKED = 256
DEFAULT_POOL = str(HarnessSpec.model_fields["runner_pool"].default)

EpisodeState = Literal["waiting", "leased", "done", "lost"]

log = get_logger("agents")


@dataclass(frozen=True)
class AgentEpisode:
    """One sample of a group. attempt: how often it was begun anew, the fence of its lease."""

    job_id: str
    group_id: str
    sample: int
    attempt: int = 0
    state: EpisodeState = "waiting"
    session_id: str = ""
    leased_unix_ms: int = 0
    lease_until_unix_ms: int = 0
    reward: float | None = None
    answer: str = ""
    is_cut: bool = False
    reason: str = ""

    @property
    def field(self) -> str:
        return f"{self.group_id}/{self.sample}"

    @property
    def is_over(self) -> bool:
        return self.state in ("done", "lost")


@dataclass(frozen=True)
class Leased:
    """What a runner gets: the episode, its problem, and the session that its agent calls."""

    episode: AgentEpisode
    session: AgentSession
    opened: SessionSecrets
    harness: HarnessSpec
    statement: str
    # The group's: what a program draws by it is one game for all samples, which are compared with each other.
    seed: int


@dataclass
class OpenGroup:
    """A group whose episodes are not over, and its entry on the stream."""

    consumer: Consumer
    entry: Entry
    request: PromptGroup
    episodes: list[AgentEpisode] = field(default_factory=list)


class AgentEpisodes:
    """Holds the open groups of running jobs with a harness. Safe from several threads."""

    def __init__(self, jobs: JobStore, sessions: AgentSessions) -> None:
        self.jobs = jobs
        self.sessions = sessions
        self._lock = threading.RLock()
        self._open: dict[str, dict[str, OpenGroup]] = {}
        self._consumers: dict[str, Consumer] = {}
        # When a runner of each pool asked last, in monotonic seconds.
        self._asked_at: dict[str, float] = {}
        # By job, when one asked last that may play it, and when one did that may not.
        self._asked_for: dict[str, float] = {}
        self._passed_by: dict[str, float] = {}
        self._pools = {DEFAULT_POOL}
        self._outages: dict[str, Outage] = {}

    def run(self, stop: threading.Event) -> None:
        """Take groups, take back what silent runners hold, pass on what is over, until stop."""
        in_rounds(self._look_after_all, stop, POLL_SECONDS, "episodes of agents wait")

    def _look_after_all(self) -> None:
        running = self.jobs.in_states((JobState.RUNNING,))
        for job_id in running:
            # What keeps one job's episodes waiting holds up no other's.
            outage = self._outages.setdefault(job_id, Outage("episodes of agents wait", job=job_id))
            try:
                if self._harness(job_id):
                    self.look_after(job_id)
                outage.over()
            except (redis.RedisError, SpoError) as error:
                outage.failed(error)
        with self._lock:
            for ended in {*self._open, *self._outages, *self._asked_for, *self._passed_by} - set(running):
                self._open.pop(ended, None)
                self._consumers.pop(ended, None)
                self._outages.pop(ended, None)
                self._asked_for.pop(ended, None)
                self._passed_by.pop(ended, None)

    def standing(self, job_id: str) -> list[str]:
        """What the job's episodes wait for, in words: nothing while runners of their pool ask for some."""
        # Without the lock, which a round holds while Redis does not answer.
        episodes = [each for group in list(self._open.get(job_id, {}).values()) for each in group.episodes]
        waiting = sum(each.state == "waiting" for each in episodes)
        harness = self._harness(job_id) if waiting else None
        if harness is None:
            return []
        asked_at = self._asked_at.get(harness.runner_pool)
        leased = sum(each.state == "leased" for each in episodes)
        last = "none has asked" if asked_at is None else f"none has asked for {time.monotonic() - asked_at:.0f} s"
        if asked_at is not None and time.monotonic() - asked_at < LEASE_SECONDS:
            passed_by = self._passed_by.get(job_id, 0.0)
            if max(self._asked_for.get(job_id, 0.0), time.monotonic() - LEASE_SECONDS) >= passed_by:
                return []
            last = "those that ask have no key of the job's tenant"
        return [f"{waiting} episodes wait for a runner of the pool {harness.runner_pool}: {last}; {leased} are played"]

    def look_after(self, job_id: str) -> None:
        """One round of a job."""
        with self._lock:
            held = self._open.setdefault(job_id, {})
            consumer = self._consumers.get(job_id)
            if consumer is None:
                consumer = Consumer(
                    self.jobs.client,
                    redis_keys.prompts(job_id),
                    redis_keys.INFERENCE_GROUP,
                    CONSUMER,
                    RECLAIM_SECONDS,
                    run_id=job_id,
                )
                self._consumers[job_id] = consumer
            if len(held) < MOST_OPEN_GROUPS:
                entries = consumer.read(MOST_OPEN_GROUPS - len(held), 0.01)
                try:
                    for entry in entries:
                        self._take(consumer, entry, held)
                except redis.RedisError as error:
                    taken = {group.entry.entry_id for group in held.values()}
                    consumer.interrupted([entry for entry in entries if entry.entry_id not in taken], error)
                    raise
            consumer.keep_alive([group.entry for group in held.values()])
            self._take_back(held)
            for group in [each for each in held.values() if all(episode.is_over for episode in each.episodes)]:
                done = [place for place, each in enumerate(group.episodes) if each.state == "done"]
                # Where a job was paused for longer than sessions are kept, they are played anew.
                if all(self._session(group, place) for place in done):
                    self._pass_on(group)
                    held.pop(group.request.group_id)

    def held(self) -> list[AgentEpisode]:
        """The episodes of all open groups, as they are now; waits for no round."""
        groups = [group for held in list(self._open.values()) for group in list(held.values())]
        return [episode for group in groups for episode in list(group.episodes)]

    def open_by_pool(self) -> dict[str, int]:
        """By pool of runners the episodes that wait or are played; 0 for one that had some, or whose runners asked."""
        # Runners name pools as they like, and each is a series of the metric.
        found = dict.fromkeys((*self._pools, *list(self._asked_at)[:MOST_POOLS_ASKED]), 0)
        for job_id in list(self._open):
            try:
                harness = self._harness(job_id)
            except NotFound:
                continue
            if harness is not None:
                groups = list(self._open.get(job_id, {}).values())
                waiting = sum(not each.is_over for group in groups for each in group.episodes)
                found[harness.runner_pool] = found.get(harness.runner_pool, 0) + waiting
                self._pools.add(harness.runner_pool)
        return found

    def _harness(self, job_id: str) -> HarnessSpec | None:
        return self.jobs.spec(job_id).tasks.harness

    def _take(self, consumer: Consumer, entry: Entry, held: dict[str, OpenGroup]) -> None:
        with consumer.isolated(entry):
            if entry.alone and not consumer.begin_alone(entry):
                return
            request = decoded(PromptGroup, entry)
            begun = [
                AgentEpisode(request.run_id, request.group_id, sample) for sample in range(request.sampling.samples)
            ]
            key = own_keys.agent_episodes(request.run_id)
            stored = self.jobs.client.hmget(key, [episode.field for episode in begun])
            episodes = [
                record_of(AgentEpisode, json.loads(raw)) if raw else episode
                for raw, episode in zip(stored, begun, strict=True)
            ]
            held[request.group_id] = OpenGroup(consumer, entry, request, episodes)

    def lease(self, job_ids: Collection[str], pool: str, most: int) -> list[Leased]:
        """Lease episodes of these jobs that wait for a runner of the pool."""
        found: list[Leased] = []
        now = self._asked_at[pool] = time.monotonic()
        with self._lock:
            for job_id in self._open:
                harness = self._harness(job_id)
                if harness is not None and harness.runner_pool == pool:
                    (self._asked_for if job_id in job_ids else self._passed_by)[job_id] = now
            for job_id in job_ids:
                spec = self.jobs.spec(job_id)
                harness = spec.tasks.harness
                if harness is None or harness.runner_pool != pool:
                    continue
                for group in self._open.get(job_id, {}).values():
                    for index, episode in enumerate(group.episodes):
                        if len(found) < most and episode.state == "waiting":
                            found.append(self._begin(group, index, spec, harness))
        return found

    def _begin(self, group: OpenGroup, index: int, spec: JobSpec, harness: HarnessSpec) -> Leased:
        episode, sampling = group.episodes[index], group.request.sampling
        made = now_ms()
        draw = random.Random(seed_of(sampling.seed, "episode", episode.sample, episode.attempt))
        session, opened = self.sessions.open(
            AgentSession(
                id="",
                job_id=episode.job_id,
                tenant=self.jobs.tenant(episode.job_id) or "",
                key_digest="",
                token_digest="",
                created_unix_ms=made,
                deadline_unix_ms=made + harness.max_seconds * 1000,
                temperature=draw.uniform(sampling.temperature_min, sampling.temperature_max),
                top_p=sampling.top_p,
                seed=draw.getrandbits(61),
                max_calls=harness.max_calls,
                max_tokens=harness.max_calls * (spec.model.max_prompt_tokens + spec.model.max_response_tokens),
                max_prompt_tokens=spec.model.max_prompt_tokens,
                max_response_tokens=spec.model.max_response_tokens,
                max_episode_tokens=spec.most_response_tokens if harness.branches == "all" else None,
                reasoning=harness.reasoning,
                problem_id=group.request.prompt.prompt_id,
                group_id=episode.group_id,
                sample=episode.sample,
                attempt=episode.attempt,
            )
        )
        leased = replace(
            episode,
            state="leased",
            session_id=session.id,
            leased_unix_ms=made,
            lease_until_unix_ms=made + _LEASE_MS,
        )
        self._store(group, index, leased)
        return Leased(leased, session, opened, harness, group.request.prompt.text, sampling.seed)

    def renew(self, session: AgentSession) -> AgentEpisode:
        """Hold an episode for longer. Raises LeaseLost where it is another's now, or over, or takes for ever."""
        with self._lock:
            group, index = self._held(session)
            if now_ms() > session.deadline_unix_ms + SCORING_SECONDS * 1000:
                raise LeaseLost("the episode and its scoring have taken as long as they may", code="lease_lost")
            renewed = replace(group.episodes[index], lease_until_unix_ms=now_ms() + _LEASE_MS)
            self._store(group, index, renewed)
            return renewed

    def end(self, session: AgentSession, outcome: Mapping[str, object]) -> None:
        """Take an outcome: what failed is begun anew. Raises LeaseLost; Conflict for another one than was said."""
        with self._lock:
            if self.sessions.outcome(session) is not None:
                self.sessions.close(session, outcome, str(outcome["status"]))
                return
            group, index = self._held(session)
            scored = outcome["status"] != "failed"
            harness = self._harness(session.job_id)
            if scored and harness and harness.reward == "runner" and outcome.get("reward") is None:
                raise InvalidInput("an episode of this job needs the runner's reward", code="invalid_request")
            # The session first: whoever leads next finds its outcome, and an episode that is leased until it runs out.
            self.sessions.close(session, outcome, str(outcome["status"]))
            self._settle(group, index, outcome)

    def give_up(self, session: AgentSession) -> None:
        """Give an episode back that is not at fault. Raises LeaseLost."""
        with self._lock:
            group, index = self._held(session)
            self.sessions.close(session, {"status": "given_up"}, "given up")
            self._store(group, index, replace(group.episodes[index], state="waiting", session_id=""))

    def _settle(self, group: OpenGroup, index: int, outcome: Mapping[str, object]) -> None:
        episode = group.episodes[index]
        if outcome["status"] not in ("finished", "cut"):
            if self._is_unserved(episode):
                self._store(group, index, replace(episode, state="waiting", session_id=""))
            else:
                self._again(group, index, "its runner failed")
            return
        reward = outcome.get("reward")
        done = replace(
            episode,
            state="done",
            reward=float(reward) if isinstance(reward, int | float) else None,
            answer=str(outcome.get("answer") or ""),
            is_cut=outcome["status"] == "cut",
        )
        self._store(group, index, done)

    def _is_unserved(self, episode: AgentEpisode) -> bool:
        """Whether the last that the agent heard was that no replica could answer it."""
        return bool(int(self.jobs.client.hget(own_keys.agent_session(episode.session_id), "unserved") or 0))

    def _held(self, session: AgentSession) -> tuple[OpenGroup, int]:
        for group in self._open.get(session.job_id, {}).values():
            for index, episode in enumerate(group.episodes):
                if episode.session_id == session.id and episode.state == "leased":
                    return group, index
        if self._is_stored_as_leased(session):
            raise NotReady("the orchestrator has begun anew and takes up the episode's group shortly: try again")
        raise LeaseLost(
            "the episode is another runner's, or over: what it still does counts for nothing", code="lease_lost"
        )

    def _is_stored_as_leased(self, session: AgentSession) -> bool:
        """Whether an orchestrator before this one leased the episode, whose group the stream gives back later."""
        is_taken = session.group_id in self._open.get(session.job_id, {})
        if is_taken or self.jobs.state(session.job_id) != JobState.RUNNING:
            return False
        field = f"{session.group_id}/{session.sample}"
        raw = self.jobs.client.hget(own_keys.agent_episodes(session.job_id), field)
        stored = record_of(AgentEpisode, json.loads(raw)) if raw else None
        return stored is not None and stored.session_id == session.id and stored.state == "leased"

    def _take_back(self, held: Mapping[str, OpenGroup]) -> None:
        """Begin anew what a silent runner holds; what it had said before it fell silent holds."""
        for group in held.values():
            for index, episode in enumerate(group.episodes):
                if episode.state != "leased" or now_ms() < episode.lease_until_unix_ms:
                    continue
                session = self._session(group, index)
                if session is None:
                    continue
                outcome = self.sessions.outcome(session)
                if outcome is None:
                    self.sessions.close(session, {"status": "lost"}, "its runner fell silent")
                    self._again(group, index, "its runner fell silent")
                else:
                    self._settle(group, index, outcome)

    def _session(self, group: OpenGroup, index: int) -> AgentSession | None:
        """The session of an episode; where it has expired the episode begins anew, and this is None."""
        try:
            return self.sessions.get(group.episodes[index].session_id)
        except NotFound:
            self._again(group, index, "its session is not there any more")
            return None

    def _again(self, group: OpenGroup, index: int, reason: str) -> None:
        episode = group.episodes[index]
        last = episode.attempt + 1 >= MOST_ATTEMPTS
        begun = replace(episode, attempt=episode.attempt + 1, session_id="", reason=reason)
        self._store(group, index, replace(begun, state="lost" if last else "waiting"))

    def _store(self, group: OpenGroup, index: int, episode: AgentEpisode) -> None:
        self.jobs.write(("HSET", own_keys.agent_episodes(episode.job_id), episode.field, json.dumps(asdict(episode))))
        group.episodes[index] = episode

    def _pass_on(self, group: OpenGroup) -> None:
        """Forward what the group's episodes have taught; what was lost is missing, never a reward of 0."""
        request = group.request
        # What goes wrong here is tried again, with what the episodes have in Redis.
        with group.consumer.isolated(group.entry):
            trajectories = list(self._trajectories(request, [each for each in group.episodes if each.state == "done"]))
            self._count_missing(group, {each.sample_index for each in trajectories})
            if len(trajectories) < len(group.episodes):
                for each in trajectories:
                    each.group_samples = len(trajectories)
            if trajectories:
                payload = wire.RolloutGroup(request=request, trajectories=trajectories).SerializeToString()
                stream = redis_keys.rollouts_of(request.prompt.verifier_pool)
                group.consumer.forward(group.entry, stream, payload, run_id=request.run_id)
            else:
                group.consumer.finish([group.entry])
            fields = [episode.field for episode in group.episodes]
            self.jobs.write(("HDEL", own_keys.agent_episodes(request.run_id), *fields))

    def _count_missing(self, group: OpenGroup, passed_on: Collection[int]) -> None:
        """Keep why episodes are missing from what is passed on: each sample is in the ledger, or lost by name."""
        missing = {
            episode.field: episode.reason if episode.state == "lost" else "it cannot be learned from"
            for episode in group.episodes
            if episode.sample not in passed_on
        }
        if missing:
            pairs = [text for pair in missing.items() for text in pair]
            self.jobs.write(("HSET", own_keys.agent_lost(group.request.run_id), *pairs))
            log.warning("episodes are lost", group=group.request.group_id, episodes=missing)

    def _trajectories(self, request: PromptGroup, episodes: Sequence[AgentEpisode]) -> Iterator[wire.Trajectory]:
        spec = self.jobs.spec(request.run_id)
        for episode in episodes:
            session = self.sessions.get(episode.session_id)
            tree = self.sessions.tree(session)
            nodes = tree.nodes()
            if not nodes:
                log.warning("an episode ended without a call", session=episode.session_id)
                continue
            ends = trained_leaves(nodes) if session.max_episode_tokens is not None else nodes[-1:]
            found = trajectory_of(request, episode, session, [tree.path(end) for end in ends])
            tokens = len(found.response_token_ids)
            if tokens > spec.most_response_tokens:
                # Calls that were under way together had the same room.
                log.warning(
                    "an episode is too long to be learned from",
                    session=episode.session_id,
                    tokens=tokens,
                    most=spec.most_response_tokens,
                    branches=len(ends),
                )
                continue
            yield found


_LEASE_MS = int(LEASE_SECONDS * 1000)


def trajectory_of(
    request: PromptGroup, episode: AgentEpisode, session: AgentSession, paths: Sequence[Sequence[CallNode]]
) -> wire.Trajectory:
    """An episode as one trajectory: the branches that its leaves end one after the other, and its reward, once.

    paths: from the root to each leaf, the last call's at last. A call that several share is an action in the first of
    them, and read in the others. Where the runner has no reward, a judge decides about the answer, which stands in the
    place of the last text.
    """
    root, last = paths[0][0], paths[-1][-1]
    known = [node for path in paths for node in path]
    found = wire.Trajectory(
        trajectory_id=redis_keys.trajectory_id(
            request.run_id, request.group_id, episode.sample, episode.attempt, root.version_first
        ),
        group_id=request.group_id,
        run_id=request.run_id,
        prompt_id=request.prompt.prompt_id,
        sample_index=episode.sample,
        attempt=episode.attempt,
        source=request.source,
        prompt_token_ids=root.read,
        policy_version_first=min(node.version_first for node in known),
        policy_version_last=max(node.version_last for node in known),
        temperature=session.temperature,
        top_p=session.top_p,
        seed=session.seed,
        finish_reason=wire.FINISH_REASON_LENGTH if episode.is_cut else wire.FINISH_REASON_STOP,
        sampler=root.sampler,
        created_unix_ms=now_ms(),
        hops=[wire.Hop(service="inference", at_unix_ms=now_ms())],
    )
    trained: set[int] = set()
    for path in paths:
        own = [node for node in path if node.number not in trained]
        _begin_branch(found, path, own[0])
        for node in own:
            if node is not own[0]:
                _append(found, wire.SEGMENT_KIND_OBSERVATION, node.read, _read_text(node))
            text = episode.answer if node is last and episode.answer else _sampled_text(node)
            if node is last:
                answered = len(found.response_text) + node.reasoning_characters
                found.reasoning_characters = 0 if episode.answer else answered
            _append(found, wire.SEGMENT_KIND_ACTION, node.sampled, text, node.logprobs)
        trained.update(node.number for node in own)
    if episode.reward is not None:
        outcome = OUTCOME_ACCEPTED if episode.reward >= 1 else OUTCOME_WRONG_ANSWER
        found.verdict.CopyFrom(Verdict(outcome=outcome, score=episode.reward, judge_version="runner"))
    return found


def _begin_branch(found: wire.Trajectory, path: Sequence[CallNode], first: CallNode) -> None:
    """Write what a branch reads before its first own call: nothing for the first, whose prompt that is."""
    if not found.segments:
        return
    before = path[: path.index(first)]
    token_ids = [token for node in before for token in (*node.read, *node.sampled)]
    _append(found, wire.SEGMENT_KIND_BRANCH, [*token_ids, *first.read], _read_text(first))
    found.segments[-1].label = f"after call {before[-1].number}" if before else "a root of its own"


def _append(
    found: wire.Trajectory,
    kind: wire.SegmentKind.ValueType,
    token_ids: Sequence[int],
    text: str,
    logprobs: Sequence[float] = (),
) -> None:
    """logprobs: of what was sampled."""
    found.response_token_ids.extend(token_ids)
    found.sampling_logprobs.extend(logprobs or (0.0,) * len(token_ids))
    found.response_text += text
    found.segments.append(wire.Segment(kind=kind, tokens=len(token_ids), characters=len(text)))


def _read_text(node: CallNode) -> str:
    return "".join(f"\n[{turn['role']}]\n{turn['content']}\n" for turn in node.messages)


def _sampled_text(node: CallNode) -> str:
    return node.text + "".join(f"\n{json.dumps(call['function'])}" for call in node.calls)
