"""Imports: rows of a file become stored trajectories, judged where they have no reward."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from blake3 import blake3

from services.orchestrator.experience.judging import judge_rows
from services.orchestrator.schemas import experience as schemas
from spo.errors import FieldViolation, InvalidInput
from spo.experience.columns import StoredTrajectory
from spo.experience.import_row import ImportTerms, ProblemIndex, RowRefusal, stored_row
from spo.experience.mapped_rows import check_mapping, mapped
from spo.experience.store import ExperienceStore, Origin
from spo.experience.uploads import UploadedRow, UploadFormat, uploaded_rows
from spo.rpc.judge_pools import JudgePools
from spo.tasks.problem import Problem

SHOWN_FAULTS = 100


@dataclass(frozen=True)
class ImportOptions:
    """How to read an upload; `judging` says which rows are judged."""

    terms: ImportTerms
    upload_format: UploadFormat
    judging: Literal["missing", "all", "never"]
    keep_good: bool
    tenant: str
    # Of a file of another program's: our columns to paths into its rows.
    fields: tuple[tuple[str, str], ...] = ()


def import_rows(
    store: ExperienceStore, judges: JudgePools, problems: Sequence[Problem], body: bytes, requested: ImportOptions
) -> schemas.ImportReport:
    """Store a file's rows under the name of the terms; importing the same file again changes nothing.

    Raises InvalidInput (code "bad_rows", a violation per row) when rows are refused and the good ones are not to be
    kept, NotReady when the judge could not decide: nothing is stored then.
    """
    index = ProblemIndex(problems)
    fields = dict(requested.fields)
    check_mapping(fields)
    uploaded = (mapped(row, fields) for row in uploaded_rows(body, requested.upload_format))
    good, faults, rows = _sort_out(uploaded, index, requested.terms)
    if faults and not requested.keep_good:
        raise _refusal(faults, rows)
    unique = {row.trajectory.trajectory_id: row for row in good}
    judged = judge_rows(judges, index, [row for row in unique.values() if not row.trajectory.HasField("reward")])
    name = f"part-{blake3(body + repr(requested).encode()).hexdigest(16)}"
    by_reference: dict[str, list[StoredTrajectory]] = defaultdict(list)
    for row in unique.values():
        by_reference[row.trajectory.reference_hash].append(row)
    for reference_hash, chosen in by_reference.items():
        terms = requested.terms
        origin = Origin(
            terms.run, "import", terms.task_set, reference_hash, licence=terms.licence, tenant=requested.tenant
        )
        store.write(origin, name, chosen)
    return schemas.ImportReport(
        run=requested.terms.run,
        rows=rows,
        stored=len(unique),
        refused=len(faults),
        judged=judged,
        duplicates=len(good) - len(unique),
        faults=faults[:SHOWN_FAULTS],
        faults_by_code=dict(Counter(fault.code for fault in faults)),
    )


def _sort_out(
    uploaded: Iterable[UploadedRow], index: ProblemIndex, terms: ImportTerms
) -> tuple[list[StoredTrajectory], list[schemas.RowFault], int]:
    good: list[StoredTrajectory] = []
    faults: list[schemas.RowFault] = []
    rows = 0
    for row in uploaded:
        rows += 1
        try:
            good.append(stored_row(row, index, terms))
        except RowRefusal as refusal:
            fault = {"code": refusal.code, "pointer": refusal.pointer, "message": refusal.message}
            faults.append(schemas.RowFault(row=row.number, **fault))
    return good, faults, rows


def _refusal(faults: Sequence[schemas.RowFault], rows: int) -> InvalidInput:
    shown = tuple(
        FieldViolation(f"/rows/{fault.row}{fault.pointer}", f"{fault.code}: {fault.message}")
        for fault in faults[:SHOWN_FAULTS]
    )
    counts = ", ".join(f"{code} {count}" for code, count in Counter(fault.code for fault in faults).most_common())
    return InvalidInput(
        f"{len(faults)} of {rows} rows cannot be imported ({counts}); nothing is stored. keep_good stores the others",
        code="bad_rows",
        violations=shown,
    )
