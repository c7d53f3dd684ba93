"""What foreign programs say of chart and images: the official client and checkov of objects, hadolint, yamllint."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import yaml
from cluster import BUILT_IN
from conftest import CHART, rendered
from kubernetes.client import ApiClient

ROOT = CHART.parents[1]
PROGRAMS = Path(sys.executable).parent
# Checks that objects fail on purpose. One that nothing fails any more has to go.
FAILED_ON_PURPOSE = {
    "CKV_K8S_8": "a trainer's pods wait for each other before they open a port: liveness would kill those that wait",
    "CKV_K8S_9": "the pod of `helm test` serves nothing",
    "CKV_K8S_11": "a limit of CPU slows engines and trainers down where the node has cores to spare; the judge has one",
    "CKV_K8S_21": "objects have no namespace of their own: they go where the release goes",
    "CKV_K8S_35": "secrets are variables; files of the same names under /run/secrets are taken too (extraVolumes)",
    "CKV_K8S_38": "the orchestrator has a token where people scale over the API, for a Role of three names",
    "CKV_K8S_40": "Valkey's image has user 999; redis.podSecurityContext takes another",
}


def judged(command: list[str], **further: Any) -> subprocess.CompletedProcess[str]:
    program = PROGRAMS / command[0]
    return subprocess.run([program, *command[1:]], capture_output=True, text=True, timeout=120, check=False, **further)


def test_the_official_clients_models_hold_every_object_whole(objects: list[dict[str, Any]]) -> None:
    """What a model does not know it drops, what it cannot do without it refuses."""
    client = ApiClient()
    own = [each for each in objects if each["apiVersion"] in BUILT_IN and "status" not in each]
    assert len(own) > 20
    for each in map(as_the_client_writes, own):
        version = each["apiVersion"].rpartition("/")[2]
        model = client.deserialize(json.dumps(each), f"{version.capitalize()}{each['kind']}", "application/json")
        assert client.sanitize_for_serialization(model) == each


def as_the_client_writes(value: Any, *, quantities: bool = False) -> Any:
    """Without fields that are null, which mean none; quantities as text, though servers take numbers too."""
    if isinstance(value, dict):
        return {
            name: as_the_client_writes(held, quantities=quantities or name in ("limits", "requests"))
            for name, held in value.items()
            if held is not None
        }
    if isinstance(value, list):
        return [as_the_client_writes(held) for held in value]
    return str(value) if quantities else value


def test_checkov_finds_nothing_but_what_is_done_on_purpose(tmp_path: Path) -> None:
    # Everything a value can switch on, and trainers of several pods.
    for name in ("everything", "elastic"):
        (tmp_path / f"{name}.yaml").write_text(yaml.safe_dump_all(rendered(name)))
    done = judged(
        ["checkov", "-d", str(tmp_path), "--framework", "kubernetes", "--skip-download", "--compact", "-o", "json"]
    )
    report = json.loads(done.stdout)
    assert report["summary"]["passed"] > 1000
    assert report["summary"]["parsing_errors"] == 0
    failed: dict[str, set[str]] = {}
    for check in report["results"]["failed_checks"]:
        failed.setdefault(check["check_id"], set()).add(f"{check['resource']}: {check['check_name']}")
    assert {check: found for check, found in failed.items() if check not in FAILED_ON_PURPOSE} == {}
    assert set(FAILED_ON_PURPOSE) - set(failed) == set(), "these checks hold now: take them off the list"
    assert {found.partition(":")[0] for found in failed["CKV_K8S_8"]} == {
        "StatefulSet.default.spo-trainer-0",
        "StatefulSet.default.spo-trainer-1",
        "Pod.default.spo-test",
    }
    assert {found.partition(":")[0] for found in failed["CKV_K8S_40"]} == {"StatefulSet.default.spo-redis"}


def test_hadolint_has_nothing_to_say_of_the_images() -> None:
    files = sorted(map(str, (ROOT / "deploy").glob("Dockerfile.*")))
    assert len(files) == 4
    done = judged(["hadolint", "--no-color", "-c", str(ROOT / "deploy" / "hadolint.yaml"), *files])
    assert (done.returncode, done.stdout) == (0, "")


def test_yamllint_has_nothing_to_say_of_values_and_configuration() -> None:
    paths = [*CHART.glob("*.yaml"), ROOT / "docker-compose.yml", *(ROOT / "deploy").rglob("*.y*ml")]
    assert len(paths) > 10
    done = judged(["yamllint", "--strict", "-c", str(ROOT / "deploy" / "yamllint.yaml"), *map(str, paths)])
    assert (done.returncode, done.stdout) == (0, "")
