"""A campaign from nothing to its report: pi0, the platform, the jobs, and a look at what is left when all is gone."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from spo.demo.demo import WITH_PEOPLE
from spo.errors import NotReady
from spo.reproduce.plan import merged
from spo.spec.section import read_spec
from spo.testing.peers import wait_until
from tests.chaos import report
from tests.chaos.campaign import Campaign
from tests.chaos.episodes import AGENT, PLAYED, SCORE
from tests.chaos.faults.schedule import Schedule, possible_faults
from tests.chaos.platform import MODELS, ChaosPlatform, marked_processes

ROOT = Path(__file__).parents[2]
MODEL_SECONDS = 900
END_SECONDS = 30
# Long enough that a job learns something under faults, short enough for several jobs in a campaign.
JOB: dict[str, dict[str, Any]] = {
    "tasks": {"train_problems": 32, "evaluation_problems": 24},
    "value": {"samples": 16},
    "offline": {"human_solutions_per_problem": 2},
    # Little slack: when a stage of the pipeline is dead, the trainer soon waits for it instead of running ahead.
    "replay": {
        "mix": [{"source": "online", "share": 0.75}, {"source": "human", "share": 0.25}],
        "min_online": 32,
        "error_buffer": 64,
        # A third of what the job samples: the rest leaves Redis for the experience store while it is trained on.
        "online_capacity": 512,
    },
    "trainer": {
        "steps": 120,
        "batch_size": 32,
        "micro_batch_size": 32,
        "update_interval": 5,
        "checkpoint_interval": 10,
    },
    "evaluation": {"interval_steps": 60, "samples": 8, "ks": [1]},
}


def carry_out(
    bounds: tuple[float, int, float],
    seed: int,
    kinds: Sequence[str],
    ranks: int,
    result: Path,
    console: Console,
    *,
    agents: bool = False,
) -> int:
    """Run a campaign, show and write its report; 0 when every invariant held, else 1.

    bounds: its minutes, its faults, and how many times slower than a calm machine this one is. agents: the jobs'
    episodes are played by programs that a runner starts, which is one of the processes that die.
    """
    minutes, most, patience = bounds
    began = time.monotonic()

    def say(words: str) -> None:
        seconds = int(time.monotonic() - began)
        console.print(f"{seconds // 60:02d}:{seconds % 60:02d}  {words}", highlight=False, markup=False, soft_wrap=True)

    say("pi0 and the platform start")
    spec = merged(read_spec(WITH_PEOPLE), JOB, PLAYED if agents else {}, {"model": {"path": str(reference_model())}})
    if agents:
        spec["value"] = None
    logs = ROOT / "runs" / f"chaos-{seed}-{int(time.time())}"
    programs = (AGENT, SCORE) if agents else ("", "")
    platform = ChaosPlatform(logs, trainer_ranks=ranks, agent=programs[0], score=programs[1])
    campaign = None
    try:
        with platform:
            faults, impossible = possible_faults(platform, kinds)
            if impossible:
                say(f"not possible on this machine: {', '.join(impossible)}")
            campaign = Campaign(platform, spec, Schedule(seed, faults), (minutes * 60, most), say, patience=patience)
            campaign.run()
    except NotReady as error:
        say(f"the platform did not start: {error}")
        return 1
    campaign.broken += left_behind(platform)
    document = report.document_of(seed, minutes, campaign.recoveries, campaign.jobs, campaign.broken)
    report.show(document, console)
    report.write(document, result)
    console.print(f"{result}; logs in {logs / 'logs'}", highlight=False, soft_wrap=True)
    return 1 if campaign.broken else 0


def reference_model() -> Path:
    """pi0 of the toy contest."""
    command = [sys.executable, "-m", "spo.demo.reference_model", str(MODELS), "standard"]
    finished = subprocess.run(command, capture_output=True, text=True, timeout=MODEL_SECONDS, check=True)
    return Path(json.loads(finished.stdout.splitlines()[-1])["folder"])


def left_behind(platform: ChaosPlatform) -> Iterator[str]:
    """What outlives the platform: processes, its folder."""
    try:
        wait_until(lambda: not list(marked_processes(platform.mark)), "all processes end", END_SECONDS, 0.5)
    except TimeoutError:
        for process in marked_processes(platform.mark):
            yield f"process {process.pid} {process.name()} outlives the platform"
    if platform.folder.exists():
        yield f"{platform.folder} is left"
