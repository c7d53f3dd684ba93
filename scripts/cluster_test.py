"""`make cluster-test KUBECONFIG=...`: the story of docs/kubernetes.md on any cluster, with a table of seconds by step.

Standard library only; needs kubectl and helm, and images that the nodes have or can fetch. KUBECONFIG names the cluster
(kind, minikube, k3s, a real one); VALUES a values file beside `values-single-node.yaml` (registry and digests, say);
NAMESPACE what it makes and removes again (spo-test). The steps: install, `helm test`, a job by REST through a
port-forward, rollout pods 1 -> 3 -> 1 while it trains, each role's pod deleted without grace, an upgrade of the release
under the job, the job's end, uninstall.
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

from compose_job import FINAL, LEDGER, MODEL, table

ROOT = Path(__file__).parents[1]
RELEASE = "spo"
# How long a command, a pod's start and a job may take on two busy cores.
COMMAND_SECONDS, START_SECONDS, JOB_SECONDS = 900, 1200, 5400
POLL_SECONDS = 1.0
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

    def pods(self) -> list[dict[str, Any]]:
        command = ["kubectl", "-n", self.namespace, "get", "pods", "-o", "json"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
        return list(json.loads(done.stdout)["items"]) if done.returncode == 0 else []

    def ask(self, path: str, body: str | None = None) -> Any:
        """The JSON that the API answers. Raises OSError while it does not."""
        headers = {"Authorization": f"Bearer {self.key}", "Content-Type": "application/json"}
        request = urllib.request.Request(f"{self.api}{path}", body and body.encode(), headers)
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
        self.steps.append((what, time.monotonic() - began, seen()))

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

    def helm(self, verb: str, *options: str) -> None:
        """Install or upgrade with the values of this story."""
        given = [word for each in self.values for word in ("-f", each)]
        limits = ["--wait", "--timeout", f"{START_SECONDS}s"]
        chart = str(ROOT / "helm" / "spo")
        self.run("helm", verb, RELEASE, chart, "-n", self.namespace, *given, *limits, *options)


class TrainingJob:
    """A job that has to be at work whenever something is done to the cluster."""

    def __init__(self, story: Story, steps: int) -> None:
        self.story = story
        spec = story.inside(MODEL, "/models/toy", str(steps))
        self.id = story.ask("/v1/jobs", json.dumps(spec))["id"]

    def look(self) -> dict[str, Any]:
        """What the API says of it."""
        return dict(self.story.ask(f"/v1/jobs/{self.id}"))

    def at_work(self) -> int:
        """The step it is at. Exits when it has ended: then nothing was proven."""
        job = self.look()
        if job["state"] in FINAL:
            raise SystemExit(f"the job is {job['state']} too early, give it more STEPS: {job['failure']}")
        return int(job["progress"]["step"])

    def goes_on(self) -> None:
        """Wait for three more steps."""
        goal: list[int] = []

        def reached() -> bool:
            step = self.at_work()
            goal.append(step + 3)
            return step >= goal[0]

        self.story.until(reached, "three more steps of the job", START_SECONDS)

    def served_by(self, replicas: int) -> None:
        """Wait until so many replicas of inference serve it."""

        def reached() -> bool:
            found = self.story.ask("/v1/replicas")["items"]
            serving = [
                each for each in found if each["pool"] == "inference" and each["run_id"] and not each["draining"]
            ]
            return len(serving) == replicas

        self.story.until(reached, f"replicas that serve the job: {replicas}", START_SECONDS)

    def ended(self) -> str:
        """Wait for its end. Exits when it did not succeed, or when the ledger lacks a sample or has one twice."""
        self.story.until(lambda: self.look()["state"] in FINAL, "the job has ended", JOB_SECONDS)
        if (job := self.look())["state"] != "succeeded":
            raise SystemExit(f"the job is {job}")
        return f"the ledger holds each sample once: {json.dumps(self.story.inside(LEDGER, self.id))}"


def disturbed(story: Story, job: TrainingJob) -> None:
    """All that is done to the cluster while the job trains."""
    for replicas in (3, 1):
        with story.step(f"rollout pods to {replicas}"):
            story.kubectl("scale", f"deployment/{RELEASE}-inference", f"--replicas={replicas}")
            job.served_by(replicas)
            job.goes_on()
    for role in ROLES:
        with story.step(f"pod of {role} deleted without grace"):
            label = f"app.kubernetes.io/component={role}"
            story.kubectl("delete", "pod", "-l", label, "--force", "--grace-period=0")
            story.kubectl("wait", "--for=condition=Ready", "pod", "-l", label, f"--timeout={START_SECONDS}s")
            job.goes_on()
    with story.step("upgrade of every pod"):
        story.helm("upgrade", "--set", "logLevel=debug", "--set", "models.toy=true")
        job.goes_on()


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
    story = Story(namespace, values)
    try:
        with story.step("install until every pod is ready"):
            story.helm("install", "--create-namespace", "--set", "models.toy=true")
        with story.step("the toy contest's model"):
            label = "app.kubernetes.io/component=models"
            story.kubectl("wait", "--for=condition=complete", "job", "-l", label, f"--timeout={START_SECONDS}s")
        with story.step("helm test"):
            story.run("helm", "test", RELEASE, "-n", story.namespace)
        with story.way_in():
            with story.step("a job until its third step"):
                story.until(lambda: bool(story.ask("/readyz") or True), "the API answers", START_SECONDS)
                job = TrainingJob(story, int(os.environ.get("STEPS") or "1000"))
                job.goes_on()
            disturbed(story, job)
            with story.step("the job's end", job.ended):
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
