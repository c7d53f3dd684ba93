"""`make cluster-test KUBECONFIG=...`: the story of docs/kubernetes.md on any cluster, with a table of seconds by step.

Standard library only; needs kubectl and helm, and images that the nodes have or can fetch. KUBECONFIG names the cluster
(kind, minikube, k3s, a real one); VALUES a values file beside `values-single-node.yaml` (registry and digests, say);
NAMESPACE what it makes and removes again (spo-test). The steps: install, `helm test`, a job by REST through a
port-forward, and what `cluster_steps.py` does to the cluster while a job trains; then the job's end and uninstall.
ONLY="drain rollback" names steps of it, for a cluster that has no hour. After each of them the job has to go on, and
the ledger to hold no sample twice and no stream a dead letter; that nothing is lost is asked at each job's end. A job
that succeeds before all has been done is looked into, and the next one takes its place.

NODE_RESTART is a command that restarts the node, or its kubelet: only who runs the cluster knows it.
"""

from __future__ import annotations

import base64
import contextlib
import json
import os
import shutil
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from cluster_steps import (
    COMMAND_SECONDS,
    COMPONENT,
    HARMLESS,
    NOT_HERE,
    RELEASE,
    START_SECONDS,
    disturbed,
    selected,
    steps,
)
from compose_job import FINAL, LEDGER, MODEL, table

ROOT = Path(__file__).parents[1]
JOB_SECONDS = 5400
# A job that has fewer steps left is let end before anything more is done.
STEPS_LEFT = 30
POLL_SECONDS = 1.0
# What the ledger of a job that trains has so far: losses show at its end alone, doubles and what was given up at once.
SO_FAR = """
import collections, json, sys, redis
from spo import redis_keys
from spo.experience.store import ExperienceStore
from spo.service.settings import PlatformSettings
from spo.testing.peers import trajectories_of
store, job = redis.Redis.from_url(PlatformSettings().redis_url), sys.argv[1]
ledger = trajectories_of(store, job, ExperienceStore(PlatformSettings().experience_place))
online = collections.Counter((each.group_id, each.sample_index) for each in ledger if each.group_id)
streams = (redis_keys.prompts(job), redis_keys.rollouts(), redis_keys.verifier_rollouts(), redis_keys.verdicts())
dead = sum(store.xlen(redis_keys.dead_letters(stream)) for stream in (*streams, redis_keys.estimates()))
print(json.dumps({"online": sum(online.values()), "doubled": sum(online.values()) - len(online), "dead": dead}))
"""
# What a release may leave: the claims that are kept, that of a StatefulSet, and the pod of `helm test`.
STAYS = {
    f"persistentvolumeclaim/{RELEASE}-models",
    f"persistentvolumeclaim/redis-{RELEASE}-redis-0",
    f"pod/{RELEASE}-test",
}
KINDS = "all,pvc,secret,configmap,serviceaccount,role,rolebinding,networkpolicy,pdb,ingress,hpa"


def skip(why: str) -> None:
    """Say loudly that nothing was tested, and end."""
    print("*" * 78, f"cluster-test SKIPPED: {why}. The chart was NOT run.", "*" * 78, sep="\n", file=sys.stderr)
    raise SystemExit(0)


def waiting(pods: list[dict[str, Any]]) -> list[str]:
    """Pods that do not run and why: what the scheduler says, or what a container waits for or last died of."""
    found = []
    for pod in pods:
        name, status = pod["metadata"]["name"], pod["status"]
        conditions = {each["type"]: each for each in status.get("conditions", [])}
        scheduled, ready = conditions.get("PodScheduled", {}), conditions.get("Ready", {})
        if status.get("phase") == "Succeeded" or ready.get("status") == "True":
            continue
        reasons = [str(scheduled.get("message", ""))] if scheduled.get("status") == "False" else []
        for container in [*status.get("initContainerStatuses", []), *status.get("containerStatuses", [])]:
            for states in (container.get("state", {}), container.get("lastState", {})):
                for state in states.values():
                    if state.get("reason") not in (None, "Completed"):
                        reasons.append(f"{container['name']}: {state['reason']} {state.get('message', '')}".strip())
        found.append(f"{name}: {'; '.join(reasons) or status.get('phase', 'unknown')}")
    return found


def leaves(pod: dict[str, Any]) -> bool:
    """Whether a pod is on its way out: it drains, and another takes its place."""
    return "deletionTimestamp" in pod["metadata"]


@dataclass
class Story:
    """The release on a cluster, and the steps that were done."""

    namespace: str
    values: list[str]
    steps: list[tuple[str, float, str]] = field(default_factory=list)
    api: str = ""
    key: str = ""

    def run(self, *command: str) -> str:
        """Standard output. Exits with the last words when a command fails."""
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=COMMAND_SECONDS + START_SECONDS, check=False
        )
        if done.returncode:
            said = f"{' '.join(command[:6])}: {done.stderr.strip()[-800:]}"
            raise SystemExit("\n".join([said, *waiting(self.pods())]))
        return done.stdout

    def kubectl(self, *arguments: str) -> str:
        return self.run("kubectl", "-n", self.namespace, *arguments)

    def tried(self, *arguments: str, given: str | None = None) -> subprocess.CompletedProcess[str]:
        """A command of kubectl's that may fail."""
        command = ["kubectl", "-n", self.namespace, *arguments]
        return subprocess.run(
            command, input=given, capture_output=True, text=True, timeout=COMMAND_SECONDS, check=False
        )

    def pods(self, role: str = "") -> list[dict[str, Any]]:
        """All pods, or those of a role; none while the cluster does not answer."""
        done = self.tried("get", "pods", "-o", "json", *(["-l", f"{COMPONENT}={role}"] if role else []))
        return list(json.loads(done.stdout)["items"]) if done.returncode == 0 else []

    def uids(self, role: str) -> set[str]:
        """Of the pods of a role that are not on their way out."""
        return {pod["metadata"]["uid"] for pod in self.pods(role) if not leaves(pod)}

    def replaced(self, role: str, gone: set[str], count: int | None = None) -> float:
        """Wait until none of these pods is there and as many as before are ready; the seconds that took."""
        began, wanted = time.monotonic(), count or len(gone) or 1

        def reached() -> bool:
            pods = self.pods(role)
            left = gone & {pod["metadata"]["uid"] for pod in pods}
            staying = [pod for pod in pods if not leaves(pod)]
            return not left and len(staying) >= wanted and not waiting(staying)

        self.until(reached, f"{role}: {wanted} pods ready", START_SECONDS)
        return time.monotonic() - began

    def ask(self, path: str, body: str | None = None) -> Any:
        """The JSON that the API answers. Raises OSError while it does not."""
        headers = {"Authorization": f"Bearer {self.key}", "Content-Type": "application/json"}
        content = None if body is None else body.encode()
        request = urllib.request.Request(f"{self.api}{path}", content, headers)
        with urllib.request.urlopen(request, timeout=30) as answer:
            return json.load(answer)

    def until(self, holds: Callable[[], bool], what: str, seconds: float) -> None:
        """Poll until something holds. Exits naming the pods that wait when it does not come in time."""
        deadline = time.monotonic() + seconds
        while True:
            # A port-forward ends with its pod and is made anew by its loop.
            with contextlib.suppress(OSError):
                if holds():
                    return
            if time.monotonic() > deadline:
                raise SystemExit(f"not within {seconds:g} s: {what}\n" + "\n".join(waiting(self.pods())))
            time.sleep(POLL_SECONDS)

    @contextlib.contextmanager
    def step(self, what: str, seen: Callable[[], str] = str) -> Iterator[None]:
        """Note what a step took, and what is seen after it."""
        began = time.monotonic()
        print(f"== {what}", flush=True)
        yield
        said = seen()
        self.steps.append((what, time.monotonic() - began, said))
        print(f"   {time.monotonic() - began:.0f} s  {said}", flush=True)

    @contextlib.contextmanager
    def way_in(self) -> Iterator[None]:
        """The API through a port-forward, which is made anew when it ends with its pod."""
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        secret = json.loads(self.kubectl("get", "secret", RELEASE, "-o", "json"))["data"]["api-key"]
        self.api, self.key = f"http://127.0.0.1:{port}", base64.b64decode(secret).decode()
        command = ["kubectl", "-n", self.namespace, "port-forward", f"service/{RELEASE}-orchestrator", f"{port}:8080"]
        over, running = threading.Event(), [subprocess.Popen(command, stdout=subprocess.DEVNULL)]

        def again() -> None:
            while not over.is_set():
                running[0].wait()
                if not over.wait(POLL_SECONDS):
                    running[0] = subprocess.Popen(command, stdout=subprocess.DEVNULL)

        keeper = threading.Thread(target=again, daemon=True)
        keeper.start()
        try:
            yield
        finally:
            over.set()
            # It may have made a new one just then.
            while keeper.is_alive():
                running[0].terminate()
                keeper.join(POLL_SECONDS)

    def inside(self, program: str, *arguments: str) -> Any:
        """The JSON that a program prints in the orchestrator's pod."""
        pod = f"deployment/{RELEASE}-orchestrator"
        return json.loads(self.kubectl("exec", pod, "--", "python", "-c", program, *arguments))

    def doctored(self) -> str:
        """What `spo doctor --kubernetes` says where it is installed. Exits when it finds something wanting."""
        if shutil.which("spo") is None:
            return f"{NOT_HERE}there is no spo command"
        done = subprocess.run(
            ["spo", "doctor", "--kubernetes", "-n", self.namespace], capture_output=True, text=True, check=False
        )
        if done.returncode:
            raise SystemExit(f"spo doctor --kubernetes: {done.stdout[-2000:]}{done.stderr[-800:]}")
        return "nothing found wanting"

    def uninstalled(self) -> str:
        """Take the release away. Exits when it leaves more than the claims that it keeps."""
        self.run("helm", "uninstall", RELEASE, "-n", self.namespace, "--wait")
        named = f"app.kubernetes.io/instance={RELEASE}"
        runs = ("Pending", "Running", "Unknown")
        gone: Callable[[], bool] = lambda: not [pod for pod in self.pods() if pod["status"]["phase"] in runs]  # noqa: E731
        self.until(gone, "no pod is left that runs", START_SECONDS)
        left = set(self.kubectl("get", KINDS, "-l", named, "-o", "name").split())
        if left - STAYS:
            raise SystemExit(f"the release leaves {sorted(left - STAYS)}")
        return f"stays: {', '.join(sorted(left))}"

    def helm(self, verb: str, *options: str) -> None:
        """Install or upgrade with the values of this story."""
        given = [word for each in self.values for word in ("-f", each)]
        limits = ["--wait", "--timeout", f"{START_SECONDS}s"]
        chart = str(ROOT / "helm" / "spo")
        self.run("helm", verb, RELEASE, chart, "-n", self.namespace, *given, *limits, *options)


class TrainingJob:
    """The job that is at work while something is done to the cluster, and what follows it when it has succeeded."""

    def __init__(self, story: Story, steps: int) -> None:
        self.story, self.steps, self.sent, self.faults = story, steps, 0, 0
        self.next()

    def next(self) -> None:
        """Send one by REST, and wait until its curve has begun."""
        self.sent += 1
        with self.story.step(f"job {self.sent} until the first point of its curve"):
            spec = self.story.inside(MODEL, "/models/toy", str(self.steps))
            self.id = self.story.ask("/v1/jobs", json.dumps(spec))["id"]
            self.story.until(lambda: self.place() > 0, "the first step of the job", START_SECONDS)

    def look(self) -> dict[str, Any]:
        """What the API says of it. Raises OSError while it says nothing. Exits when it has come to a bad end."""
        job = dict(self.story.ask(f"/v1/jobs/{self.id}"))
        if job["state"] in FINAL and job["state"] != "succeeded":
            raise SystemExit(f"the job is {job['state']}: {job['failure']}")
        return job

    def place(self) -> int:
        """The step it is at. Raises OSError."""
        return int(self.look()["progress"]["step"])

    def step(self) -> int:
        """The step it is at, once the API answers."""
        deadline = time.monotonic() + START_SECONDS
        while True:
            with contextlib.suppress(OSError):
                return self.place()
            if time.monotonic() > deadline:
                raise SystemExit("the API does not answer\n" + "\n".join(waiting(self.story.pods())))
            time.sleep(POLL_SECONDS)

    def at_work(self) -> None:
        """Have a job at work that has some steps before it: the next one when this one is as good as over."""
        if self.steps - self.step() < STEPS_LEFT:
            with self.story.step(f"job {self.sent} to its end", self.ended):
                pass
            self.next()

    def goes_on(self) -> None:
        """Wait for three more steps, or for its success."""
        wanted = min(self.step() + 3, self.steps)
        self.story.until(lambda: self.place() >= wanted, f"the job has done {wanted} steps", START_SECONDS)

    def served_by(self, replicas: int) -> None:
        """Wait until so many replicas of inference serve it, or the next one."""

        def reached() -> bool:
            found = self.story.ask("/v1/replicas")["items"]
            serving = [
                each for each in found if each["pool"] == "inference" and each["run_id"] and not each["draining"]
            ]
            return len(serving) == replicas or self.look()["state"] == "succeeded"

        while True:
            self.at_work()
            self.story.until(reached, f"replicas that serve the job: {replicas}", START_SECONDS)
            if self.look()["state"] != "succeeded":
                return

    def ended(self) -> str:
        """Wait for its end. Exits when it did not succeed, or when the ledger lacks a sample or has one twice."""
        self.story.until(lambda: self.look()["state"] in FINAL, "the job has ended", JOB_SECONDS)
        return f"the ledger holds each sample once: {json.dumps(self.story.inside(LEDGER, self.id))}"

    def disturbed(self, name: str, what: str, done: Callable[[], str]) -> None:
        """Do something to the cluster under it, after which it goes on and its ledger is right so far."""
        self.at_work()
        before, sent, seen = self.step(), self.sent, list[str]()
        with self.story.step(f"{what} (`{name}`)", lambda: "; ".join(filter(None, seen))):
            seen.append(done())
            if not seen[0].startswith(NOT_HERE):
                self.faults += name not in HARMLESS
                self.goes_on()
                so_far = self.story.inside(SO_FAR, self.id)
                seen.append(f"job {sent} step {before} to {f'job {self.sent} ' * (self.sent > sent)}{self.step()}")
                if so_far["doubled"] or so_far["dead"]:
                    raise SystemExit(f"after {what}: {so_far}")
                seen.append(f"{so_far['online']} samples, none twice")


def main() -> int:
    """The whole story; any deviation ends it, after the table of what was done, and removes what it made."""
    missing = next((tool for tool in ("kubectl", "helm") if shutil.which(tool) is None), "")
    if not os.environ.get("KUBECONFIG") or missing:
        skip(f"there is no {missing} command" if missing else "KUBECONFIG names no cluster")
    asked = subprocess.run(
        ["kubectl", "version", "-o", "json"], capture_output=True, text=True, timeout=60, check=False
    )
    if asked.returncode:
        skip("no cluster answers by KUBECONFIG")
    namespace = os.environ.get("NAMESPACE") or "spo-test"
    found = subprocess.run(["kubectl", "get", "namespace", namespace], capture_output=True, timeout=60, check=False)
    if found.returncode == 0:
        raise SystemExit(f"the namespace {namespace} is there already, and would be removed at the end: NAMESPACE=...")
    print(f"cluster: {json.loads(asked.stdout)['serverVersion']['gitVersion']}", flush=True)
    values = [str(ROOT / "helm" / "spo" / "values-single-node.yaml"), *filter(None, [os.environ.get("VALUES")])]
    story, began = Story(namespace, values), time.monotonic()
    unknown = selected() - set(steps(story, None))
    if unknown:
        raise SystemExit(f"ONLY names no step: {', '.join(sorted(unknown))}")
    try:
        with story.step("install until every pod is ready"):
            story.helm("install", "--create-namespace", "--set", "models.toy=true")
        with story.step("the toy contest's model"):
            label = "app.kubernetes.io/component=models"
            story.kubectl("wait", "--for=condition=complete", "job", "-l", label, f"--timeout={START_SECONDS}s")
        with story.step("helm test"):
            story.run("helm", "test", RELEASE, "-n", story.namespace)
        with story.step("`spo doctor --kubernetes`", story.doctored):
            pass
        with story.way_in():
            story.until(lambda: bool(story.ask("/readyz") or True), "the API answers", START_SECONDS)
            job = TrainingJob(story, int(os.environ.get("STEPS") or "1000"))
            print(f"== {time.monotonic() - began:.0f} s from `helm install` to the first point of a curve", flush=True)
            story.steps.append(("`helm install` to the first point of a curve", time.monotonic() - began, ""))
            disturbed(story, job)
            with story.step("the last job's end", job.ended):
                pass
            story.steps.append((f"{job.faults} faults, {job.sent} jobs", 0.0, "nothing lost, nothing doubled"))
        with story.step("uninstall", story.uninstalled):
            pass
    finally:
        print(table(story.steps), flush=True)
        for command in (
            ["helm", "uninstall", RELEASE, "-n", story.namespace, "--wait"],
            ["kubectl", "delete", "namespace", story.namespace],
        ):
            subprocess.run(command, timeout=COMMAND_SECONDS, check=False)
    return 0


if __name__ == "__main__":
    sys.exit(main())
