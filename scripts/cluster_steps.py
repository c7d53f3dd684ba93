"""What `make cluster-test` does to a cluster while a job trains: each step says what it saw, or why it was not done.

Standard library only. A step exits when the cluster, or the platform on it, does otherwise than the documentation says;
that the job goes on and the ledger is right is asked by the caller, after each of them.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import time
from collections import Counter
from collections.abc import Callable
from datetime import datetime
from functools import partial
from typing import TYPE_CHECKING, Any

from compose_job import STRANGER

if TYPE_CHECKING:
    from cluster_test import Story, TrainingJob

RELEASE = "spo"
ROLES = (
    "inference",
    "sandbox-judge",
    "verifier",
    "replay-buffer",
    "value-estimation",
    "trainer",
    "orchestrator",
    "redis",
)
# Those that a rolling restart exchanges while people ask for completions: all but what the questions come in by.
ROLLED = ("inference", "sandbox-judge", "verifier", "replay-buffer", "value-estimation")
COMPONENT = "app.kubernetes.io/component"
# A step that this cluster cannot do says so with these words, and is no fault survived.
NOT_HERE = "not done: "
# What inference says once torch and vLLM are imported, and once its engine has the job's weights.
LOGGED = {"building the engine": "imported", "weights loaded": "loaded"}
FULL_SECONDS, START_SECONDS, COMMAND_SECONDS = 45.0, 1200, 900
REQUESTS_A_SECOND = 20
# Takes memory that belongs to no process, until the kernel kills the largest one of the container: the service.
GREEDY = """
import os
taken = os.memfd_create("greedy")
while True:
    os.write(taken, bytes(1 << 20))
"""
# Fills the claim that a folder is on, where it has a size of its own, and tells its size in bytes.
FILL = """
import json, os, sys
place, requested = "/var/lib/spo/filler", int(sys.argv[1])
room = os.statvfs("/var/lib/spo")
size = room.f_blocks * room.f_frsize
if size <= 1.5 * requested:
    with open(place, "wb") as filler:
        left = room.f_bavail * room.f_frsize
        while left > 4096:
            try:
                os.posix_fallocate(filler.fileno(), filler.seek(0, 2), left)
            except OSError:
                left //= 2
print(json.dumps({"size": size, "free": os.statvfs("/var/lib/spo").f_bavail}))
"""
EMPTY = "import json, os; os.remove('/var/lib/spo/filler'); print(json.dumps({}))"
# Completions at a steady rate until its input closes, as OpenAI's clients ask: two more tries, a pause between them.
TRAFFIC = """
import collections, json, sys, threading, time, urllib.error, urllib.request
from concurrent.futures import ThreadPoolExecutor
key, model, rate = sys.argv[1], sys.argv[2], float(sys.argv[3])
counts, took, over = collections.Counter(), [], threading.Event()
body = json.dumps({"model": model, "prompt": "sum", "max_tokens": 4}).encode()
headers = {"Authorization": "Bearer " + key, "Content-Type": "application/json"}
def ask(due):
    for attempt in range(3):
        request = urllib.request.Request("http://127.0.0.1:8080/v1/completions", body, headers)
        pause, said = 0.5 * 2**attempt, ""
        try:
            with urllib.request.urlopen(request, timeout=600) as answer:
                json.load(answer)["choices"][0]
            counts["answered" if attempt == 0 else "answered after a retry"] += 1
            took.append(time.monotonic() - due)
            return
        except urllib.error.HTTPError as error:
            said, pause = str(error.code), float(error.headers.get("Retry-After") or pause)
            if error.code < 500 and error.code not in (408, 409, 429):
                break
        except OSError as error:
            said = type(error).__name__
        time.sleep(pause)
    counts["lost: " + said] += 1
threading.Thread(target=lambda: (sys.stdin.read(), over.set()), daemon=True).start()
began = time.monotonic()
with ThreadPoolExecutor(600) as pool:
    asked = 0
    while not over.is_set():
        due = began + asked / rate
        time.sleep(max(0.0, due - time.monotonic()))
        pool.submit(ask, due)
        asked += 1
    seconds = time.monotonic() - began
took.sort()
middle, slowest = (took[len(took) // 2], took[-1]) if took else (0, 0)
print(json.dumps({"asked": asked, "seconds": seconds, "counts": counts, "median": middle, "slowest": slowest}))
"""
# What the judge has to say of each of these programs, which double a number or do harm.
HOSTILE = {
    "accepted": "print(2 * int(input()))",
    "wrong_answer": "print(0)",
    "cpu_time_limit": "while True: pass",
    "wall_time_limit": "import time\ntime.sleep(100)",
    "memory_limit": "x = bytearray(1 << 30)",
    "output_limit": "while True: print('x' * 1000)",
    "runtime_error": "import os\nwhile True: os.fork()",
    "compile_error": "print(",
    "security_violation": "import ctypes\nctypes.CDLL(None).ptrace(0, 0, 0, 0)",
}
JUDGE = """
import json, os, subprocess, sys, tempfile
programs = json.loads(sys.argv[1])
with tempfile.TemporaryDirectory() as folder:
    os.chdir(folder)
    with open("tests.json", "w") as file:
        json.dump([{"stdin": f"{n}\\n", "stdout": str(2 * n)} for n in (1, 2, 0)], file)
    for name, source in programs.items():
        with open(name + ".py", "w") as file:
            file.write(source)
    files = [name + ".py" for name in programs]
    options = ["--tests", "tests.json", "--judge", "127.0.0.1:7070", "-o", "json"]
    command = [sys.executable, "-m", "spo.cli", "judge", *options, *files]
    done = subprocess.run(command, capture_output=True, text=True)
rows = [json.loads(line) for line in done.stdout.splitlines()]
rows = [[row["program"][:-3], row["outcome"], row["isolation"]] for row in rows]
print(json.dumps({"said": done.stderr[-500:], "rows": rows}))
"""


def phases(pods: list[dict[str, Any]]) -> str:
    """Seconds from a pod's creation until it was scheduled, its container started and it was ready; the slowest pod.

    A pod may have `events`: what its log says and when, which come between.
    """
    slowest: dict[str, float] = {}
    for pod in pods:
        made = datetime.fromisoformat(pod["metadata"]["creationTimestamp"])
        at = {each["type"]: each["lastTransitionTime"] for each in pod["status"]["conditions"]}
        started = [each["state"]["running"]["startedAt"] for each in pod["status"]["containerStatuses"]]
        told = [(name, when) for event, name in LOGGED.items() for when in [pod.get("events", {}).get(event)] if when]
        known = [("scheduled", at["PodScheduled"]), ("started", max(started)), *told, ("ready", at["Ready"])]
        for name, when in known:
            seconds = (datetime.fromisoformat(when) - made).total_seconds()
            slowest[name] = max(slowest.get(name, 0.0), seconds)
    return ", ".join(f"{name} after {seconds:.0f} s" for name, seconds in slowest.items())


def first_events(log: str) -> dict[str, str]:
    """When each event is first told in a log of JSON lines."""
    found: dict[str, str] = {}
    for line in log.splitlines():
        with contextlib.suppress(ValueError, KeyError, TypeError):
            told = json.loads(line)
            found.setdefault(told["event"], told["timestamp"])
    return found


def scaled(story: Story, job: TrainingJob, replicas: int) -> str:
    """So many rollout pods, by `kubectl scale`, until all serve the job."""
    before, began = story.uids("inference"), time.monotonic()
    story.kubectl("scale", f"deployment/{RELEASE}-inference", f"--replicas={replicas}")
    job.served_by(replicas)
    new = [pod for pod in story.pods("inference") if pod["metadata"]["uid"] not in before]
    took = f"all serve after {time.monotonic() - began:.0f} s"
    for pod in new:
        pod["events"] = first_events(story.kubectl("logs", pod["metadata"]["name"]))
    return f"new pods {phases(new)}; {took}" if new else took


def killed(story: Story, role: str) -> str:
    """The pods of a role deleted without grace: SIGKILL."""
    before = story.uids(role)
    story.kubectl("delete", "pod", "-l", f"{COMPONENT}={role}", "--force", "--grace-period=0")
    return f"ready after {story.replaced(role, before):.0f} s"


def evicted(story: Story, role: str) -> str:
    """One pod of a role evicted, with the grace it asks for."""
    before = story.uids(role)
    [pod] = [each["metadata"] for each in story.pods(role) if each["metadata"]["uid"] == min(before)]
    if not evict(story, pod["name"]):
        raise SystemExit(f"the eviction of {pod['name']} is refused though all of {role} are ready")
    return f"ready after {story.replaced(role, {pod['uid']}, len(before)):.0f} s"


def evict(story: Story, name: str) -> bool:
    """Ask for an eviction; whether a disruption budget lets the pod go. Exits on any other answer."""
    asked = {"apiVersion": "policy/v1", "kind": "Eviction", "metadata": {"name": name, "namespace": story.namespace}}
    place = f"/api/v1/namespaces/{story.namespace}/pods/{name}/eviction"
    done = story.tried("create", "--raw", place, "-f", "-", given=json.dumps(asked))
    if done.returncode and "disruption budget" not in done.stderr:
        raise SystemExit(f"eviction of {name}: {done.stderr.strip()}")
    return done.returncode == 0


def budgeted(story: Story) -> str:
    """Two evictions at once of the three rollout pods: the budget lets one go, and the second when that is replaced."""
    uids = story.uids("inference")
    first, second, *_ = (pod["metadata"] for pod in story.pods("inference") if pod["metadata"]["uid"] in uids)
    before = len(uids)
    if not evict(story, first["name"]):
        raise SystemExit("the first eviction is refused")
    if evict(story, second["name"]):
        raise SystemExit("the second eviction is granted while the first pod is away")
    story.replaced("inference", {first["uid"]}, before)
    story.until(lambda: evict(story, second["name"]), "the budget lets the second pod go", START_SECONDS)
    return f"the second waits for the first; ready after {story.replaced('inference', {second['uid']}, before):.0f} s"


def out_of_memory(story: Story) -> str:
    """A container at its memory's limit: the kernel kills, the kubelet starts it again and says why."""
    pod = story.pods("verifier")[0]["metadata"]["name"]
    before = restarts(story, pod)
    story.tried("exec", pod, "-c", "verifier", "--", "python", "-c", GREEDY)
    story.until(lambda: restarts(story, pod) > before, f"{pod} is started again", START_SECONDS)
    story.replaced("verifier", set())
    [state] = [each["metadata"]["name"] == pod and each for each in story.pods("verifier")]
    died = state["status"]["containerStatuses"][0]["lastState"]["terminated"]
    if died["reason"] != "OOMKilled" and died["exitCode"] != 137:
        raise SystemExit(f"{pod} died of {died}")
    return f"the pod says {died['reason']}, exit {died['exitCode']}"


def restarts(story: Story, pod: str) -> int:
    """How often the kubelet has started a pod's container again; -1 while it says nothing."""
    found = [each for each in story.pods() if each["metadata"]["name"] == pod]
    return int(found[0]["status"]["containerStatuses"][0]["restartCount"]) if found else -1


def in_bytes(quantity: str) -> int:
    """A size as claims write it, such as 10Gi."""
    number, unit = quantity.rstrip("KMGTi"), quantity.lstrip("0123456789.")
    return int(float(number) * {"": 1, "Ki": 1 << 10, "Mi": 1 << 20, "Gi": 1 << 30, "Ti": 1 << 40}[unit])


def claim_filled(story: Story, job: TrainingJob) -> str:
    """The claim of the state without a free byte, for a while; what waits then goes on."""
    claim = json.loads(story.kubectl("get", "pvc", f"{RELEASE}-state", "-o", "json"))
    requested = in_bytes(claim["spec"]["resources"]["requests"]["storage"])
    found = story.inside(FILL, str(requested))
    if found["size"] > 1.5 * requested:
        return f"{NOT_HERE}the claim is a folder of the node's disk, {found['size'] >> 30} GiB"
    try:
        at = job.step()
        time.sleep(FULL_SECONDS)
        reached = job.step()
    finally:
        story.inside(EMPTY)
    return f"{found['free']} blocks free for {FULL_SECONDS:.0f} s, steps {at} to {reached} meanwhile"


def node_restarted(story: Story) -> str:
    """By a command that who runs the cluster gives."""
    command = os.environ.get("NODE_RESTART")
    if not command:
        return f"{NOT_HERE}NODE_RESTART names no command"
    subprocess.run(command, shell=True, check=True, timeout=COMMAND_SECONDS)
    began = time.monotonic()
    story.run("kubectl", "wait", "--for=condition=Ready", "node", "--all", f"--timeout={START_SECONDS}s")
    for role in ROLES:
        story.replaced(role, set())
    return f"all pods ready {time.monotonic() - began:.0f} s later"


def drained(story: Story) -> str:
    """Every pod of the release away from its node within the budgets, and back."""
    nodes = sorted({pod["spec"]["nodeName"] for pod in story.pods() if pod["status"]["phase"] == "Running"})
    before, began = {role: story.uids(role) for role in ROLES}, time.monotonic()
    try:
        for node in nodes:
            chosen = f"--pod-selector=app.kubernetes.io/instance={RELEASE}"
            options = ["--ignore-daemonsets", "--delete-emptydir-data", f"--timeout={START_SECONDS}s"]
            story.run("kubectl", "drain", node, chosen, *options)
        away = time.monotonic() - began
    finally:
        for node in nodes:
            story.run("kubectl", "uncordon", node)
    for role in ROLES:
        story.replaced(role, before[role])
    return f"{len(nodes)} nodes, empty after {away:.0f} s, all ready after {time.monotonic() - began:.0f} s"


def upgraded(story: Story) -> str:
    """Every pod of ours exchanged by an upgrade that changes a variable."""
    story.helm("upgrade", "--set", "logLevel=debug", "--set", "models.toy=true")
    return ""


def rolled_back(story: Story) -> str:
    """To the first revision."""
    story.run("helm", "rollback", RELEASE, "1", "-n", story.namespace, "--wait", "--timeout", f"{START_SECONDS}s")
    for role in ROLES:
        story.replaced(role, set())
    return ""


def restarted_under_traffic(story: Story, job: TrainingJob) -> str:
    """A rolling restart while people ask for completions at a steady rate: each is answered."""
    pod = story.pods("orchestrator")[0]["metadata"]["name"]
    command = ["kubectl", "-n", story.namespace, "exec", "-i", pod, "--", "python", "-c", TRAFFIC]
    asking = subprocess.Popen(
        [*command, story.key, job.id, str(REQUESTS_A_SECOND)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    before = {role: story.uids(role) for role in ROLLED}
    time.sleep(5)
    for role in ROLLED:
        story.kubectl("rollout", "restart", f"deployment/{RELEASE}-{role}")
    for role in ROLLED:
        story.replaced(role, before[role])
    time.sleep(5)
    said, _ = asking.communicate(timeout=COMMAND_SECONDS)
    found = json.loads(said)
    counts = Counter(found["counts"])
    lost = {name: count for name, count in counts.items() if name.startswith("lost")}
    if lost or sum(counts.values()) != found["asked"]:
        raise SystemExit(f"of {found['asked']} requests: {dict(counts)}")
    words = ", ".join(f"{count} {name}" for name, count in sorted(counts.items()))
    rate = found["asked"] / found["seconds"]
    times = f"median {found['median']:.2f} s, slowest {found['slowest']:.0f} s"
    return f"{found['asked']} requests, {rate:.1f} a second: {words}; {times}"


def a_stranger(story: Story) -> str:
    """A pod without our labels and secrets asks every service: it gets nothing."""
    image = story.pods("orchestrator")[0]["spec"]["containers"][0]["image"]
    # The chart has a Service of its own for each way into the orchestrator.
    place = RELEASE + "-{service.replace('orchestrator', 'orchestrator-grpc')}:7070"
    program = STRANGER.replace("{service}:7070", place).replace("'redis',", f"'{RELEASE}-redis',")
    story.tried("delete", "pod", "stranger", "--ignore-not-found")
    story.kubectl(
        "run", "stranger", f"--image={image}", "--image-pull-policy=IfNotPresent", "--restart=Never",
        "--command", "--", "python", "-c", program,
    )  # fmt: skip
    phase = ["get", "pod", "stranger", "-o", "jsonpath={.status.phase}"]
    over = ("Succeeded", "Failed")
    story.until(lambda: story.kubectl(*phase) in over, "the stranger has asked", START_SECONDS)
    said = json.loads(story.kubectl("logs", "stranger").splitlines()[-1])
    story.kubectl("delete", "pod", "stranger")
    return strangers_answers(said)


def strangers_answers(said: dict[str, str]) -> str:
    """What a stranger was told, in a few words. Exits when a service answered."""
    answered = {service: answer for service, answer in said.items() if answer.startswith("answered")}
    if answered:
        raise SystemExit(f"a stranger is answered: {answered}")
    reached = sorted(
        service for service, answer in said.items() if answer in ("UNAUTHENTICATED", "AuthenticationError")
    )
    others = [f"{service}: {answer}" for service, answer in sorted(said.items()) if service not in reached]
    words = f"{len(reached)} of {len(said)} are reached, and refuse it for want of a token or password"
    return "; ".join([words if reached else "none is reached", *others])


def judged(story: Story) -> str:
    """Hostile programs, by the judge in its pod. Exits when one is not told as what it is."""
    pod = story.pods("sandbox-judge")[0]["metadata"]["name"]
    found = json.loads(story.kubectl("exec", pod, "--", "python", "-c", JUDGE, json.dumps(HOSTILE)))
    wrong = [row for row in found["rows"] if row[0] != row[1]]
    if wrong or len(found["rows"]) != len(HOSTILE):
        raise SystemExit(f"the judge in {pod}: {wrong or found}")
    tiers = sorted({row[2] for row in found["rows"] if row[2]})
    return f"{len(HOSTILE)} programs as expected under {', '.join(tiers)}"


def steps(story: Story, job: Any) -> dict[str, tuple[str, Callable[[], str]]]:
    """All steps in their order: name -> what is done, how."""
    return {
        "judge": ("hostile programs in the judge's pod", partial(judged, story)),
        "stranger": ("a stranger asks every service", partial(a_stranger, story)),
        "scale-3": ("rollout pods 1 to 3", partial(scaled, story, job, 3)),
        "budget": ("two rollout pods evicted at once", partial(budgeted, story)),
        "traffic": (
            f"rolling restart under {REQUESTS_A_SECOND} requests a second", partial(restarted_under_traffic, story, job)
        ),
        "scale-1": ("rollout pods 3 to 1", partial(scaled, story, job, 1)),
        **{f"kill-{role}": (f"{role} deleted without grace", partial(killed, story, role)) for role in ROLES},
        **{f"evict-{role}": (f"{role} evicted", partial(evicted, story, role)) for role in ROLES},
        "memory": ("verifier out of memory", partial(out_of_memory, story)),
        "claim": ("the claim of the state full", partial(claim_filled, story, job)),
        "restart": ("the node restarted", partial(node_restarted, story)),
        "drain": ("every node drained", partial(drained, story)),
        "upgrade": ("upgrade of every pod", partial(upgraded, story)),
        "rollback": ("back to the first revision", partial(rolled_back, story)),
    }  # fmt: skip


# Steps that are no fault.
HARMLESS = ("judge", "stranger", "scale-3", "scale-1")


def selected() -> set[str]:
    """The steps that ONLY names; none: all."""
    return set(os.environ.get("ONLY", "").split())


def disturbed(story: Story, job: TrainingJob) -> None:
    """All of them, or those that ONLY names."""
    wanted = selected()
    for name, (what, done) in steps(story, job).items():
        if not wanted or name in wanted:
            job.disturbed(name, what, done)
