"""`make images-test`: builds the images on an engine and looks at each of them from inside, confined as a pod is.

Standard library only, since it runs wherever an engine does. ENGINE names it (docker, podman, or a path); IMAGES the
images (default "judge light", which are built within minutes; torch, cpu and gpu too); BUILD=no takes images that are
there; BUILD_OPTIONS goes to `build`. Each image: its user and process 1, each command of `spo` and each module of its
roles starts and no other role is there, its packages are the hashed pins of constraints/hashed, nothing lies in it that
should not, and `spo doctor` says the judge's tier.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
COMMAND_SECONDS = 3600
# Image -> Dockerfile, and its roles.
IMAGES = {
    "judge": ("light", ("sandbox_judge",)),
    "light": ("light", ("agent_runner", "orchestrator", "replay_buffer", "sandbox_judge", "verifier")),
    "torch": ("torch", ("tinker", "trainer", "value_estimation")),
    "cpu": ("cpu", ("inference", "tinker", "trainer", "value_estimation")),
    "gpu": ("gpu", ("inference", "tinker", "trainer", "value_estimation")),
}
# As the chart's containers are: user, root, capabilities, the runtime's own seccomp profile. And no network.
CONFINED = (
    "--rm --network none --read-only --tmpfs /tmp --user 10001:10001 --cap-drop ALL --security-opt no-new-privileges"
)
# Paths that no layer should leave in an image: name -> pattern.
UNWANTED = {
    "a secret": r"(^/run/secrets/.)|/(id_rsa|\.netrc|\.env|\.pypirc)$|/(redis_password|spo_\w+_(key|token|secret))$",
    "a cache": r"^(/root/\.cache/.|/var/cache/apt/archives/.*\.deb$|/var/lib/apt/lists/.*_Packages)"
    r"|/\.(mypy|ruff|pytest)_cache/",
    "the tests of ours": r"^/(app|source)/tests/|/site-packages/tests/",
    "a compiler": r"/bin/(gcc|g\+\+|cc|c\+\+|clang|cc1)(-\d+)?$",
    "a package manager of Python": r"/site-packages/(pip|uv)/__init__\.py$",
}
# Run in the image, with the roles' names.
STARTS = Path(__file__).with_name("image_starts.py")
LOOK = """
import importlib, json, os, re, sys
from importlib import metadata

faults = {}
for role in sys.argv[1].split(","):
    try:
        importlib.import_module(f"services.{role}.__main__")
    except Exception as error:
        faults[role] = repr(error)
import services

here = os.path.dirname(services.__file__)
folders = [name for name in os.listdir(here) if os.path.isfile(f"{here}/{name}/__main__.py")]
packages = {re.sub(r"[-_.]+", "-", each.metadata["Name"]).lower(): each.version for each in metadata.distributions()}
init = open("/proc/1/comm").read().strip()
print(json.dumps({"uid": os.getuid(), "init": init, "faults": faults, "roles": folders, "packages": packages}))
"""


def pins(text: str) -> dict[str, str]:
    """Name -> version of a list of hashed requirements."""
    found = re.findall(r"^([\w.-]+)==([^\s;\\]+)", text, re.MULTILINE)
    return {re.sub(r"[-_.]+", "-", name).lower(): version for name, version in found}


def unpinned(packages: dict[str, str], pinned: dict[str, str]) -> list[str]:
    """What is installed at another version than its pin, or without one; the platform itself has none."""
    return sorted(
        f"{name} {version} (pinned: {pinned.get(name, 'not')})"
        for name, version in packages.items()
        if name != "spo-platform" and pinned.get(name) != version
    )


def unwanted(paths: list[str], *, compiler: bool) -> list[str]:
    """Paths that should not be in an image, each with what it is; compiler: this image may have one."""
    return [
        f"{what}: {path}"
        for path in paths
        for what, pattern in UNWANTED.items()
        if re.search(pattern, path) and not (compiler and what == "a compiler")
    ]


def tier_of(rows: list[dict[str, Any]]) -> str:
    """The judge's tier by the findings of `spo doctor -o json`; "" where it found none."""
    found = [re.match(r"the judge runs programs under (\S+)", str(row["what"])) for row in rows]
    return next((each[1] for each in found if each), "")


def skip(why: str) -> None:
    """Say loudly that nothing was tested, and end."""
    print("*" * 78, f"images-test SKIPPED: {why}. The images were NOT tested.", "*" * 78, sep="\n", file=sys.stderr)
    raise SystemExit(0)


class Engine:
    """A container engine's command line."""

    def __init__(self, command: str) -> None:
        self.command = shlex.split(command)
        if shutil.which(self.command[0]) is None:
            skip(f"there is no {self.command[0]} command")
        if subprocess.run([*self.command, "info"], capture_output=True, timeout=60, check=False).returncode:
            skip(f"no engine answers to {command}")

    def ask(self, *arguments: str, ends: tuple[int, ...] = (0,)) -> str:
        """Its standard output. Exits with its last words when it ends otherwise than by `ends`."""
        asked = [*self.command, *arguments]
        done = subprocess.run(asked, capture_output=True, text=True, timeout=COMMAND_SECONDS, check=False)
        if done.returncode not in ends:
            raise SystemExit(f"{' '.join(arguments[:3])} ended with {done.returncode}: {done.stderr.strip()[-800:]}")
        return done.stdout


def built(engine: Engine, image: str) -> str:
    """The image's tag, after its build."""
    dockerfile, _ = IMAGES[image]
    tag = f"spo-{image}:{os.environ.get('VERSION', '0.1.0')}"
    if os.environ.get("BUILD", "yes") != "no":
        options = shlex.split(os.environ.get("BUILD_OPTIONS", ""))
        target = ["--target", image] if dockerfile == "light" else []
        recipe = str(ROOT / "deploy" / f"Dockerfile.{dockerfile}")
        engine.ask("build", *options, "-f", recipe, *target, "-t", tag, str(ROOT))
    return tag


def looked_at(engine: Engine, image: str) -> list[str]:
    """What is wrong with an image."""
    tag, (dockerfile, roles), faults = built(engine, image), IMAGES[image], []
    configured = json.loads(engine.ask("image", "inspect", tag))[0]["Config"]
    if configured["User"] != "10001:10001" or configured["Entrypoint"][:2] != ["tini", "--"]:
        faults.append(f"user {configured['User']}, entrypoint {configured['Entrypoint']}")
    confined = ["run", *CONFINED.split()]
    inside = ["--entrypoint", "tini", tag, "--", "python", "-c", LOOK, ",".join(roles)]
    look = json.loads(engine.ask(*confined, *inside))
    faults += [f"role {role}: {error}" for role, error in look["faults"].items()]
    if dockerfile in ("light", "torch") and sorted(look["roles"]) != sorted(roles):
        faults.append(f"roles {sorted(look['roles'])} instead of {sorted(roles)}")
    if (look["uid"], look["init"]) != (10001, "tini"):
        faults.append(f"runs as {look['uid']} under {look['init']}")
    listed = (ROOT / "constraints" / "hashed" / f"{image}.txt").read_text()
    faults += [f"package {each}" for each in unpinned(look["packages"], pins(listed))]
    starts = ["--entrypoint", "tini", tag, "--", "python", "-c", STARTS.read_text(), *roles]
    # The last line: libraries may say something of their own.
    started = json.loads(engine.ask(*confined, *starts).splitlines()[-1])
    faults += [f"{what}: {why}" for what, why in started["faults"].items()]
    # As root, so that it sees all.
    seeing = ["run", "--rm", "--network", "none", "--user", "0", "--entrypoint", "find"]
    files = engine.ask(*seeing, tag, "/", "-xdev", "-type", "f", "-size", "+0")
    faults += unwanted(files.splitlines(), compiler=image == "gpu")
    answer = engine.ask(*confined, tag, "spo.cli", "doctor", "-o", "json", ends=(0, 1))
    try:
        tier = tier_of(json.loads(answer))
    except ValueError:
        return [*faults, "`spo doctor` does not answer"]
    counted = f"{len(look['packages'])} packages, {started['commands']} commands, {', '.join(roles)}"
    print(f"spo-{image}: {counted}; tier {tier or 'none'}", flush=True)
    return faults + (["the judge finds no isolation"] if image == "judge" and not tier else [])


def main() -> int:
    """Look at each image; 1 when any has a fault."""
    engine, failed = Engine(os.environ.get("ENGINE") or "docker"), 0
    for image in (os.environ.get("IMAGES") or "judge light").split():
        began = time.monotonic()
        faults = looked_at(engine, image)
        print("\n".join([f"spo-{image}: {len(faults)} faults, {time.monotonic() - began:.0f} s", *faults]), flush=True)
        failed += bool(faults)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
