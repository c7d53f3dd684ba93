"""What must hold whatever happens: looked at while jobs run, when one has ended, and when the platform is gone."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path

from services.orchestrator import redis_keys as own_keys
from services.orchestrator.agent_episodes import POLL_SECONDS, RECLAIM_SECONDS
from services.orchestrator.agents import AgentSessions
from services.orchestrator.jobs import JobStore, event_of
from spo import redis_keys
from spo.client import Client
from spo.client.models import Job
from spo.errors import SpoError
from spo.experience.store import ExperienceStore
from spo.messaging.redis_client import RedisClient, connect
from spo.testing.peers import check_ledger, wait_until
from tests.chaos.platform import ChaosPlatform

DRAIN_SECONDS = 120
# Held-out problems times samples are few: two jobs of one spec differ by about this much without any fault.
SCORE_BAND = 0.15
# Of a Redis that holds no job: verdicts in the cache, connections, the allocator's slack.
MEMORY_RATIO = 1.5
MEMORY_SLACK_BYTES = 4 << 20
EVALUATION_SECONDS = 120
NO_EXPIRY = -1
# A group that is over is passed on at the next look, or by the next orchestrator once it is nobody's and that is up.
PASSED_ON_SECONDS = POLL_SECONDS + RECLAIM_SECONDS + 10
_ID = re.compile(r"[0-9a-f]{32,}|(job|eval|ses)_\w{26}|\d+")


@dataclass
class RunningJob:
    """What was seen of a job so far, to compare with what is seen next."""

    job_id: str
    step: int = 0
    seq: int = 0
    versions: dict[int, str] = field(default_factory=dict)
    # Redis was set back while it was under way: what it had since is made again.
    was_set_back: bool = False

    def look(self, client: Client) -> list[str]:
        """What is wrong by now: events with gaps, versions that go back or change, a state that ended badly."""
        broken: list[str] = []
        job = client.get(self.job_id)
        if self.was_set_back:
            return [f"the job {job.state}: {job.failure}"] if job.is_final and job.state != "succeeded" else []
        if job.progress.step < self.step:
            broken.append(f"the step went back from {self.step} to {job.progress.step}")
        self.step = max(self.step, job.progress.step)
        for event in client.history(self.job_id, self.seq):
            if event.seq != self.seq + 1:
                broken.append(f"event {event.seq} follows {self.seq}")
            self.seq = event.seq
        found = {version.version: version.manifest_digest for version in client.weights(self.job_id)}
        newest = max(self.versions, default=0)
        broken += [f"version {new} came after {newest}" for new in found if new not in self.versions and new < newest]
        broken += [
            f"version {old} was replaced" for old, digest in found.items() if self.versions.get(old, digest) != digest
        ]
        self.versions |= found
        if job.is_final and job.state != "succeeded":
            broken.append(f"the job {job.state}: {job.failure}")
        return broken


@dataclass
class JobOutcome:
    """What an ended job came to; the counts are those of its ledger."""

    job_id: str
    state: str
    seconds: float
    score: float | None = None
    trajectories: int = 0
    lost: int = 0
    doubled: int = 0
    # Of agents: episodes that were given up, each by name and reason, and those of groups that were under way, or over
    # but not passed on yet, when the job ended.
    given_up: int = 0
    dropped: int = 0
    memory_bytes: int = 0
    keys: dict[str, int] = field(default_factory=dict)
    broken: list[str] = field(default_factory=list)


def check_ended(
    platform: ChaosPlatform, client: Client, job: Job, *, set_back: bool, evaluated: bool = True
) -> Iterator[str]:
    """What a succeeded job must leave: every step once, every row of metrics, an intact ledger.

    set_back: of one that Redis was set back under, the steps and growing leases alone. evaluated: it has held-out
    problems.
    """
    steps = job.progress.steps
    if job.progress.step != steps:
        yield f"{job.progress.step} of {steps} steps"
    yield from _training_order(platform.launcher.folder / "logs" / "trainer.log", job.id)
    if set_back:
        return
    series = client.metrics(job.id)
    if series.steps != list(range(1, steps + 1)):
        absent = sorted(set(range(1, steps + 1)) - set(series.steps))
        yield f"metrics of {len(series.steps)} of {steps} steps; absent {absent[:10]}"
    elif None in series.series.get("loss", [None]):
        yield "metrics without a loss"
    with connect(platform.redis_url) as redis:
        drawn = int(redis.hget(f"spo:{job.id}:replay-buffer:counters", "drawn") or 0)
        if drawn != steps:
            yield f"{drawn} batches drawn for {steps} steps"
    scores = [evaluation.step for evaluation in client.evaluations(job.id)]
    if scores != sorted(set(scores)) or (evaluated and steps not in scores):
        yield f"evaluations at the steps {scores}"


def ledger_of(
    platform: ChaosPlatform, job_id: str, dead_letters: Counter[str], missing: Collection[tuple[str, int]] = ()
) -> int:
    """How many trajectories the job's ledger holds. Raises AssertionError, TimeoutError.

    missing: groups and samples that must not be there.
    """
    with connect(platform.redis_url) as redis:
        experience = ExperienceStore(str(platform.launcher.state_path / "experience"))
        return check_ledger(redis, job_id, dead_letters=dead_letters, experience=experience, missing=missing)


@dataclass(frozen=True)
class MissingEpisodes:
    """Groups and samples of an ended job that cannot be in its ledger.

    given_up: those that are counted as lost by name. dropped: those of groups that went with the job.
    """

    given_up: set[tuple[str, int]]
    dropped: set[tuple[str, int]]


def missing_episodes(redis: RedisClient, job_id: str, samples: int) -> MissingEpisodes:
    """What an ended job's ledger cannot have. A group is dropped with the job in two cases, and in no other.

    Some episode of it was not over; or its last one ended so shortly before the job did that nobody had passed the
    group on, which what the orchestrator keeps of open groups shows. A group that was over long before is lost.
    """
    names = (field.decode().rpartition("/") for field in redis.hkeys(own_keys.agent_lost(job_id)))
    given_up = {(group, int(sample)) for group, _, sample in names}
    ended = _ended_episodes(redis, job_id, AgentSessions(JobStore(redis)))
    held = {field.decode() for field in redis.hkeys(own_keys.agent_episodes(job_id))}
    newest = map(event_of, redis.xrevrange(own_keys.job_events(job_id)))
    over = next(datetime.fromisoformat(event.at).timestamp() for event in newest if event.kind == "state")
    dispatched = int(redis.hget(redis_keys.dispatch_cursor(job_id), "position") or 0)
    dropped: set[tuple[str, int]] = set()
    for number in range(dispatched):
        group = [(f"{job_id}-{number}", sample) for sample in range(samples)]
        under_way = not ended.keys() | given_up >= set(group)
        # Once a group is passed on nothing is held of it.
        waits = all(f"{name}/{sample}" in held for name, sample in group)
        last = max((ended[each] for each in group if each in ended), default=0.0)
        if under_way or (waits and last > over - PASSED_ON_SECONDS):
            dropped.update(group)
    return MissingEpisodes(given_up, dropped - given_up)


def _ended_episodes(redis: RedisClient, job_id: str, sessions: AgentSessions) -> dict[tuple[str, int], float]:
    """When each episode that was scored ended, as unix time."""
    found: dict[tuple[str, int], float] = {}
    for raw in redis.zrange(own_keys.agent_sessions(job_id), 0, -1):
        session = sessions.get(raw.decode())
        counts = sessions.counts(session)
        if (sessions.outcome(session) or {}).get("status") in ("finished", "cut"):
            found[session.group_id, session.sample] = int(counts.get("ended", 0)) / 1000
    return found


def lost_and_doubled(complaint: str) -> tuple[int, int]:
    """The numbers in what `check_ledger` says."""
    counted = re.match(r"(\d+) lost, (\d+) doubled", complaint)
    return (int(counted[1]), int(counted[2])) if counted else (0, 0)


def _training_order(log: Path, job_id: str) -> Iterator[str]:
    """Leases have growing epochs, so no two trainers were at work on the job at once by their own account."""
    epochs = []
    for line in log.read_text(errors="replace").splitlines():
        if "job leased" not in line:
            continue
        try:
            said = json.loads(line)
        except ValueError:
            continue
        if said.get("run") == job_id or said.get("run_id") == job_id:
            epochs.append(int(said["epoch"]))
    if epochs != sorted(set(epochs)):
        yield f"leases of the epochs {epochs}"


def losses(client: Client, *, redis_set_back: bool) -> Iterator[str]:
    """Nothing that was acknowledged is gone, by the platform's own account, unless Redis was set back."""
    seen = client.platform.describe()
    for loss in seen.losses:
        if redis_set_back and loss.kind == "redis_behind":
            continue
        yield f"the platform tells of a loss: {loss.kind}: {loss.message}"
    for lost in seen.lost_jobs:
        yield f"the platform tells of a lost job: {lost.id}"


def open_evaluations(client: Client, evaluations: list[str]) -> Iterator[str]:
    """Evaluations that were asked for end, one way or another."""
    for evaluation_id in evaluations:
        try:
            client.wait_evaluation(evaluation_id, EVALUATION_SECONDS)
        except SpoError as error:
            yield f"an evaluation hangs: {error}"


def orphans_of_deleted(platform: ChaosPlatform, job_id: str) -> Iterator[str]:
    """Nothing is left of a deleted job: keys, weights, checkpoints."""
    left: list[str] = []

    def is_gone() -> bool:
        left[:] = [key.decode() for key in platform.redis.scan_iter(match=f"spo:{job_id}:*", count=1000)]
        left.extend(
            str(found.relative_to(platform.state_path))
            for folder in ("weights", "checkpoints")
            for found in (platform.state_path / folder).glob(f"{job_id}*")
        )
        return not left

    try:
        wait_until(is_gone, "the deleted job is gone", DRAIN_SECONDS, 1)
    except TimeoutError:
        yield f"left of a deleted job: {left[:10]}"


def keys_by_family(platform: ChaosPlatform) -> dict[str, int]:
    """How many keys that never expire there are of each kind: ids, digests and numbers in a key's name tell none."""
    found = Counter(
        ":".join("*" if _ID.fullmatch(part) else part for part in key.decode().split(":"))
        for key in platform.redis.scan_iter(match="*", count=1000)
        if platform.redis.ttl(key) == NO_EXPIRY
    )
    return dict(sorted(found.items()))


def grown_families(jobs: Sequence[JobOutcome]) -> Iterator[str]:
    """Without any job, a family may have a key more for each job that was."""
    first, last = jobs[0].keys, jobs[-1].keys
    for family, count in last.items():
        allowed = first.get(family, 0) + len(jobs)
        if count > allowed:
            yield f"{count} keys {family} without any job, after the first job {first.get(family, 0)}"


def staging_left(platform: ChaosPlatform) -> Iterator[str]:
    """Staging folders that a killed writer left are removed by the time the job has ended and been deleted."""
    for folder in ("weights", "checkpoints"):
        for found in (platform.state_path / folder).rglob(".writing-*"):
            yield f"staging folder {found.relative_to(platform.state_path)}"


def children_left(platform: ChaosPlatform) -> Iterator[str]:
    """Every process belongs to a living child of the launcher."""
    known = {child.pid for child in platform.launcher.children}
    for process in platform.processes():
        with process.oneshot():
            ancestors = {process.pid, *(parent.pid for parent in process.parents())}
            if not ancestors & known:
                yield f"process {process.pid} {process.name()} belongs to nobody"
