"""docs/kubernetes.md as it stands: its commands, one after the other, by Helm's engine and the emulated cluster."""

from __future__ import annotations

import asyncio
import re
import runpy
import shlex
from pathlib import Path
from typing import Any

import helm_sdkpy
import pytest
import yaml
from api_server import serve
from cluster import Cluster
from conftest import CHART, NEWEST, Helm, merged

ROOT = CHART.parents[1]
TEXT = (ROOT / "docs" / "kubernetes.md").read_text()
BLOCK = re.compile(r"^```(?P<how>sh|console)\n(?P<body>.*?)^```", re.M | re.S)
KINDS = {"secret": "Secret", "service": "Service", "deployment": "Deployment", "job": "Job", "pod": "Pod"}


def commands() -> list[list[str]]:
    """The words of every command that is not marked as one that cannot run here."""
    blocks = [match["body"] for match in BLOCK.finditer(TEXT) if match["how"] == "sh"]
    return [shlex.split(line, comments=True) for block in blocks for line in block.splitlines()]


def test_what_is_not_run_says_why() -> None:
    for match in BLOCK.finditer(TEXT):
        if match["how"] == "console":
            before = TEXT[: match.start()].rstrip().rsplit("\n\n", 1)[-1]
            marks = ("*Not run here: ", "*Run on a node, not by the test: ")
            assert before.startswith(marks) or "without a registry" in before, match["body"]


def digests() -> dict[str, Any]:
    """The values file that `make images` writes, from an answer of buildx as it documents it."""
    image_values = runpy.run_path(str(ROOT / "scripts" / "image_values.py"))["image_values"]
    metadata = {
        name: {"containerimage.digest": f"sha256:{number:064x}"}
        for number, name in enumerate(("light", "judge", "cpu"))
    }
    return dict(yaml.safe_load(image_values(metadata, "registry.example.org/spo/", "0.1.0", "cpu")))


class Story:
    """A person at a terminal: one release, and what was said of it so far."""

    def __init__(self, helm: Helm) -> None:
        self.helm = helm
        self.values: dict[str, Any] = {}
        self.done: list[str] = []
        self.revisions: list[dict[str, Any]] = []

    def run(self, words: list[str]) -> None:
        program = next(word for word in words if "=" not in word or word.startswith("-"))
        {"helm": self.run_helm, "kubectl": self.kubectl, "export": self.export, "sed": self.sed}.get(
            program, self.elsewhere
        )(words)

    def elsewhere(self, words: list[str]) -> None:
        # Parsed by the command line itself, in tests/unit/cli.
        assert words[0] == "spo", words

    def sed(self, words: list[str]) -> None:
        _, expression, recipe, arrow, _ = words
        assert (arrow, expression[:3]) == (">", "s|^")
        text = (ROOT / recipe).read_text()
        _, found, replacement, _ = expression.split("|")
        job = yaml.safe_load(re.sub(found, replacement.replace("\\n", "\n"), text, flags=re.M))
        assert job["model"]["path"] == "/models/toy"

    def export(self, words: list[str]) -> None:
        if "kubectl" in words[1]:
            inner = words[1:]
            inner[0] = "kubectl"
            self.kubectl(inner)

    def run_helm(self, words: list[str]) -> None:
        action, *rest = words[1:]
        self.done.append(action)
        files = [rest[at + 1] for at, word in enumerate(rest) if word == "-f"]
        sets = [rest[at + 1] for at, word in enumerate(rest) if word == "--set"]
        match action:
            case "install" | "upgrade":
                assert rest[:2] == ["spo", "helm/spo"]
                said: dict[str, Any] = {}
                for file in files:
                    said = merged(
                        said, digests() if file.startswith("build/") else yaml.safe_load((ROOT / file).read_text())
                    )
                for each in sets:
                    said = with_setting(said, each)
                self.values = merged(self.values, said)
                self.revisions.append(self.values)
                (self.helm.install if action == "install" else self.helm.upgrade)(self.values)
            case "test":
                self.helm.test()
            case "package":
                assert rest == ["helm/spo"]
                configuration = self.helm._configuration()
                made = asyncio.run(helm_sdkpy.Package(configuration).run(str(CHART), str(self.tmp_path)))
                assert "spo-0.1.0.tgz" in str(made)
            case "rollback":
                # The package's Rollback cannot say how to wait, without which Helm 4 refuses: an upgrade to old values.
                self.helm.upgrade(self.revisions[int(rest[1]) - 1])
            case "uninstall":
                self.helm.uninstall()
            case _:
                raise AssertionError(f"nobody runs helm {action}")

    tmp_path: Path

    def kubectl(self, words: list[str]) -> None:
        assert words[1:3] == ["-n", "spo"], "a command that forgets the namespace"
        verb, *rest = words[3:]
        self.done.append(verb)
        if verb == "create":
            return
        named = next((word for word in rest if "/" in word and word.split("/")[0] in KINDS), "")
        if named:
            kind, name = named.split("/")
            assert name in self.helm.cluster.of_kind(KINDS[kind]), named
        elif "-l" in rest:
            kind = KINDS[next(word for word in rest if word in KINDS)]
            key, _, value = rest[rest.index("-l") + 1].partition("=")
            assert any(value == labels.get(key) for labels in self.labels_of(kind)), words
        else:
            kind, name = rest[0], rest[1]
            held = self.helm.cluster.of_kind(KINDS[kind])[name]
            if path := next((word for word in rest if word.startswith("jsonpath=")), ""):
                assert re.search(r"\.data\.([a-z-]+)", path)[1] in held["data"]  # type: ignore[index]

    def labels_of(self, kind: str) -> list[dict[str, str]]:
        objects = self.helm.cluster.objects.values()
        if kind == "Pod":
            templates = [each["spec"].get("template") for each in objects if isinstance(each.get("spec"), dict)]
            return [each["metadata"]["labels"] for each in templates if each]
        return [each["metadata"].get("labels", {}) for each in objects if each["kind"] == kind]


def with_setting(values: dict[str, Any], setting: str) -> dict[str, Any]:
    """The values with a --set of one path, of which any part may be the first of a list."""
    path, _, text = setting.partition("=")
    value: Any = yaml.safe_load(text)
    for part in reversed(path.split(".")):
        name, _, index = part.partition("[")
        value = {name: [value]} if index else {name: value}
    return joined(values, value)


def joined(under: Any, over: Any) -> Any:
    if isinstance(under, dict) and isinstance(over, dict):
        return {name: joined(under.get(name), over.get(name, under.get(name))) for name in {**under, **over}}
    if isinstance(under, list) and isinstance(over, list):
        return [joined(under[0], over[0])]
    return over


@pytest.mark.skipif(not commands(), reason="the document has no commands")
def test_the_story_runs_from_its_own_text(tmp_path: Path) -> None:
    cluster = Cluster(NEWEST)
    with serve(cluster) as kubeconfig:
        story = Story(Helm(cluster, kubeconfig))
        story.tmp_path = tmp_path
        for words in commands():
            story.run(words)
    assert story.done[:3] == ["package", "install", "wait"]
    assert {"install", "upgrade", "test", "rollback", "uninstall", "scale", "port-forward"} <= set(story.done)
    assert not cluster.of_kind("Deployment")
