"""Run a contestant and examine its checkpoints; what is done is kept, so that an interrupted race goes on."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

from benchmarks.race.contestants import BUDGET_CPU_SECONDS, Contestant, Jobs, contestants, identity
from benchmarks.race.course import STEPS_PER_CHECKPOINT, Contest, Course, read_contests, read_courses, write_contests
from benchmarks.race.cpu import LoadTrace
from benchmarks.race.examiner import examining
from benchmarks.race.own_platform import job_contests
from benchmarks.race.peer import Peer, installed_trl
from benchmarks.race.rows import SCORES
from spo import redis_keys
from spo.demo.reference_model import cached_reference_model
from spo.service.settings import PlatformSettings

FOLDER = Path("runs/race")


def reference_model() -> Path:
    """The pi0 that all start from."""
    cache = PlatformSettings().state_path / "cache" / "models"
    return cached_reference_model(cache, "standard", lambda done, total: None).absolute()


def folder_of(name: str, contestant: Contestant, seed: int) -> Path:
    """Named after what is run, so that a changed recipe or setting is measured anew."""
    return (FOLDER / f"{name}-seed-{seed}-{redis_keys.digest(identity(contestant))[:8]}").absolute()


def kept_courses(seeds: range = range(100)) -> list[Course]:
    """All that was run and examined so far."""
    found = []
    for name, contestant in contestants().items():
        for path in (folder_of(name, contestant, seed) / "courses.json" for seed in seeds):
            if path.exists():
                found += read_courses(json.loads(path.read_text()))
    return found


def held(name: str, contestant: Contestant, pi0: Path, seed: int) -> list[Course]:
    """Run, examine and keep what has not been kept."""
    folder = folder_of(name, contestant, seed)
    folder.mkdir(parents=True, exist_ok=True)
    kept = folder / "courses.json"
    if not kept.exists():
        courses = list(_courses(contestant, pi0, seed, folder))
        kept.write_text(json.dumps([asdict(each) for each in courses]) + "\n")
        # Curves need no weights.
        shutil.rmtree(folder / "work", ignore_errors=True)
    return read_courses(json.loads(kept.read_text()))


def _courses(contestant: Contestant, pi0: Path, seed: int, folder: Path) -> Iterator[Course]:
    path = folder / "contests.json"
    if not path.exists():
        (folder / "examined.json").unlink(missing_ok=True)
        write_contests(path, _contests(contestant, pi0, seed, folder / "work"))
    with examining(pi0, folder / "examined.json") as examiner:
        for name, contest in read_contests(path).items():
            points = examiner.until(SCORES, contest.checkpoints)
            said = contestant.settings(name)
            yield Course(name, seed, said, contest.start_cpu_seconds, contest.load, points)


def _contests(contestant: Contestant, pi0: Path, seed: int, work: Path) -> dict[str, Contest]:
    """Run it, alone but for what else the machine does."""
    shutil.rmtree(work, ignore_errors=True)
    if isinstance(contestant, Jobs):
        return job_contests(contestant.documents, pi0, seed, work)
    packages = installed_trl(FOLDER.absolute() / "trl-packages")
    peer = Peer(contestant.stages, BUDGET_CPU_SECONDS, STEPS_PER_CHECKPOINT, packages)
    with LoadTrace() as load:
        checkpoints = list(peer.checkpoints(pi0, seed, work))
    return {contestant.contestant: Contest(peer.start_cpu_seconds, checkpoints, load.mean())}
