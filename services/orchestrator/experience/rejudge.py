"""New verdicts for stored trajectories: other tests of a task set, or another judge, under a lineage of their own."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from services.orchestrator.experience import queries
from services.orchestrator.experience.judging import WAKING_SECONDS, RowJudge, judge_versions, pools_of
from services.orchestrator.schemas import experience as schemas
from spo import redis_keys
from spo.errors import InvalidInput
from spo.experience.columns import StoredTrajectory
from spo.experience.import_row import ProblemIndex
from spo.experience.store import ExperienceStore, Origin, StoredFile
from spo.rpc.judge_pools import JudgePools
from spo.spec.reward import is_success
from spo.spec.wire_enums import wire_name
from spo.tasks.problem import Problem
from spo.tasks.verifier_pool import pool_of, versions_of_today
from spo.v1.prompt_pb2 import Prompt
from spo.v1.trajectory_pb2 import Trajectory
from spo.v1.verdict_pb2 import OUTCOME_ACCEPTED, Outcome

SHOWN_CHANGES = 100


@dataclass
class Rejudging:
    """One pass over part of the store with the tests of a task set; skips rows that this judge decided by them."""

    store: ExperienceStore
    judges: JudgePools
    problems: Sequence[Problem]
    task_set: str
    name: str
    tenant: str
    writes: bool
    looked_at: int = field(default=0, init=False)
    judged: int = field(default=0, init=False)
    unknown: int = field(default=0, init=False)
    accepted: int = field(default=0, init=False)
    rejected: int = field(default=0, init=False)
    changes: list[schemas.ChangedVerdict] = field(default_factory=list, init=False)
    _seen: set[str] = field(default_factory=set, init=False)

    def run(self, scope: queries.Scope) -> schemas.RejudgeReport:
        """Judge the rows and, if `writes`, store them under the new name; a second run changes nothing.

        Raises NotFound, NotReady, Unreachable.
        """
        pools = pools_of(self.problems)
        with self.judges.needed_for(pools), self.store.snapshot() as go_on:
            files = [file for file in scope.files(self.store) if file.origin.run != self.name]
            index = ProblemIndex(self.problems)
            versions = judge_versions(self.judges, pools, WAKING_SECONDS)
            judge = RowJudge(self.judges, index)
            for file in files:
                go_on()
                self._file(file, index, versions, judge)
        return schemas.RejudgeReport(
            run=self.name if self.writes and self.judged else None,
            looked_at=self.looked_at,
            judged=self.judged,
            unknown_problems=self.unknown,
            newly_accepted=self.accepted,
            newly_rejected=self.rejected,
            changed=self.changes,
        )

    def _file(self, file: StoredFile, index: ProblemIndex, versions: Mapping[str, str], judge: RowJudge) -> None:
        before = [row for batch in self.store.batches(file) for row in self._outdated(batch, index, versions)]
        before = [row for row in before if row.trajectory.trajectory_id not in self._seen]
        self._seen.update(row.trajectory.trajectory_id for row in before)
        after = [self._copy(row, index) for row in before]
        judge.judge(after)
        for old, new in zip(before, after, strict=True):
            self._compare(old.trajectory, new.trajectory)
        self.judged += len(after)
        if self.writes and after:
            reference_hash, licence = file.origin.reference_hash, file.origin.licence
            parents = (file.origin.run,)
            origin = Origin(self.name, "rejudge", self.task_set, reference_hash, licence, parents, self.tenant)
            self.store.write(origin, f"part-{redis_keys.digest(file.path)[:32]}", after)

    def _outdated(
        self, batch: Iterable[StoredTrajectory], index: ProblemIndex, versions: Mapping[str, str]
    ) -> Iterable[StoredTrajectory]:
        for row in batch:
            self.looked_at += 1
            problem = index.find(row.prompt.prompt_id, row.prompt.text)
            if problem is None:
                self.unknown += 1
                continue
            same_tests = problem.tests_digest == row.prompt.tests_digest
            # What an environment said in a conversation, and perhaps decided, rests on the judge of that time.
            today = versions_of_today(problem.tests, versions)
            same_judge = row.trajectory.verdict.judge_version in today or bool(row.prompt.environment)
            if not (same_tests and same_judge):
                yield row

    def _copy(self, row: StoredTrajectory, index: ProblemIndex) -> StoredTrajectory:
        problem = index.find(row.prompt.prompt_id, row.prompt.text)
        if problem is None:
            raise InvalidInput(f"no problem for {row.trajectory.trajectory_id}")
        old, new = row.trajectory, Trajectory()
        new.CopyFrom(old)
        new.ClearField("verdict")
        if problem.tests_digest != row.prompt.tests_digest:
            # The annotations count successes by the old tests.
            del new.annotations[:]
        new.trajectory_id = "traj_" + redis_keys.digest(self.name, old.trajectory_id)[:32]
        new.parents[:] = [old.trajectory_id]
        new.run_id = self.name
        new.prompt_id = problem.problem_id
        prompt = Prompt(
            prompt_id=problem.problem_id,
            text=problem.statement,
            task_set=self.task_set,
            tests_digest=problem.tests_digest,
            language=problem.language,
            response_format=problem.response_format,
            verifier_pool=pool_of(problem.tests),
            environment=row.prompt.environment,
            environment_json=row.prompt.environment_json,
        )
        return StoredTrajectory(new, prompt, row.reference_dtype)

    def _compare(self, old: Trajectory, new: Trajectory) -> None:
        before = _outcome(old)
        after = _outcome(new)
        if (before == "accepted") == (after == "accepted"):
            return
        accepted = new.verdict.outcome == OUTCOME_ACCEPTED
        self.accepted += accepted
        self.rejected += not accepted
        if len(self.changes) == SHOWN_CHANGES:
            return
        self.changes.append(
            schemas.ChangedVerdict(trajectory_id=old.trajectory_id, prompt_id=new.prompt_id, before=before, after=after)
        )


def _outcome(trajectory: Trajectory) -> str:
    if trajectory.HasField("verdict"):
        return wire_name(Outcome, trajectory.verdict.outcome)
    return "accepted" if is_success(trajectory.reward) else "rewarded at import"
