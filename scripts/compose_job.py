"""The job of compose-test: it works while inference goes 1 -> 3 -> 1 and every service is killed in turn.

Standard library only, since it runs wherever Docker does. `compose_test.sh` has started the platform and calls it:
compose_job.py URL KEY_FILE STEPS COMPOSE... Prints what it sees with the seconds since its start, and at its end a
table of the steps. Before the job, a stranger on the platform's network asks every service and gets nothing. KILLED
("redis trainer"; empty: none) names the services that are killed, on a machine that has no hour for all of them.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

STARTED = time.monotonic()
FINAL = ("succeeded", "failed", "cancelled")
# How long each wait may take; generous, since three engines may share two busy cores.
MODEL_SECONDS, VALUES_SECONDS, REPLICA_SECONDS, JOB_SECONDS, COMMAND_SECONDS = 900, 900, 600, 3600, 900
POLL_SECONDS = 1.0
MODEL = """
import json, sys, yaml
spec = yaml.safe_load(open("/usr/share/spo/recipes/toy/with_people.yaml"))
spec["model"]["path"], steps = sys.argv[1], int(sys.argv[2])
spec["trainer"].update(steps=steps, checkpoint_interval=steps)
spec["tasks"].update(train_problems=60, evaluation_problems=40)
spec["value"]["samples"] = 32
spec["evaluation"]["interval_steps"] = steps
print(json.dumps(spec))
"""
# The same law that the tests of the whole platform hold; it raises when a sample is lost or there twice.
LEDGER = """
import json, sys, redis
from spo import redis_keys
from spo.experience.store import ExperienceStore
from spo.service.settings import PlatformSettings
from spo.testing.peers import check_ledger
store, job = redis.Redis.from_url(PlatformSettings().redis_url), sys.argv[1]
check_ledger(store, job, experience=ExperienceStore(PlatformSettings().experience_place))
found = {name.decode(): int(count) for name, count in store.hgetall(redis_keys.replay_counters(job)).items()}
groups = int(store.hget(redis_keys.dispatch_cursor(job), "position") or 0)
waiting = store.xlen(redis_keys.prompts(job))
duplicates = store.hlen(redis_keys.replay_duplicates(job))
print(json.dumps({"groups_fed": groups, "groups_waiting": waiting, "duplicates": duplicates, **found}))
"""
# Every service but inference, of which a replica among three is killed. The trainer first: its start takes longest.
KILLED = ("trainer", "value-estimation", "sandbox-judge", "verifier", "replay-buffer", "orchestrator", "redis")
# In a container of the same network without secrets: what each service says to a call, and Redis to a question.
STRANGER = """
import json, sys, grpc, redis
calls = {
    "orchestrator": "OrchestratorService/Heartbeat", "replay-buffer": "ReplayService/GetReplayStatus",
    "sandbox-judge": "JudgeService/DescribeJudge", "verifier": "JudgeService/DescribeJudge",
    "value-estimation": "ValueService/GetCalibration", "inference": "InferenceService/DescribeReplica",
}
said = {}
for service, call in calls.items():
    with grpc.insecure_channel(f"{service}:7070") as channel:
        try:
            said[service] = f"answered: {channel.unary_unary(f'/spo.v1.{call}')(b'', timeout=20)}"
        except grpc.RpcError as error:
            said[service] = error.code().name
try:
    said["redis"] = f"answered: {redis.Redis('redis').keys()}"
except redis.RedisError as error:
    said["redis"] = type(error).__name__
print(json.dumps(said))
"""
TABLE: list[tuple[str, float, str]] = []


class Platform:
    """The composed platform: its REST API and its containers."""

    def __init__(self, url: str, key: str, compose: list[str]) -> None:
        self.url, self.key, self.compose = url, key, compose

    def ask(self, path: str, body: Any = None) -> Any:
        """The JSON that the API answers. Raises urllib.error.URLError."""
        headers = {"Authorization": f"Bearer {self.key}", "Content-Type": "application/json"}
        content = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(f"{self.url}{path}", content, headers)
        with urllib.request.urlopen(request, timeout=30) as answer:
            return json.load(answer)

    def ask_again(self, path: str) -> Any:
        """What it answers to a GET. Waits for an orchestrator that comes back. Raises OSError when none does."""
        deadline = time.monotonic() + REPLICA_SECONDS
        while True:
            try:
                return self.ask(path)
            except OSError as error:
                refused = isinstance(error, urllib.error.HTTPError) and error.code < 500
                if refused or time.monotonic() > deadline:
                    raise
            time.sleep(POLL_SECONDS)

    def run(self, *arguments: str) -> str:
        """What a compose command prints. Raises CalledProcessError, TimeoutExpired."""
        return output([*self.compose, *arguments])

    def inference(self) -> list[str]:
        """Containers of inference, the oldest first."""
        ids = self.run("ps", "-q", "inference").split()
        lines = output(["docker", "inspect", "-f", "{{.Created}} {{.Id}}", *ids]).splitlines()
        return [line.split()[1] for line in sorted(lines)]

    def container(self, service: str) -> str:
        """The one container of a service."""
        return self.run("ps", "-q", service).split()[0]

    def image(self) -> str:
        """That of the orchestrator, which has Python and our packages."""
        return output(["docker", "inspect", "-f", "{{.Image}}", self.container("orchestrator")]).strip()

    def joined(self) -> int:
        """Replicas of inference that serve the job."""
        found = self.ask_again("/v1/replicas")["items"]
        return sum(each["pool"] == "inference" and bool(each["run_id"]) and not each["draining"] for each in found)

    def scale(self, replicas: int) -> None:
        """Have compose run so many replicas of inference; it does not wait for them to be healthy."""
        self.run("up", "--detach", "--no-recreate", "--no-deps", "--scale", f"inference={replicas}", "inference")


def output(command: list[str]) -> str:
    """Standard output of a command."""
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, timeout=COMMAND_SECONDS)
    return done.stdout


def say(what: str) -> None:
    """Print a line with the seconds since the start."""
    print(f"== {time.monotonic() - STARTED:6.0f} s  {what}", flush=True)


def table(steps: list[tuple[str, float, str]]) -> str:
    """The steps as a table of Markdown."""
    rows = [f"| {what} | {seconds:.0f} | {seen} |" for what, seconds, seen in steps]
    return "\n".join(["| step | seconds | seen |", "|---|---|---|", *rows])


@contextlib.contextmanager
def noted(what: str, job: WatchedJob | None = None) -> Iterator[None]:
    """Note what a step took, and between which steps of the job it was."""
    began, before = time.monotonic(), job.step() if job else 0
    say(what)
    yield
    TABLE.append((what, time.monotonic() - began, f"the job: step {before} to {job.step()}" if job else ""))


def wait_until(reached: Callable[[], bool], what: str, seconds: float) -> float:
    """Poll until something holds and say how long it took. Exits when it does not come in time."""
    began = time.monotonic()
    while not reached():
        if time.monotonic() - began > seconds:
            raise SystemExit(f"not within {seconds:g} s: {what}")
        time.sleep(POLL_SECONDS)
    say(f"{what}, after {time.monotonic() - began:.0f} s")
    return time.monotonic() - began


class WatchedJob:
    """A job that has to be at work whenever something is done to the platform."""

    def __init__(self, platform: Platform, job_id: str) -> None:
        self.platform, self.id = platform, job_id

    def look(self) -> Any:
        """What the API says of it."""
        return self.platform.ask_again(f"/v1/jobs/{self.id}")

    def step(self) -> int:
        """The step it is at. Exits when it has ended: then nothing was proven."""
        job = self.look()
        if job["state"] in FINAL:
            raise SystemExit(f"the job is {job['state']} too early, give it more STEPS: {job['failure']}")
        return int(job["progress"]["step"])

    def goes_on(self) -> None:
        """Wait for three more steps."""
        self.reach(self.step() + 3, REPLICA_SECONDS)

    def reach(self, step: int, seconds: float) -> None:
        """Wait until it has done so many steps."""
        wait_until(lambda: self.step() >= step, f"the job has done {step} steps", seconds)

    def served_by(self, replicas: int) -> None:
        """Wait until so many replicas of inference, neither more nor fewer, serve it."""
        reached = f"replicas that serve the job: {replicas}"
        wait_until(lambda: self.step() >= 0 and self.platform.joined() == replicas, reached, REPLICA_SECONDS)

    def state(self) -> str:
        """The state that the API tells."""
        return str(self.look()["state"])


def strangers_answers(platform: Platform) -> dict[str, str]:
    """What a container on the platform's network gets that has none of its secrets. Exits when it gets anything."""
    network = f"{os.environ['COMPOSE_PROJECT_NAME']}_pipeline"
    confined = ["docker", "run", "--rm", "--network", network, "--entrypoint", "python", platform.image()]
    said = dict(json.loads(output([*confined, "-c", STRANGER])))
    wanted = dict.fromkeys(said, "UNAUTHENTICATED") | {"redis": "AuthenticationError"}
    if said != wanted or len(said) < len(KILLED):
        raise SystemExit(f"a stranger on the network is told {said}")
    return said


def submitted(platform: Platform, steps: int) -> WatchedJob:
    """pi0 built, the demo's job sent over REST."""
    with noted("pi0 of the toy contest"):
        lines = platform.run("--profile", "demo", "run", "--rm", "-T", "toy-model").splitlines()
    folder = [json.loads(line)["folder"] for line in lines if "folder" in line][-1]
    spec = platform.run("exec", "-T", "orchestrator", "python", "-c", MODEL, folder, str(steps))
    job = WatchedJob(platform, platform.ask("/v1/jobs", json.loads(spec))["id"])
    say(f"job {job.id}: {steps} steps")
    return job


def killed_and_back(platform: Platform, job: WatchedJob, victim: str) -> None:
    """SIGKILL to a container's first process, with which all go; Docker starts the container again.

    From the engine's own process namespace: a `docker kill` counts as intended, after which nothing is started again,
    and a process 1 cannot be killed from within.
    """
    before, at = restarts(victim), job.step()
    pid = output(["docker", "inspect", "-f", "{{.State.Pid}}", victim]).strip()
    outside = ["docker", "run", "--rm", "--network", "none", "--pid", "host", "--user", "0", "--entrypoint", "sh"]
    output([*outside, platform.image(), "-c", f"kill -KILL {pid}"])
    say(f"SIGKILL to {victim[:12]} at step {at}")
    wait_until(lambda: restarts(victim) > before, f"{victim[:12]} is started again", REPLICA_SECONDS)
    wait_until(lambda: healthy(victim), f"{victim[:12]} is healthy again", REPLICA_SECONDS)
    say(f"the job is at step {job.step()}, {job.step() - at} steps after the kill")


def restarts(container: str) -> int:
    """How often Docker has started a container again."""
    return int(output(["docker", "inspect", "-f", "{{.RestartCount}}", container]))


def healthy(container: str) -> bool:
    """Whether a container passes its health check."""
    return output(["docker", "inspect", "-f", "{{.State.Health.Status}}", container]).strip() == "healthy"


def report(platform: Platform, job: WatchedJob) -> None:
    """What the job came to: the ledger, pass@1 before and after, the trainer's waits."""
    ledger = json.loads(platform.run("exec", "-T", "orchestrator", "python", "-c", LEDGER, job.id))
    say("the ledger holds each sample of each group once: " + json.dumps(ledger))
    for event in platform.ask(f"/v1/jobs/{job.id}/events?limit=1000")["items"]:
        if event["kind"] in ("replica_joined", "replica_lost"):
            say(f"{event['at']} {event['kind']} {event['body']['replica_id']}")
    before, *_, after = platform.ask(f"/v1/jobs/{job.id}/evaluations")["items"]
    for evaluation in (before, after):
        score = evaluation["pass_at_k"]["1"]
        say(f"pass@1 at step {evaluation['step']}: {score['value']:.3f}")
    series = platform.ask(f"/v1/jobs/{job.id}/metrics?max_points=2000")["series"]
    waits = [wait for wait in series["wait_seconds"] if wait is not None]
    say(f"the trainer waited {sum(waits):.1f} s in all, {max(waits):.1f} s at most for one batch")


def disturbed(platform: Platform, job: WatchedJob) -> None:
    """All that is done to the platform while the job trains."""
    with noted("inference 1 -> 3 until all serve the job", job):
        platform.scale(3)
        job.served_by(3)
        job.goes_on()
    with noted("SIGKILL to the replica of inference that worked longest, until three serve again", job):
        killed_and_back(platform, job, platform.inference()[0])
        job.served_by(3)
        job.goes_on()
    with noted("inference 3 -> 1", job):
        platform.scale(1)
        job.served_by(1)
        job.goes_on()
    for service in os.environ.get("KILLED", " ".join(KILLED)).split():
        with noted(f"SIGKILL to {service} until it is healthy and the job goes on", job):
            killed_and_back(platform, job, platform.container(service))
            job.goes_on()


def main(url: str, key_file: str, steps: str, *compose: str) -> None:
    """The whole passage; any deviation ends it with an error, after the table of what was done."""
    platform = Platform(url, Path(key_file).read_text(), list(compose))
    try:
        with noted("a stranger on the network asks every service"):
            said = strangers_answers(platform)
        say(json.dumps(said))
        job = submitted(platform, int(steps))
        with noted("the job's third step, values included"):
            job.reach(3, VALUES_SECONDS)
        disturbed(platform, job)
        with noted("the job's end"):
            wait_until(lambda: job.state() in FINAL, "the job has ended", JOB_SECONDS)
        if job.state() != "succeeded":
            raise SystemExit(f"the job is {job.look()}")
        report(platform, job)
    finally:
        print(table(TABLE), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
