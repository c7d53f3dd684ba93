"""Compose file and images: only known settings, one open door, no secret in a variable, nothing runs as root."""

from __future__ import annotations

import os
import re
import subprocess
import tomllib
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import yaml

from spo.local.launcher import server_command
from spo.service.settings import PlatformSettings, ServiceSettings

ROOT = Path(__file__).parents[3]
COMPOSE: dict[str, Any] = yaml.safe_load((ROOT / "docker-compose.yml").read_text())
DOCKERFILES = sorted((ROOT / "deploy").glob("Dockerfile.*"))
SERVICES = {
    name: service
    for name, service in COMPOSE["services"].items()
    if str(service.get("command", [""])[0]).startswith("services.")
}

HASHED = sorted((ROOT / "constraints" / "hashed").glob("*.txt"))
# One requirement and the lines of its hashes.
PINNED = re.compile(r"^([\w.-]+)==(\S+?)(?: ;[^\\\n]*)?((?: \\\n    --hash=sha256:[0-9a-f]{64})*)$", re.MULTILINE)


def settings_of(name: str) -> type[ServiceSettings]:
    module = SERVICES[name]["command"][0]
    settings: type[ServiceSettings] = import_module(f"{module}.settings").Settings
    return settings


def test_compose_runs_every_service() -> None:
    folders = {path.parent.name for path in (ROOT / "services").glob("*/__main__.py")}
    assert {service["command"][0] for service in SERVICES.values()} == {f"services.{folder}" for folder in folders}


@pytest.mark.parametrize("name", SERVICES)
def test_every_variable_in_compose_is_a_setting(name: str) -> None:
    fields = settings_of(name).model_fields
    known = {f"SPO_{field}".upper() for field in PlatformSettings.model_fields}
    known |= {str(fields[field].validation_alias) for field in fields if field not in PlatformSettings.model_fields}
    assert set(SERVICES[name]["environment"]) <= known


@pytest.mark.parametrize("name", SERVICES)
def test_every_service_is_confined_limited_and_watched(name: str) -> None:
    service = SERVICES[name]
    assert service["read_only"] is True
    assert service["cap_drop"] == ["ALL"]
    assert service["security_opt"] == ["no-new-privileges:true"]
    assert "memory" in service["deploy"]["resources"]["limits"]
    assert service["healthcheck"]["test"][-1] == "127.0.0.1:7070"
    assert all(needed["condition"] == "service_healthy" for needed in service["depends_on"].values())


@pytest.mark.parametrize("name", SERVICES)
def test_docker_waits_longer_for_a_service_than_it_drains(name: str) -> None:
    drain = settings_of(name).model_fields["drain_seconds"]
    seconds = float(SERVICES[name]["environment"].get(str(drain.validation_alias), drain.default))
    assert seconds >= (600 if "trainer" in name else 20)
    assert int(SERVICES[name]["stop_grace_period"].removesuffix("s")) >= seconds + 15


def test_only_the_orchestrator_and_the_observers_are_published_and_on_loopback() -> None:
    published = {name: service["ports"] for name, service in COMPOSE["services"].items() if "ports" in service}
    assert set(published) == {"orchestrator", "prometheus", "grafana"}
    assert all(port.startswith("127.0.0.1:") for ports in published.values() for port in ports)


def test_services_without_a_published_port_have_no_way_out() -> None:
    assert COMPOSE["networks"]["pipeline"] == {"internal": True}
    for name, service in COMPOSE["services"].items():
        if "ports" not in service:
            # Verifiers ask reward services of people's own.
            outside = {"outside"} if name == "verifier" else set()
            assert set(service["networks"]) == {"pipeline"} | outside, name


def test_secrets_are_files_whose_names_are_settings() -> None:
    for name, service in SERVICES.items():
        assert not [variable for variable in service["environment"] if re.search("PASSWORD|KEY|REDIS_URL", variable)]
        wants_redis = "trainer" not in name and name != "tinker"
        assert ("spo_redis_url" in service.get("secrets", [])) is wants_redis
    assert all(secret["file"].startswith("deploy/secrets/") for secret in COMPOSE["secrets"].values())


def test_redis_is_started_alike_everywhere(tmp_path: Path) -> None:
    local = server_command(1, tmp_path)
    options = {
        name: local[local.index(name) + 1] for name in ("--appendonly", "--appendfsync", "--hz", "--maxmemory-policy")
    }
    chart = (ROOT / "helm" / "spo" / "templates" / "redis.yaml").read_text()
    for command in (" ".join(COMPOSE["services"]["redis"]["command"]), chart):
        assert {name: found[1] for name in options if (found := re.search(rf"{name} (\S+)", command))} == options


def test_a_second_redis_on_one_volume_is_refused(tmp_path: Path) -> None:
    script = " ".join(COMPOSE["services"]["redis"]["command"]).replace("$$", "$")
    for here in ("/data", "/run/secrets", "/tmp/password.conf"):
        script = script.replace(here, str(tmp_path / here.rpartition("/")[2]))
    (tmp_path / "data").mkdir()
    (tmp_path / "valkey-server").write_text("#!/bin/sh\necho up; exec sleep 600\n")
    (tmp_path / "valkey-server").chmod(0o755)
    environment = os.environ | {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
    with subprocess.Popen(["sh", "-c", script], env=environment, stdout=subprocess.PIPE, text=True) as first:
        assert first.stdout
        assert first.stdout.readline() == "up\n"
        second = subprocess.run(
            ["sh", "-c", script], env=environment, capture_output=True, text=True, timeout=20, check=False
        )
        first.kill()
    assert (second.returncode, second.stderr.split()[0]) == (1, "state_folder_in_use:")


def test_a_secret_file_is_read_and_a_variable_goes_before_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "spo_redis_url").write_text("redis://:from-a-file@redis:6379/0\n")
    assert PlatformSettings(_secrets_dir=tmp_path).redis_url == "redis://:from-a-file@redis:6379/0"
    monkeypatch.setenv("SPO_REDIS_URL", "redis://from-a-variable:6379/0")
    assert PlatformSettings(_secrets_dir=tmp_path).redis_url == "redis://from-a-variable:6379/0"


@pytest.mark.parametrize("path", DOCKERFILES, ids=lambda path: path.name)
def test_images_are_pinned_unprivileged_and_checked(path: Path) -> None:
    text = path.read_text()
    # Every stage that an image is made of; stages to build in are called so.
    stages = [stage for stage in re.split(r"\n(?=FROM )", text)[1:] if not re.match(r"FROM \S+ AS build", stage)]
    final = "\n".join(stages)
    assert "\nUSER 10001:10001\n" in stages[-1]
    assert "LABEL" in stages[-1]
    assert "HEALTHCHECK" in final
    assert "syntax=" not in text
    installs = re.findall(r"pip install (.*)", text)
    assert installs
    own = [options for options in installs if "--require-hashes" not in options]
    # The platform's own sources, which bring nothing with them, and no sources built with what has no hash.
    assert all({"--no-deps", "--no-build-isolation"} <= set(options.split()) for options in own)
    assert all("-r constraints/hashed/" in options for options in set(installs) - set(own))
    used = set(re.findall(r"-r (constraints/hashed/\S+)", text))
    assert used <= {str(each.relative_to(ROOT)) for each in HASHED}
    if path.suffix != ".gpu":
        assert not re.search(r"\b(gcc|g\+\+|build-essential|clang)\b", final)


def pins(path: Path) -> dict[str, str]:
    """Name -> version."""
    found = re.findall(r"^([\w.-]+)==(\S+)", path.read_text(), re.MULTILINE)
    return {re.sub(r"[-_.]+", "-", name).lower(): version for name, version in found}


@pytest.mark.parametrize("path", HASHED, ids=lambda path: path.stem)
def test_every_pinned_package_has_its_hashes_and_the_version_of_the_constraints(path: Path) -> None:
    text = path.read_text()
    found = PINNED.findall(text)

    assert len(found) == len(re.findall(r"^[^ #\n]", text, re.MULTILINE)) > 0
    assert [name for name, _, hashes in found if not hashes] == []
    known = pins(ROOT / "constraints" / ("gpu.txt" if path.stem == "gpu" else "cpu.txt"))
    differ = {name: version for name, version, _ in found if known.get(name, version) != version.removesuffix("+cpu")}
    assert differ == {}


def test_the_images_hold_what_pyproject_asks_for() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = {
        "judge": ["judge", "tasks"],
        "light": ["judge", "tasks", "orchestrator", "replay", "experience"],
    }
    for image, chosen in extras.items():
        wanted = [
            *project["dependencies"],
            *(each for name in chosen for each in project["optional-dependencies"][name]),
        ]
        names = {re.split(r"[\[<>=!; ]", each)[0].lower().replace("_", "-") for each in wanted} - {"spo-platform"}
        assert names - set(pins(ROOT / "constraints" / "hashed" / f"{image}.txt")) == set()
