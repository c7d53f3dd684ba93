"""Whether programs of the toy contest are right, by running them in a forked child with limits.

That is no jail: it is for a model whose tokens can spell no import but `sys` and `math`. The judge costs ten times as
much, and a study is many runs.
"""

from __future__ import annotations

import io
import os
import resource
import signal
import sys
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from spo.tasks.problem import Problem

PROGRAM_CPU_SECONDS = 0.5
MEMORY_BYTES = 512 << 20


@dataclass
class Grader:
    """Remembers what it has graded: a policy writes the same program many times."""

    known: dict[tuple[str, str], bool] = field(default_factory=dict)

    def grade(self, problems: Sequence[Problem], programs: Sequence[str]) -> list[bool]:
        """Whether each program passes all tests of the problem beside it."""
        keys = [(problem.problem_id, program) for problem, program in zip(problems, programs, strict=True)]
        new = {key: (problem, key[1]) for key, problem in zip(keys, problems, strict=True) if key not in self.known}
        self.known.update(zip(new, _in_children(list(new.values())), strict=True))
        return [self.known[key] for key in keys]


def _in_children(todo: Sequence[tuple[Problem, str]]) -> list[bool]:
    """A child that a program ends (by time or memory) has answered for those before it; the next one goes on."""
    found: list[bool] = []
    while len(found) < len(todo):
        found += _in_child(todo[len(found) :])
        if len(found) < len(todo):
            found.append(False)
    return found


def _in_child(todo: Sequence[tuple[Problem, str]]) -> list[bool]:
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.close(reading)
            # Of what the model writes, much is no program.
            warnings.simplefilter("ignore")
            size = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
            resource.setrlimit(resource.RLIMIT_AS, (size + MEMORY_BYTES, size + MEMORY_BYTES))
            for problem, program in todo:
                # Its signal ends the process.
                signal.setitimer(signal.ITIMER_PROF, PROGRAM_CPU_SECONDS)
                os.write(writing, b"1" if is_right(problem, program) else b"0")
        finally:
            os._exit(0)
    os.close(writing)
    with os.fdopen(reading, "rb") as answers:
        found = [answer == ord("1") for answer in answers.read()]
    os.waitpid(child, 0)
    return found


def is_right(problem: Problem, program: str) -> bool:
    """Whether a program prints the right tokens for every test, in this very process."""
    before = sys.stdin, sys.stdout
    try:
        code = compile(program, "program", "exec", dont_inherit=True)
        for test in problem.tests.tests:
            sys.stdin, sys.stdout = io.StringIO(test.stdin.decode()), io.StringIO()
            exec(code, {"__name__": "__main__"})
            if sys.stdout.getvalue().split() != test.stdout.decode().split():
                return False
    # A program may raise anything, SystemExit too.
    except BaseException:
        return False
    finally:
        sys.stdin, sys.stdout = before
    return True
