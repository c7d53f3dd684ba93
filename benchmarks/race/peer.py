"""TRL's trainers as processes of their own, each with a judge: what every checkpoint had cost when it was written."""

from __future__ import annotations

import json
import os
import queue
import subprocess
import sys
import threading
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.race.course import Checkpoint
from benchmarks.race.cpu import tree_cpu_seconds
from spo.errors import NotReady
from spo.local.die_with_parent import bound_to_this_process
from spo.local.judge_client import EmbeddedJudge

LONGEST_SILENCE_SECONDS = 1800.0
INSTALL_SECONDS = 900.0
ENDING_SECONDS = 30.0
REPOSITORY = Path(__file__).parents[2]
REQUIREMENTS, REPLAY_REQUIREMENTS = (
    Path(__file__).parent / "peers" / f"requirements-{name}.txt" for name in ("trl", "trl-replay")
)


@dataclass(frozen=True)
class Stage:
    """One trainer of benchmarks.race.peers and what its configuration gets beside what all have."""

    trainer: str
    steps: int
    settings: Mapping[str, Any]


@dataclass
class Peer:
    """The stages, one after the other, each from the last weights of the one before; a budget ends them."""

    stages: Sequence[Stage]
    budget_cpu_seconds: float
    every: int
    packages: Path
    start_cpu_seconds: float = 0.0

    def checkpoints(self, pi0: Path, seed: int, folder: Path) -> Iterator[Checkpoint]:
        """The checkpoints as they are written; closing the iterator ends the trainer. Raises NotReady."""
        folder.mkdir(parents=True, exist_ok=True)
        model, last = pi0, Checkpoint(0, 0.0, pi0)
        for number, stage in enumerate(self.stages):
            steps, spent = last.step, last.cpu_seconds
            with closing(self._stage(stage, model, seed, folder / str(number))) as written:
                for checkpoint in written:
                    last = checkpoint.after(steps, spent)
                    yield last
                    if last.cpu_seconds > self.budget_cpu_seconds:
                        return
            model = last.folder

    def _stage(self, stage: Stage, model: Path, seed: int, folder: Path) -> Generator[Checkpoint]:
        with own_judge() as judge:
            command = [sys.executable, "-m", f"benchmarks.race.peers.{stage.trainer}", str(model), judge.address]
            command += [str(seed), str(stage.steps), str(self.every), str(folder), json.dumps(stage.settings)]
            log_path = folder.with_suffix(".log")
            with closing(said(command, self.packages, log_path, lambda: tree_cpu_seconds(judge.pid))) as lines:
                ready = 0.0
                for line, judge_cpu in lines:
                    spent = line["cpu_seconds"] + judge_cpu
                    if line["folder"] is None:
                        ready = spent
                        self.start_cpu_seconds += ready
                    else:
                        yield Checkpoint(line["step"], spent - ready, Path(line["folder"]))


def said(
    command: Sequence[str], packages: Path, log_path: Path, judge_cpu: Callable[[], float]
) -> Generator[tuple[dict[str, Any], float]]:
    """What a trainer says, each with the judge's CPU at that moment, however late it is asked for."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(REPOSITORY), str(packages)])}
    heard: queue.Queue[tuple[dict[str, Any], float] | None] = queue.Queue()
    # Libraries write warnings to the other stream; kept for the case that it fails.
    with log_path.open("wb") as log:
        pipes: Any = {"stdout": subprocess.PIPE, "stderr": log, "text": True}
        peer = subprocess.Popen(bound_to_this_process(list(command)), cwd=REPOSITORY, env=environment, **pipes)

        def listen() -> None:
            for line in peer.stdout or ():
                if line.startswith('{"step"'):
                    heard.put((json.loads(line), judge_cpu()))
            heard.put(None)

        listener = threading.Thread(target=listen, name="trainer-lines", daemon=True)
        listener.start()
        try:
            while (found := heard.get(timeout=LONGEST_SILENCE_SECONDS)) is not None:
                yield found
            if status := peer.wait(LONGEST_SILENCE_SECONDS):
                raise NotReady(f"TRL ended with status {status}; see {log_path}", code="peer_failed")
        except queue.Empty as silence:
            raise NotReady(f"TRL wrote nothing for long; see {log_path}", code="peer_failed") from silence
        finally:
            peer.kill()
            peer.wait()
            listener.join(ENDING_SECONDS)
            if peer.stdout:
                peer.stdout.close()


def installed_trl(folder: Path, requirements: Path = REQUIREMENTS) -> Path:
    """A folder with TRL and what it needs beside the platform's packages; made once."""
    if not (folder / "trl").is_dir():
        command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(folder)]
        subprocess.run([*command, "-r", str(requirements)], check=True, timeout=INSTALL_SECONDS)
    return folder


@contextmanager
def own_judge() -> Iterator[EmbeddedJudge]:
    """A judge that ends with the block."""
    judge = EmbeddedJudge()
    judge.start()
    try:
        yield judge
    finally:
        judge.stop()
