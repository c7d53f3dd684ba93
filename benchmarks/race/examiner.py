"""pass@10 of checkpoints, all from one process (benchmarks.race.held_out): nobody's time holds an examination."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.race.course import Checkpoint, Examined
from benchmarks.race.peer import own_judge
from spo.errors import NotReady
from spo.local.child import bound_to_this_process

# An examination costs as much as thirty of GRPO's steps: late and still below FAR, the next two checkpoints go without.
FAR, LATE_STEP, PASSED_WHEN_FAR = 0.60, 100, 2


@dataclass(frozen=True)
class Examiner:
    """A running process, and the file that keeps its answers: none is asked for twice."""

    process: subprocess.Popen[str]
    kept: Path

    def until(self, goal: float, checkpoints: Iterable[Checkpoint]) -> Iterator[Examined]:
        """Examine in order; what comes after the goal changes nothing, what comes soon after FAR is far from it too."""
        known: dict[str, Any] = json.loads(self.kept.read_text()) if self.kept.exists() else {}
        passed = 0
        for checkpoint in checkpoints:
            if passed:
                passed -= 1
                continue
            name = str(checkpoint.folder)
            if name not in known:
                known[name] = self._ask(checkpoint.folder)
                self.kept.write_text(json.dumps(known) + "\n")
            found = Examined(checkpoint.step, checkpoint.cpu_seconds, **known[name])
            yield found
            if found.pass_at_10 >= goal:
                return
            passed = PASSED_WHEN_FAR if found.pass_at_10 < FAR and found.step >= LATE_STEP else 0

    def _ask(self, folder: Path) -> dict[str, float]:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        print(folder, file=self.process.stdin, flush=True)
        # Libraries may print before it.
        line = next((each for each in self.process.stdout if each.startswith('{"pass_at')), "")
        if not line:
            raise NotReady(f"the examiner ended; its log is beside {self.kept}", code="examiner_failed")
        answer: dict[str, float] = json.loads(line)
        return answer


@contextmanager
def examining(pi0: Path, kept: Path) -> Iterator[Examiner]:
    """An examiner that ends with the block."""
    with own_judge() as judge, kept.with_suffix(".log").open("wb") as log:
        command = [sys.executable, "-m", "benchmarks.race.held_out", str(pi0), judge.address]
        pipes: Any = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": log, "text": True}
        with subprocess.Popen(bound_to_this_process(command), **pipes) as process:
            try:
                yield Examiner(process, kept)
            finally:
                process.kill()
