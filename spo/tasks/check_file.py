"""Reports on every row of a task file that nobody vouches for: `python -m spo.tasks.check_file FILE FORMAT`.

A process of its own, confined in memory and time. Prints one JSON object: rows, problems, left_out (rows that no judge
here can decide), duplicates, tests, answers (problems that an answer solves), with_solutions, difficulties, faults (the
first thousand, all those of a row), faults_total and notes (what was not looked at, and why).
"""

from __future__ import annotations

import json
import resource
import sys
from collections import Counter
from pathlib import Path
from typing import Any

from spo.errors import FieldViolation, InvalidInput
from spo.tasks.load import PARSERS
from spo.tasks.mathematics import unreadable
from spo.tasks.problem import Problem
from spo.tasks.records import read_records

MEMORY_BYTES = 4 << 30
CPU_SECONDS = 3600
SHOWN_FAULTS = 1000
SHOWN_DIFFICULTIES = 50
_LIMITS = {resource.RLIMIT_AS: MEMORY_BYTES, resource.RLIMIT_CPU: CPU_SECONDS, resource.RLIMIT_CORE: 0}


def check_file(file: Path, task_format: str) -> dict[str, Any]:
    """The report on a file that is read as task_format."""
    columns, problem_of = PARSERS[task_format]
    counts: Counter[str] = Counter()
    difficulties: Counter[str] = Counter()
    faults: list[dict[str, str]] = []
    seen: set[str] = set()
    answered: list[Problem] = []

    def note(error: InvalidInput) -> None:
        for violation in error.violations:
            counts["faults_total"] += 1
            place, _, message = violation.message.removeprefix(f"{file}").removeprefix(", ").partition(": ")
            if len(faults) < SHOWN_FAULTS:
                faults.append({"place": place or "the file", "message": message[:500]})

    try:
        for record in read_records(file, columns, on_fault=note):
            counts["rows"] += 1
            try:
                problem = problem_of(record)
            except InvalidInput as error:
                note(error)
                continue
            if problem is None:
                counts["left_out"] += 1
                continue
            counts["duplicates"] += problem.row_digest in seen
            seen.add(problem.row_digest)
            counts["tests"] += len(problem.tests.tests)
            counts["answers"] += problem.tests.HasField("answer")
            if problem.tests.HasField("answer"):
                answered.append(problem)
            counts["with_solutions"] += bool(problem.human_solutions)
            difficulties[problem.difficulty or "unknown"] += 1
    except InvalidInput as error:
        note(error)
    unread, not_looked_at = unreadable(answered)
    if unread:
        note(InvalidInput("unreadable", violations=tuple(FieldViolation("", fault) for fault in unread)))
    names = ("rows", "left_out", "duplicates", "tests", "answers", "with_solutions", "faults_total")
    return {
        **{name: counts[name] for name in names},
        "problems": len(seen),
        "difficulties": dict(difficulties.most_common(SHOWN_DIFFICULTIES)),
        "faults": faults,
        "notes": [not_looked_at] if not_looked_at else [],
    }


def main(path: str, task_format: str) -> int:
    """Print the report; returns the exit status."""
    for limit, most in _LIMITS.items():
        resource.setrlimit(limit, (most, most))
    print(json.dumps(check_file(Path(path), task_format)))
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:3]))
