"""Captured traffic as trajectories of the experience store: what was said of it is their reward."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from services.orchestrator.experience.judging import WAKING_SECONDS, judge_rows
from services.orchestrator.serving.capture import Captured, CapturedChoice, CaptureStore
from spo import redis_keys
from spo.experience.columns import StoredTrajectory, statement_digest
from spo.experience.import_row import ProblemIndex
from spo.experience.store import ExperienceStore, Origin
from spo.rpc.judge_pools import JudgePools
from spo.tasks.problem import Problem
from spo.tasks.verifier_pool import pool_of
from spo.v1.prompt_pb2 import SOURCE_HUMAN, SOURCE_OTHER_RUN, Prompt
from spo.v1.trajectory_pb2 import FinishReason, Trajectory

MOST_COLLECTED = 10_000


@dataclass(frozen=True)
class CollectTerms:
    """Under which name trajectories are stored, of which task set, and whether what nobody scored is judged by it.

    patience_seconds: how long a judge may take to answer at all.
    """

    run: str
    tenant: str
    task_set: str
    judge_unscored: bool
    after_unix_ms: int = 0
    patience_seconds: float = WAKING_SECONDS


@dataclass
class Collected:
    """What a pass over the captured traffic has made."""

    rows: list[StoredTrajectory] = field(default_factory=list)
    waiting: list[StoredTrajectory] = field(default_factory=list)
    looked_at: int = 0
    human: int = 0
    judged: int = 0
    unscored: int = 0
    newest_unix_ms: int = 0


def collect(
    captures: CaptureStore,
    store: ExperienceStore,
    judges: JudgePools,
    problems: Sequence[Problem],
    terms: CollectTerms,
) -> Collected:
    """Store the captured completions since `after_unix_ms`, MOST_COLLECTED at most, under the name of the terms.

    The same traffic collected again changes nothing. An edited answer becomes a trajectory of source `human`, which the
    sampled one is the parent of. Raises NotReady when the judge could not decide: nothing is stored then.
    """
    index, found = ProblemIndex(problems), Collected()
    for captured in captures.all(terms.tenant, terms.after_unix_ms):
        if found.looked_at == MOST_COLLECTED:
            break
        found.looked_at += 1
        found.newest_unix_ms = captured.created_unix_ms
        for choice in captured.choices:
            _sort_in(captured, choice, index, terms, found)
    if found.waiting and terms.judge_unscored:
        judge_rows(judges, index, found.waiting, terms.patience_seconds)
        # Others are of prompts that no problem is known for.
        judged = [row for row in found.waiting if row.trajectory.HasField("reward")]
        found.judged = len(judged)
        found.rows += judged
    found.unscored = len(found.waiting) - found.judged
    _store(store, found.rows, terms)
    return found


def _sort_in(
    captured: Captured, choice: CapturedChoice, index: ProblemIndex, terms: CollectTerms, found: Collected
) -> None:
    feedback = captured.feedback.get(choice.index)
    reward = feedback.reward(choice.text) if feedback else None
    row = _row(captured, choice, index, terms, reward)
    if reward is None:
        # What no problem is known for cannot be judged here.
        found.waiting.append(row)
        return
    found.rows.append(row)
    if feedback and feedback.edited is not None and feedback.edited.strip() != choice.text.strip():
        found.rows.append(_edited(row, feedback.edited, terms))
        found.human += 1


def _row(
    captured: Captured, choice: CapturedChoice, index: ProblemIndex, terms: CollectTerms, reward: float | None
) -> StoredTrajectory:
    prompt = _prompt(captured.statement, index, terms.task_set)
    trajectory = Trajectory(
        trajectory_id=_id(terms.run, captured.id, str(choice.index), repr(reward)),
        group_id=captured.id,
        run_id=terms.run,
        prompt_id=prompt.prompt_id,
        sample_index=choice.index,
        source=SOURCE_OTHER_RUN,
        response_text=choice.text,
        policy_version_first=choice.version_first,
        policy_version_last=choice.version_last,
        temperature=captured.temperature,
        top_p=captured.top_p,
        seed=captured.seed,
        finish_reason=FinishReason.Value(f"FINISH_REASON_{choice.finish_reason.upper()}"),
        sampler=captured.sampler,
        created_unix_ms=captured.created_unix_ms,
        licence=captured.licence,
        consent=captured.consent,
        said_by=captured.source,
    )
    if choice.token_ids and captured.prompt_token_ids:
        trajectory.prompt_token_ids.extend(captured.prompt_token_ids)
        trajectory.response_token_ids.extend(choice.token_ids)
        trajectory.reference_hash = captured.model_hash
    if reward is not None:
        trajectory.reward = reward
    return StoredTrajectory(trajectory, prompt)


def _edited(row: StoredTrajectory, text: str, terms: CollectTerms) -> StoredTrajectory:
    sampled, human = row.trajectory, Trajectory()
    human.CopyFrom(sampled)
    for name in ("prompt_token_ids", "response_token_ids", "reference_hash", "sampler", "temperature", "top_p", "seed"):
        human.ClearField(name)
    human.trajectory_id = _id(terms.run, sampled.trajectory_id, text)
    human.parents[:] = [sampled.trajectory_id]
    human.source = SOURCE_HUMAN
    human.response_text = text
    human.finish_reason = FinishReason.Value("FINISH_REASON_STOP")
    human.reward = 0.0
    return replace(row, trajectory=human)


def _prompt(statement: str, index: ProblemIndex, task_set: str) -> Prompt:
    problem = index.find("", statement)
    if problem is None:
        return Prompt(prompt_id=statement_digest(statement), text=statement, task_set=task_set)
    return Prompt(
        prompt_id=problem.problem_id,
        text=problem.statement,
        task_set=task_set,
        tests_digest=problem.tests_digest,
        language=problem.language,
        response_format=problem.response_format,
        verifier_pool=pool_of(problem.tests),
    )


def _store(store: ExperienceStore, rows: Sequence[StoredTrajectory], terms: CollectTerms) -> None:
    """One file for each model and licence; its name follows from what is in it, so it is written once."""
    groups: dict[tuple[str, str], list[StoredTrajectory]] = defaultdict(list)
    for row in rows:
        groups[row.trajectory.reference_hash, row.trajectory.licence].append(row)
    known = _known(store, terms.run) if rows else set()
    for (reference_hash, licence), chosen in groups.items():
        fresh = [row for row in chosen if row.trajectory.trajectory_id not in known]
        if fresh:
            origin = Origin(terms.run, "traffic", terms.task_set, reference_hash, licence, tenant=terms.tenant)
            name = redis_keys.digest(*sorted(row.trajectory.trajectory_id for row in fresh))
            store.write(origin, f"part-{name[:32]}", fresh)


def _known(store: ExperienceStore, run: str) -> set[str]:
    """Ids that the run has in the store."""
    tables = (store.table(file, ["trajectory_id"]) for file in store.files(run))
    return {each for table in tables for each in table["trajectory_id"].to_pylist()}


def _id(*parts: str) -> str:
    return "traj_" + redis_keys.digest("traffic", *parts)[:32]
