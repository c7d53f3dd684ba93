"""The job of compose-test: it works while inference goes 1 -> 3 -> 1 and every service is killed in turn.

Standard library only, since it runs wherever Docker does. `compose_test.sh` has started the platform and calls it:
compose_job.py URL KEY_FILE STEPS COMPOSE... Prints what it sees with the seconds since its start, and at its end a
table of the steps. Before the job, a stranger on the platform's network asks every service and gets nothing. KILLED
("redis trainer"; empty: none) names the services that are killed, on a machine that has no hour for all of them.
How fast a machine trains is not known before, so a job that succeeds before all has been done is looked into, and the
next one takes its place: something is done to the platform only while a job is at work. With OLD_VERSION the platform
was started from images of that tag, and goes to those of the compose file under the job. A second project on the
engine, of three services, is started beside it, and neither gets anything of the other.
"""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

STARTED = time.monotonic()
FINAL = ("succeeded", "failed", "cancelled")
# How long each wait may take; generous, since three engines may share two busy cores.
VALUES_SECONDS, REPLICA_SECONDS, JOB_SECONDS, COMMAND_SECONDS = 900, 600, 3600, 1200
# A job that has fewer steps left is let end before anything more is done.
STEPS_LEFT = 15
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
# The agent of a runner's container: a call, and one that goes on from it. What it prints is scored.
AGENT = """
import json, os, urllib.request
def ask(*said):
    body = json.dumps({"model": "x", "messages": said, "max_tokens": 10}).encode()
    headers = {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"], "Content-Type": "application/json"}
    asked = urllib.request.Request(os.environ["OPENAI_BASE_URL"] + "/chat/completions", body, headers)
    return json.load(urllib.request.urlopen(asked, timeout=300))["choices"][0]["message"]
question = {"role": "user", "content": open("statement.txt").read()}
first = ask(question)
print(ask(question, first, {"role": "user", "content": "1"})["content"])
"""
SCORE = "print(float('p' in open('answer.txt').read()))"
# What its job has instead of the other's.
EPISODES: dict[str, Any] = {
    "model": {"max_prompt_tokens": 48},
    "tasks": {
        "train_problems": 8,
        "evaluation_problems": 0,
        "harness": {
            "name": "solver",
            "max_calls": 4,
            "max_seconds": 600,
            "reward": "runner",
            "max_episode_tokens": 160,
        },
    },
    "algorithm": {"losses": [{"objective": "group_centred_squared"}], "value_noise": None},
    "value": None,
    "rollout": {"samples_per_prompt": 4, "temperature": 1.0, "top_p": 1.0},
    "offline": {"human_solutions": False, "keep_reference_samples": False},
    "replay": {
        "mix": [{"source": "online", "share": 1.0}],
        "unit": "group",
        "min_online": 8,
        "error_buffer": 16,
        "online_capacity": 64,
    },
    "trainer": {"steps": 4, "batch_size": 8, "update_interval": 2, "checkpoint_interval": 4},
}
# Every service but inference, of which a replica among three is killed. The trainer first: its start takes longest.
KILLED = ("trainer", "value-estimation", "sandbox-judge", "verifier", "replay-buffer", "orchestrator", "redis")
# In a container of the same network without secrets, or with another platform's, given as arguments: what each service
# says to a call, and Redis to a question.
STRANGER = """
import json, sys, grpc, redis
token, password = (sys.argv + ["", ""])[1:3]
shown = [("authorization", "Bearer " + token)] if token else []
calls = {
    "orchestrator": "OrchestratorService/Heartbeat", "replay-buffer": "ReplayService/GetReplayStatus",
    "sandbox-judge": "JudgeService/DescribeJudge", "verifier": "JudgeService/DescribeJudge",
    "value-estimation": "ValueService/GetCalibration", "inference": "InferenceService/DescribeReplica",
}
said = {}
for service, call in calls.items():
    with grpc.insecure_channel(f"{service}:7070") as channel:
        try:
            said[service] = f"answered: {channel.unary_unary(f'/spo.v1.{call}')(b'', timeout=20, metadata=shown)}"
        except grpc.RpcError as error:
            said[service] = error.code().name
try:
    said["redis"] = f"answered: {redis.Redis('redis', password=password or None).keys()}"
except redis.RedisError as error:
    said["redis"] = type(error).__name__
print(json.dumps(said))
"""
# In a container of another project: which of these addresses take a connection, and which names it knows.
REACHES = """
import json, socket, sys
from concurrent.futures import ThreadPoolExecutor
def taken(place):
    try:
        socket.create_connection(place, timeout=5).close()
        return True
    except OSError:
        return False
places = json.loads(sys.argv[1])
with ThreadPoolExecutor(len(places)) as pool:
    found = [place for place, yes in zip(places, pool.map(taken, places)) if yes]
names = {}
for name in ("redis", "orchestrator", "inference"):
    try:
        names[name] = socket.gethostbyname_ex(name)[2]
    except OSError:
        names[name] = []
print(json.dumps({"reached": found, "names": names}))
"""
# What the second project runs: what keeps the state, what is published, what has a way out.
NEIGHBOURS = ("redis", "orchestrator", "verifier")
PORTS = (6379, 7070, 8080, 9090)
TABLE: list[tuple[str, float, str]] = []


class Platform:
    """The composed platform: its REST API and its containers."""

    def __init__(
        self, url: str, key: str, compose: list[str], project: str = "", variables: dict[str, str] | None = None
    ) -> None:
        self.url, self.key, self.compose = url, key, compose
        self.project = project or os.environ["COMPOSE_PROJECT_NAME"]
        self.variables = {**(variables or {}), "COMPOSE_PROJECT_NAME": self.project}

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
        return output([*self.compose, *arguments], self.variables)

    def owned(self) -> set[str]:
        """Its containers, volumes and networks, by their names and the engine's numbers."""
        own = ["--filter", f"label=com.docker.compose.project={self.project}"]
        asked = (["ps", "-aq"], ["volume", "ls", "-q"], ["network", "ls", "-q"])
        return {each for command in asked for each in output(["docker", *command, *own]).split()}

    def addresses(self) -> set[str]:
        """Those of its containers that run, on all their networks."""
        form = "{{range .NetworkSettings.Networks}}{{.IPAddress}} {{end}}"
        return set(output(["docker", "inspect", "-f", form, *self.run("ps", "-q").split()]).split())

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


def output(command: list[str], variables: dict[str, str] | None = None) -> str:
    """Standard output of a command. Raises CalledProcessError, TimeoutExpired."""
    environment = {**os.environ, **(variables or {})}
    done = subprocess.run(
        command, stdout=subprocess.PIPE, text=True, check=True, timeout=COMMAND_SECONDS, env=environment
    )
    return done.stdout


def say(what: str) -> None:
    """Print a line with the seconds since the start."""
    print(f"== {time.monotonic() - STARTED:6.0f} s  {what}", flush=True)


def table(steps: list[tuple[str, float, str]]) -> str:
    """The steps as a table of Markdown."""
    rows = [f"| {what} | {seconds:.0f} | {seen} |" for what, seconds, seen in steps]
    return "\n".join(["| step | seconds | seen |", "|---|---|---|", *rows])


@contextlib.contextmanager
def noted(what: str, job: WatchedJob | None = None) -> Iterator[list[str]]:
    """Note what a step took, between which steps of which job it was, and what is put into the list.

    It begins with a job at work.
    """
    if job:
        job.at_work()
    began, before, seen = time.monotonic(), job.place() if job else "", list[str]()
    say(what)
    yield seen
    if job:
        seen.append(f"{before} to {job.place().removeprefix(before.partition(' step')[0] + ' ')}")
    TABLE.append((what, time.monotonic() - began, "; ".join(seen)))
    if seen:
        say("; ".join(seen))


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
    """The job that is at work while something is done to the platform, and what follows it when it has succeeded."""

    def __init__(self, platform: Platform, folder: str, steps: int) -> None:
        self.platform, self.folder, self.steps, self.sent = platform, folder, steps, 0
        self.next()

    def next(self) -> None:
        """Send it over REST, and wait for its third step."""
        self.sent += 1
        inside = ["exec", "-T", "orchestrator", "python", "-c", MODEL, self.folder, str(self.steps)]
        self.id = self.platform.ask("/v1/jobs", json.loads(self.platform.run(*inside)))["id"]
        say(f"job {self.id}: {self.steps} steps")
        began = time.monotonic()
        wait_until(lambda: self.step() >= 3, "the job has done three steps", VALUES_SECONDS)
        seen = "values of its prompts included"
        TABLE.append((f"job {self.sent} from its submission to its third step", time.monotonic() - began, seen))

    def look(self) -> Any:
        """What the API says of it. Exits when it has come to a bad end."""
        job = self.platform.ask_again(f"/v1/jobs/{self.id}")
        if job["state"] in FINAL and job["state"] != "succeeded":
            raise SystemExit(f"the job is {job['state']}: {job['failure']}")
        return job

    def step(self) -> int:
        """The step it is at."""
        return int(self.look()["progress"]["step"])

    def place(self) -> str:
        """Which job, and where in it."""
        return f"job {self.sent} step {self.step()}"

    def succeeded(self) -> bool:
        """Whether it has reached its end."""
        return bool(self.look()["state"] == "succeeded")

    def at_work(self) -> None:
        """Have a job at work that has some steps before it: the next one when this one is as good as over."""
        if self.steps - self.step() < STEPS_LEFT:
            self.finish()
            self.next()

    def goes_on(self) -> None:
        """Wait for three more steps, or its success."""
        wanted = min(self.step() + 3, self.steps)
        wait_until(lambda: self.step() >= wanted, f"the job has done {wanted} steps", REPLICA_SECONDS)

    def served_by(self, replicas: int) -> None:
        """Wait until so many replicas of inference, neither more nor fewer, serve it, or the next one."""
        reached = f"replicas that serve the job: {replicas}"
        joined: Callable[[], bool] = lambda: self.platform.joined() == replicas  # noqa: E731
        while True:
            self.at_work()
            wait_until(lambda: joined() or self.succeeded(), reached, REPLICA_SECONDS)
            if not self.succeeded():
                return

    def finish(self) -> None:
        """Wait for its success and look into what it came to."""
        began = time.monotonic()
        wait_until(self.succeeded, f"job {self.id} has succeeded", JOB_SECONDS)
        TABLE.append((f"the end of job {self.sent}", time.monotonic() - began, report(self.platform, self.id)))


def strangers_answers(platform: Platform, *secrets: str) -> dict[str, str]:
    """What a container on the platform's network gets that has none of its secrets. Exits when it gets anything.

    secrets: another platform's token and password of Redis, which it shows.
    """
    network = f"{platform.project}_pipeline"
    confined = ["docker", "run", "--rm", "--network", network, "--entrypoint", "python", platform.image()]
    said = dict(json.loads(output([*confined, "-c", STRANGER, *secrets])))
    wanted = dict.fromkeys(said, "UNAUTHENTICATED") | {"redis": "AuthenticationError"}
    if said != wanted or len(said) < len(KILLED):
        raise SystemExit(f"a stranger on the network is told {said}")
    return said


def neighbour(platform: Platform) -> str:
    """A second project of this checkout on the engine: each has its own, and neither gets anything of the other."""
    with tempfile.TemporaryDirectory() as folder:
        os.chmod(folder, 0o755)
        port = int(platform.url.rpartition(":")[2]) + 1
        ours = {"SPO_SECRETS_PATH": folder, "SPO_HTTP_PORT": str(port)}
        other = Platform(f"http://127.0.0.1:{port}", "", platform.compose, f"{platform.project}-other", ours)
        output(["deploy/make_secrets.sh"], ours)
        secrets = {path.name: path.read_text() for path in Path(folder).iterdir()}
        other.key = secrets["spo_orchestrator_api_key"]
        try:
            other.run("up", "--detach", "--no-build", "--wait", "--wait-timeout", "600", *NEIGHBOURS)
            shared = platform.owned() & other.owned()
            answers = strangers_answers(platform, secrets["spo_rpc_token"], secrets["redis_password"])
            met = [*meets(platform, other, "verifier"), *meets(other, platform, "verifier")]
            jobs, keys = (
                len(other.ask("/v1/jobs")["items"]),
                [refused(platform, other.key), refused(other, platform.key)],
            )
        finally:
            other.run("down", "--volumes", "--timeout", "40")
    if shared or met or jobs or keys != [401, 401] or other.owned():
        raise SystemExit(f"two projects meet: {shared} {met}, jobs {jobs}, keys {keys}, left {other.owned()}")
    return f"no address of the other is reached, {len(answers)} services and both APIs refuse the other's secrets"


def meets(here: Platform, there: Platform, service: str) -> list[str]:
    """Which addresses of another platform a service of this one reaches, and which names lead it there."""
    # Its own Redis too, so that a probe that reaches nothing at all is seen.
    own, theirs = ["redis", 6379], sorted(there.addresses())
    places = [own, *([address, port] for address in theirs for port in PORTS)]
    seen = json.loads(here.run("exec", "-T", service, "python", "-c", REACHES, json.dumps(places)))
    if own not in seen["reached"] or not set(seen["names"]["redis"]) & here.addresses():
        raise SystemExit(f"{service} of {here.project} does not reach its own Redis: {seen}")
    named = {address for addresses in seen["names"].values() for address in addresses}
    return [str(each) for each in seen["reached"] if each != own] + sorted(named & set(theirs))


def refused(platform: Platform, key: str) -> int:
    """The status with which the API answers another platform's key; 200 when it takes it."""
    try:
        Platform(platform.url, key, platform.compose, platform.project).ask("/v1/jobs")
    except urllib.error.HTTPError as error:
        return error.code
    return 200


def pi0(platform: Platform) -> str:
    """The folder of the toy contest's pi0, built by the platform."""
    lines = platform.run("--profile", "demo", "run", "--rm", "-T", "toy-model").splitlines()
    return [str(json.loads(line)["folder"]) for line in lines if "folder" in line][-1]


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


def report(platform: Platform, job_id: str) -> str:
    """What a job came to, in a few words: the ledger, pass@1 before and after, the trainer's waits."""
    ledger = json.loads(platform.run("exec", "-T", "orchestrator", "python", "-c", LEDGER, job_id))
    say("the ledger holds each sample of each group once: " + json.dumps(ledger))
    for event in platform.ask(f"/v1/jobs/{job_id}/events?limit=1000")["items"]:
        if event["kind"] in ("replica_joined", "replica_lost"):
            say(f"{event['at']} {event['kind']} {event['body']['replica_id']}")
    before, *_, after = platform.ask(f"/v1/jobs/{job_id}/evaluations")["items"]
    first, last = (each["pass_at_k"]["1"]["value"] for each in (before, after))
    series = platform.ask(f"/v1/jobs/{job_id}/metrics?max_points=2000")["series"]
    waits = [wait for wait in series["wait_seconds"] if wait is not None]
    counted = f"ledger: {ledger['groups_fed']} groups, {ledger['inserted:online']} online samples, "
    counted += (
        f"{ledger['duplicates']} duplicates, {ledger['groups_waiting']} waiting; pass@1 {first:.3f} to {last:.3f}"
    )
    return f"{counted}; the trainer waited {sum(waits):.0f} s, {max(waits):.1f} s at most"


def tenants_key(platform: Platform, name: str, scope: str) -> str:
    """A key of the tenant whose episodes are played."""
    asked = {"name": name, "tenant": "agents", "scopes": [scope]}
    return str(platform.ask("/v1/keys", asked)["token"])


def played(platform: Platform, folder: str) -> str:
    """A job whose episodes a container's runner plays, with a key for that alone."""
    inside = ["exec", "-T", "orchestrator", "python", "-c", MODEL, folder, str(EPISODES["trainer"]["steps"])]
    spec = json.loads(platform.run(*inside))
    for section, fields in EPISODES.items():
        spec[section] = {**spec[section], **fields} if fields else fields
    # Of one tenant: a runner plays its own tenant's episodes, and a job sent with the platform's own key has none.
    key = Path(os.environ.get("SPO_SECRETS_PATH") or "deploy/secrets", "spo_agent_runner_api_key")
    key.write_text(tenants_key(platform, "runner", "agents:run"))
    key.chmod(0o644)
    commands = {"solver": f"python -c {shlex.quote(AGENT)}"}
    platform.variables["SPO_AGENT_RUNNER_HARNESSES"] = json.dumps(commands)
    platform.variables["SPO_AGENT_RUNNER_SCORE"] = f"python -c {shlex.quote(SCORE)}"
    platform.run(
        "--profile", "agents", "up", "--detach", "--no-build", "--wait", "--wait-timeout", "600", "agent-runner"
    )
    person = Platform(platform.url, tenants_key(platform, "person", "jobs:write"), platform.compose)
    job_id = person.ask("/v1/jobs", spec)["id"]
    state = lambda: platform.ask_again(f"/v1/jobs/{job_id}")["state"]  # noqa: E731
    wait_until(lambda: state() in FINAL, "the job of episodes has ended", JOB_SECONDS)
    if state() != "succeeded":
        raise SystemExit(f"the job of episodes is {platform.ask(f'/v1/jobs/{job_id}')}")
    sessions = platform.ask(f"/v1/agents/sessions?job={job_id}&limit=100")["items"]
    runner = platform.container("agent-runner")
    platform.run("--profile", "agents", "rm", "--stop", "--force", "agent-runner")
    key.unlink()
    return f"{len(sessions)} sessions of the runner {runner[:12]}"


def logged(platform: Platform, job_id: str) -> str:
    """Of the containers' logs: lines, those that are no JSON object, and who names the job. Exits when too few do."""
    lines, foreign, naming = 0, 0, set()
    for service in (*KILLED, "inference"):
        said = subprocess.run(
            ["docker", "logs", platform.container(service)], capture_output=True, text=True, check=True, timeout=300
        )
        for line in [] if service == "redis" else filter(str.strip, (said.stdout + said.stderr).splitlines()):
            lines += 1
            try:
                if job_id in (json.loads(line).get("run"), json.loads(line).get("job")):
                    naming.add(service)
            except (ValueError, AttributeError):
                foreign += 1
                say(f"{service} says outside of JSON: {line[:160]}")
    if not {"orchestrator", "inference", "trainer"} <= naming:
        raise SystemExit(f"the job {job_id} is named in the logs of {sorted(naming)} alone")
    return f"{lines} lines, {foreign} of them no JSON; the job is named by {', '.join(sorted(naming))}"


def upgraded(platform: Platform) -> None:
    """From the images of OLD_VERSION to those that the compose file names, volumes kept."""
    for each in ("LIGHT", "JUDGE", "CPU", "RUNNER"):
        os.environ.pop(f"SPO_{each}_IMAGE", None)
    before = platform.image()
    platform.run("up", "--detach", "--no-build", "--wait", "--wait-timeout", "900")
    if platform.image() == before:
        raise SystemExit(f"the images of {os.environ['OLD_VERSION']} are those of the compose file")


def disturbed(platform: Platform, job: WatchedJob) -> None:
    """All that is done to the platform while a job trains."""
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
    with noted("a second project on the engine", job) as seen:
        seen.append(neighbour(platform))
        job.goes_on()
    if os.environ.get("OLD_VERSION"):
        with noted(f"all services from {os.environ['OLD_VERSION']} to the new images, volumes kept", job):
            upgraded(platform)
            job.goes_on()


def main(url: str, key_file: str, steps: str, *compose: str) -> None:
    """The whole passage; any deviation ends it with an error, after the table of what was done."""
    platform = Platform(url, Path(key_file).read_text(), list(compose))
    try:
        with noted("a stranger on the network asks every service") as seen:
            said = strangers_answers(platform)
            seen.append(", ".join(f"{service}: {answer}" for service, answer in said.items()))
        with noted("pi0 of the toy contest"):
            folder = pi0(platform)
        job = WatchedJob(platform, folder, int(steps))
        disturbed(platform, job)
        job.finish()
        with noted("the containers' logs") as seen:
            seen.append(logged(platform, job.id))
        with noted("a job of which a runner in a container plays the episodes") as seen:
            seen.append(played(platform, folder))
    finally:
        print(table(TABLE), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
