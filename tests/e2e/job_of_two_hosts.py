"""Run on the head of two hosts: submit a job, say each step that it takes as a line of JSON, and check what it leaves.

job_of_two_hosts.py SPEC URL REDIS_URL EXPERIENCE
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

from spo.client import Client
from spo.experience.store import ExperienceStore
from spo.messaging.redis_client import connect
from spo.testing.peers import check_ledger, wait_until

START_SECONDS, JOB_SECONDS = 400.0, 1200.0
POLL_SECONDS = 0.5


def say(**words: object) -> None:
    print(json.dumps({"at": time.monotonic(), **words}), flush=True)


def main(spec: str, url: str, redis_url: str, experience: str) -> None:
    with Client(url, "of-the-api", retry_seconds=START_SECONDS) as client:
        wait_until(lambda: any(each.pool == "inference" for each in client.replicas()), "a replica", START_SECONDS, 1)
        job_id, step = client.submit(json.loads(Path(spec).read_text())).id, -1
        deadline = time.monotonic() + JOB_SECONDS
        while not (job := client.get(job_id)).is_final and time.monotonic() < deadline:
            if job.progress.step != step:
                step = job.progress.step
                say(step=step, waits=job.waits)
            time.sleep(POLL_SECONDS)
        series = client.metrics(job_id)
        say(state=job.state, failure=str(job.failure), steps=series.steps, losses=series.series.get("loss", []))
    with connect(redis_url) as redis:
        say(trajectories=check_ledger(redis, job_id, experience=ExperienceStore(experience)))


if __name__ == "__main__":
    main(*sys.argv[1:])
