"""pass@10 of checkpoints, all from one process (benchmarks.race.held_out): nobody's time holds an examination."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.race.course import Checkpoint, Examined
from benchmarks.race.peer import own_judge
from spo.errors import NotReady
from spo.local.die_with_parent import bound_to_this_process

# An examination costs as much as thirty of GRPO's steps. Of many checkpoints every FOURTH is examined, and where one of
# those passes a goal, the ones before it too: the first that passes is still the one that counts.
MANY, FOURTH = 24, 4


@dataclass(frozen=True)
class Examiner:
    """A running process, and the file that keeps its answers: none is asked for twice."""

    process: subprocess.Popen[str]
    kept: Path

    def until(self, goals: Sequence[float], checkpoints: Sequence[Checkpoint]) -> list[Examined]:
        """Examine in order until the last goal is reached; what comes after it changes nothing."""
        stride = FOURTH if len(checkpoints) > MANY else 1
        found: dict[int, Examined] = {}
        for index in [*range(stride - 1, len(checkpoints) - 1, stride), len(checkpoints) - 1]:
            found[index] = self._examined(checkpoints[index])
            if not (passed := [goal for goal in goals if found[index].pass_at_10 >= goal]):
                continue
            for before in range(max(0, index - stride + 1), index):
                found[before] = self._examined(checkpoints[before])
            goals = [goal for goal in goals if goal not in passed]
            if not goals:
                break
        return [found[index] for index in sorted(found)]

    def _examined(self, checkpoint: Checkpoint) -> Examined:
        known: dict[str, Any] = json.loads(self.kept.read_text()) if self.kept.exists() else {}
        name = str(checkpoint.folder)
        if name not in known:
            known[name] = self._ask(checkpoint.folder)
            self.kept.write_text(json.dumps(known) + "\n")
        return Examined(checkpoint.step, checkpoint.cpu_seconds, **known[name])

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
