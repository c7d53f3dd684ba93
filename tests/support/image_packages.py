"""An interpreter that sees what an image holds: other packages than its hashed pins, and other roles, are hidden.

The pins are those of constraints/hashed, what is taken out again that of deploy/slim_venv.sh or of the Dockerfile, the
roles those of the Dockerfile; hidden are modules and distributions alike, in child processes too.
"""

from __future__ import annotations

import functools
import json
import os
import re
from importlib import metadata
from pathlib import Path

ROOT = Path(__file__).parents[2]
SLIM = ROOT / "deploy" / "slim_venv.sh"
# Image -> Dockerfile and the stage that copies the sources.
STAGES = {
    "judge": ("light", "build-judge"),
    "light": ("light", "build-light"),
    "torch": ("torch", "sources"),
    "cpu": ("cpu", "sources"),
    "gpu": ("gpu", "sources"),
}
# Imported by each interpreter at its start.
HIDING = """
import json, os, pathlib, re, sys

known = json.loads(pathlib.Path(__file__).with_name("hidden.json").read_text())
modules, distributions = frozenset(known["modules"]), frozenset(known["distributions"])

class Hiding:
    def __init__(self, finder):
        self.finder = finder
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in modules or ".".join(name.split(".")[:2]) in modules:
            return None
        return self.finder.find_spec(name, path, target)
    def find_distributions(self, *arguments):
        for each in getattr(self.finder, "find_distributions", lambda *_: ())(*arguments):
            if re.sub(r"[-_.]+", "-", each.metadata["Name"]).lower() not in distributions:
                yield each
    def __getattr__(self, name):
        return getattr(self.finder, name)

sys.meta_path[:] = [Hiding(each) for each in sys.meta_path]
"""


def canonical(name: str) -> str:
    """A distribution's name as the package index writes it."""
    return re.sub(r"[-_.]+", "-", name).lower()


def pinned(image: str) -> set[str]:
    """Distributions of an image: its hashed pins without what its build takes out again."""
    folder = ROOT / "constraints" / "hashed"
    found = set(re.findall(r"^([\w.-]+)==", (folder / f"{image}.txt").read_text(), re.MULTILINE))
    dockerfile = STAGES[image][0]
    taken_out = SLIM if dockerfile == "light" else ROOT / "deploy" / f"Dockerfile.{dockerfile}"
    for line in re.findall(r"pip uninstall --quiet --yes ([\w -]+)", taken_out.read_text()):
        found -= set(line.split())
    return {canonical(name) for name in found}


def roles(image: str) -> set[str]:
    """The folders of services/ that an image holds."""
    dockerfile, stage = STAGES[image]
    text = (ROOT / "deploy" / f"Dockerfile.{dockerfile}").read_text()
    block = re.split(r"\nFROM ", text.partition(f" AS {stage}\n")[2])[0]
    copied = re.findall(r"^COPY (services\S*) ", block, re.MULTILINE)
    everything = {path.parent.name for path in (ROOT / "services").glob("*/__main__.py")}
    return everything if "services" in copied else {name.partition("/")[2] for name in copied} & everything


@functools.cache
def installed() -> dict[str, list[str]]:
    """Top-level module -> distributions here that bring it."""
    return {module: [canonical(name) for name in names] for module, names in metadata.packages_distributions().items()}


def hidden_modules(image: str) -> list[str]:
    """Top-level modules and roles that are here and not in the image."""
    pins = pinned(image) | {"spo-platform"}
    packages = [module for module, names in installed().items() if not pins & set(names)]
    everything = {path.parent.name for path in (ROOT / "services").glob("*/__main__.py")}
    return sorted([*packages, *(f"services.{role}" for role in everything - roles(image))])


def environment_of(image: str, folder: Path) -> dict[str, str]:
    """The environment under which an interpreter and its children see what the image has; writes below folder."""
    site = folder / f"site-{image}"
    site.mkdir()
    (site / "sitecustomize.py").write_text(HIDING)
    hidden = hidden_modules(image)
    if STAGES[image][0] == "light":
        # The script leaves empty modules of drawing in their place.
        hidden = [module for module in hidden if module not in ("matplotlib", "mpl_toolkits")]
        (site / "matplotlib").mkdir()
        (site / "mpl_toolkits").mkdir()
        for name in ("__init__", "animation", "collections", "pyplot"):
            (site / "matplotlib" / f"{name}.py").touch()
        (site / "mpl_toolkits" / "mplot3d.py").write_text("Axes3D = None\n")
    pins = pinned(image) | {"spo-platform"}
    away = sorted({name for names in installed().values() for name in names} - pins)
    (site / "hidden.json").write_text(json.dumps({"modules": hidden, "distributions": away}))
    kept = {name: value for name, value in os.environ.items() if not name.startswith("SPO_")}
    return kept | {"PYTHONPATH": f"{site}{os.pathsep}{ROOT}", "HOME": str(folder), "HF_HUB_OFFLINE": "1"}
