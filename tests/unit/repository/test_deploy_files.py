"""Compose file and images: only known settings, one open door, no secret in a variable, nothing runs as root."""

from __future__ import annotations

import copy
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tomllib
import zipfile
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

# What docker-compose 1.29 with Docker Engine 20.10 takes (Debian 12's; its schema refuses every other key), of the keys
# that a file like ours may want: place -> keys. `*` is any name, `#` any entry of a list.
OLDEST = {
    "": "services networks volumes secrets",
    "services.*": "image build command entrypoint environment env_file restart init read_only tmpfs cap_drop cap_add "
    "security_opt networks stop_grace_period logging profiles user volumes secrets healthcheck deploy depends_on ports "
    "shm_size cpus mem_limit pids_limit labels",
    "services.*.build": "context dockerfile target args labels network shm_size cache_from",
    "services.*.healthcheck": "test interval timeout retries start_period disable",
    "services.*.logging": "driver options",
    "services.*.deploy": "resources replicas labels restart_policy",
    "services.*.deploy.resources": "limits reservations",
    "services.*.deploy.resources.limits": "cpus memory",
    "services.*.deploy.resources.reservations": "cpus memory devices",
    "services.*.deploy.resources.reservations.devices.#": "driver count capabilities device_ids options",
    "services.*.networks.*": "aliases ipv4_address ipv6_address",
    "services.*.depends_on.*": "condition",
    "networks.*": "internal driver driver_opts external name labels",
    "volumes.*": "driver driver_opts external name labels",
    "secrets.*": "file external name labels",
}


def newer_keys(document: Any, place: str = "") -> list[str]:
    """The places of a compose file that the oldest engine's schema does not know."""
    if isinstance(document, list):
        return [found for each in document for found in newer_keys(each, f"{place}.#")]
    if not isinstance(document, dict):
        return []
    here = OLDEST.get(place)
    # Names of ours, one level above what has keys; and values that take any key (variables, options).
    named = f"{place}.*".removeprefix(".")
    known = None if here is None else set(here.split())
    found = [
        f"{place}.{key}" for key in document if known is not None and key not in known and not key.startswith("x-")
    ]
    for key, value in document.items():
        found += newer_keys(value, named if here is None and named in OLDEST else f"{place}.{key}".removeprefix("."))
    return found


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
    limits = service.get("deploy", {}).get("resources", {}).get("limits", {})
    assert ("memory" in limits) is not ("mem_limit" in service)
    # Compose v2 refuses the file where a limit is beside those of `deploy`.
    assert not (limits and {"cpus", "mem_limit", "pids_limit"} & set(service))
    assert service["healthcheck"]["test"][-1] == "127.0.0.1:7070"
    assert all(needed["condition"] == "service_healthy" for needed in service["depends_on"].values())


@pytest.mark.parametrize("name", SERVICES)
def test_docker_waits_longer_for_a_service_than_it_drains(name: str) -> None:
    drain = settings_of(name).model_fields["drain_seconds"]
    seconds = float(SERVICES[name]["environment"].get(str(drain.validation_alias), drain.default))
    assert seconds >= (600 if "trainer" in name else 20)
    assert int(SERVICES[name]["stop_grace_period"].removesuffix("s")) >= seconds + 15


def test_the_oldest_engine_knows_every_key_of_the_file() -> None:
    assert newer_keys({key: value for key, value in COMPOSE.items() if not key.startswith("x-")}) == []


@pytest.mark.parametrize(
    ("service", "newer"),
    [
        ({"healthcheck": {"start_interval": "5s"}}, "services.*.healthcheck.start_interval"),
        ({"deploy": {"resources": {"limits": {"pids": 9}}}}, "services.*.deploy.resources.limits.pids"),
        ({"depends_on": {"redis": {"condition": "a", "required": False}}}, "services.*.depends_on.*.required"),
        ({"develop": {"watch": []}}, "services.*.develop"),
        ({"build": {"context": ".", "tags": ["a"]}}, "services.*.build.tags"),
        ({"attach": False}, "services.*.attach"),
        ({"deploy": {"resources": {"reservations": {"devices": [{"driver": "cdi", "cdi": 1}]}}}},
         "services.*.deploy.resources.reservations.devices.#.cdi"),
        ({"networks": {"pipeline": {"gw_priority": 1}}}, "services.*.networks.*.gw_priority"),
    ],
)  # fmt: skip
def test_a_key_that_came_later_is_found(service: Any, newer: str) -> None:
    document = copy.deepcopy({key: COMPOSE[key] for key in ("services", "networks", "volumes", "secrets")})
    document["services"]["redis"] |= service
    assert newer_keys(document) == [newer]
    assert newer_keys({"name": "spo"} | COMPOSE)[0] == ".name"


@pytest.mark.parametrize("name", SERVICES)
def test_process_1_of_a_container_is_one_init(name: str) -> None:
    build = SERVICES[name]["build"]
    inits = re.findall(r'^ENTRYPOINT \["tini"', (ROOT / build["dockerfile"]).read_text(), re.MULTILINE)
    assert len(inits) + bool(SERVICES[name].get("init")) == 1


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
            # Runners of agents reach the orchestrator and nothing else.
            inside = {"agents"} if name == "agent-runner" else {"pipeline"}
            assert set(service["networks"]) == inside | outside, name
    agents = [name for name, service in COMPOSE["services"].items() if "agents" in service.get("networks", [])]
    assert (COMPOSE["networks"]["agents"], agents) == ({"internal": True}, ["orchestrator", "agent-runner"])


def test_secrets_are_files_whose_names_are_settings() -> None:
    for name, service in SERVICES.items():
        assert not [variable for variable in service["environment"] if re.search("PASSWORD|KEY|REDIS_URL", variable)]
        wants_redis = "trainer" not in name and name not in ("tinker", "agent-runner")
        assert ("spo_redis_url" in service.get("secrets", [])) is wants_redis
        # As in the chart: who has no token of the platform gets nothing by gRPC.
        # Beside agents there is neither that nor the platform's own key.
        token = {"spo_agent_runner_api_key"} if name == "agent-runner" else {"spo_rpc_token"}
        assert token <= set(service["secrets"])
        assert name != "agent-runner" or token == set(service["secrets"])
    assert all(
        each["file"] == f"${{SPO_SECRETS_PATH:-deploy/secrets}}/{name}" for name, each in COMPOSE["secrets"].items()
    )


def test_the_secrets_that_compose_mounts_are_made_once_and_differ(tmp_path: Path) -> None:
    (tmp_path / "deploy").mkdir()
    shutil.copy(ROOT / "deploy" / "make_secrets.sh", tmp_path / "deploy")

    def made(folder: Path = tmp_path / "deploy" / "secrets", **variables: str) -> dict[str, str]:
        command, environment = [tmp_path / "deploy" / "make_secrets.sh"], os.environ | variables
        subprocess.run(command, check=True, capture_output=True, timeout=60, env=environment)
        # But for a key that the platform itself makes.
        return {name: (folder / name).read_text() for name in COMPOSE["secrets"] if name != "spo_agent_runner_api_key"}

    first = made()
    assert (tmp_path / ".env").read_text() == "COMPOSE_PROJECT_NAME=spo\n"
    (tmp_path / ".env").write_text("SPO_HTTP_PORT=1\nCOMPOSE_PROJECT_NAME=other\n")
    (tmp_path / "deploy" / "secrets" / "spo_rpc_token").unlink()
    again = made()

    assert len(set(first.values())) == len(first)
    assert min(map(len, first.values())) >= 48
    # An installation of before gets what has come since and keeps the rest.
    assert {name for name in first if first[name] != again[name]} == {"spo_rpc_token"}
    assert (tmp_path / ".env").read_text() == "SPO_HTTP_PORT=1\nCOMPOSE_PROJECT_NAME=other\n"
    settings = PlatformSettings(_secrets_dir=tmp_path / "deploy" / "secrets")
    assert settings.rpc_token.get_secret_value() == again["spo_rpc_token"]
    assert settings.redis_url == f"redis://:{again['redis_password']}@redis:6379/0"
    # A second platform of this checkout shares none of them.
    other = made(tmp_path / "other", SPO_SECRETS_PATH=str(tmp_path / "other"))
    assert not set(other.values()) & {*first.values(), *again.values()}


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
    # First a pip that knows hashed requirements with extras: bases bring 23.0.
    assert "-r constraints/hashed/build.txt" in installs[0]
    assert int(pins(ROOT / "constraints" / "hashed" / "build.txt")["pip"].split(".")[0]) > 23
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


def test_uv_installs_with_what_pip_is_told_and_pip_itself_where_uv_fails(tmp_path: Path) -> None:
    environment, tools, target = tmp_path / "environment", tmp_path / "tools", tmp_path / "target"
    # With the pip of the interpreter that made this test's environment.
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", environment], check=True, timeout=60)
    installed = sysconfig.get_path("purelib")
    tools.mkdir()
    uv = tools / "uv"
    uv.write_text('#!/bin/sh\nenv > "$0.told"; echo "$@" >> "$0.told"; exit 1\n')
    uv.chmod(0o755)
    wheel = tmp_path / "tiny-1.0-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("tiny.py", "")
        archive.writestr("tiny-1.0.dist-info/METADATA", "Metadata-Version: 2.1\nName: tiny\nVersion: 1.0\n")
        archive.writestr("tiny-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr("tiny-1.0.dist-info/RECORD", "")
    told = {
        "PATH": f"{tools}:{os.environ['PATH']}",
        "PYTHONPATH": installed,
        "PIP_CONFIG_FILE": os.devnull,
        "PIP_DISABLE_PIP_VERSION_CHECK": "1",
        "PIP_FIND_LINKS": "/one /two",
        "PIP_INDEX_URL": "http://index.invalid/simple",
        "PIP_EXTRA_INDEX_URL": "http://more.invalid/simple",
    }
    command = ["bash", ROOT / "scripts/install.sh", environment / "bin/python", "--no-deps", "--target", target, wheel]

    subprocess.run(command, env=told, check=True, timeout=120, capture_output=True)

    assert (target / "tiny.py").exists()
    words = Path(f"{uv}.told").read_text().splitlines()
    assert {
        "UV_FIND_LINKS=/one,/two",
        "UV_DEFAULT_INDEX=http://index.invalid/simple",
        "UV_EXTRA_INDEX_URL=http://more.invalid/simple",
    } <= set(words)
    assert not (environment / ".uv").exists()
