"""Saved adapters as sealed folders: `<root>/<model_id>/<kind>/<name>`, which clients call tinker://model_id/kind/name.

Every folder says in its manifest whose it is; to everybody else it is not there.
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from safetensors.torch import load_file, save_file
from torch import Tensor

from services.tinker.shared_model import LoraShape
from spo.disk_space import told_when_full
from spo.errors import Conflict, IntegrityError, InvalidInput, NotFound, ResourceExhausted
from spo.manifest_folder import MANIFEST, open_folder, read_manifest, remove_folder, seal_folder, staging_folder
from spo.model.adapter_folder import TENSORS_FILE, Adapter

Kind = Literal["weights", "sampler_weights"]
SCHEME = "tinker://"
MOMENTS_FILE = "optimizer.safetensors"
# Of saves for one sampling session, which nobody names.
UNNAMED = "session-"
_PATH = re.compile(r"tinker://(tnk_[0-9A-Za-z]{26}:train:\d{1,9})/(weights|sampler_weights)/([A-Za-z0-9][\w.-]{0,127})")
_NAME = re.compile(r"[A-Za-z0-9][\w.-]{0,127}")


@dataclass(frozen=True)
class CheckpointPath:
    """A client's name for a checkpoint, taken apart."""

    model_id: str
    kind: Kind
    name: str

    @classmethod
    def parse(cls, path: str) -> CheckpointPath:
        """Raises NotFound on what can be no checkpoint's."""
        found = _PATH.fullmatch(path)
        if not found:
            raise _absent(path)
        return cls(found[1], "weights" if found[2] == "weights" else "sampler_weights", found[3])

    def __str__(self) -> str:
        return f"{SCHEME}{self.model_id}/{self.kind}/{self.name}"


@dataclass(frozen=True)
class AdapterCheckpoint:
    """What a folder's manifest says of it."""

    path: CheckpointPath
    tenant: str
    shape: LoraShape
    steps: int
    created_unix_ms: int
    expires_unix_ms: int
    size_bytes: int

    @property
    def is_over(self) -> bool:
        return bool(self.expires_unix_ms) and self.expires_unix_ms < time.time() * 1000


@dataclass(frozen=True)
class SavedAdapter:
    """The tensors of a checkpoint; moments: AdamW's, where it is one to go on from."""

    checkpoint: AdapterCheckpoint
    tensors: dict[str, Tensor]
    moments: dict[str, Tensor]


@dataclass(frozen=True)
class CheckpointStore:
    """base_model: hash of the model whose adapters these are; most: checkpoints of one tenant, unnamed ones apart."""

    root: Path
    base_model: str
    most: int

    def write(self, checkpoint: AdapterCheckpoint, adapter: Adapter, saved: SavedAdapter, *, overwrite: bool) -> None:
        """Seal a checkpoint. Raises Conflict where the name is taken, ResourceExhausted
        beyond the tenant's limit and where the disk is full (code "disk_full").
        """
        destination = self._folder(checkpoint.path)
        if destination.exists() and not overwrite:
            message = f"{checkpoint.path} is there already; save with overwrite, or under another name"
            raise Conflict(message, code="tinker_name_taken")
        if not destination.exists():
            self._require_room(checkpoint)
        destination.parent.mkdir(parents=True, exist_ok=True)
        with told_when_full(self.root), staging_folder(destination) as writing:
            adapter.write(writing)
            save_file(saved.tensors, writing / TENSORS_FILE)
            if saved.moments:
                save_file(saved.moments, writing / MOMENTS_FILE)
            # A later save is of a newer epoch, so it replaces the one that is there.
            seal_folder(writing, destination, self._head(checkpoint))

    def find(self, tenant: str, path: str) -> AdapterCheckpoint:
        """Raises NotFound, whether it is another tenant's or none at all."""
        found = self._read(CheckpointPath.parse(path))
        if found is None or found.tenant != tenant or found.is_over:
            raise _absent(path)
        return found

    def load(self, tenant: str, path: str) -> SavedAdapter:
        """The verified tensors. Raises NotFound as `find`, IntegrityError on damage, InvalidInput on another base."""
        checkpoint = self.find(tenant, path)
        folder = open_folder(self._folder(checkpoint.path))
        if folder.manifest["base_model"] != self.base_model:
            raise InvalidInput(f"{path} was trained on another base model", code="tinker_model")
        moments = folder.path / MOMENTS_FILE
        return SavedAdapter(
            checkpoint, load_file(folder.path / TENSORS_FILE), load_file(moments) if moments.exists() else {}
        )

    def delete(self, tenant: str, path: str) -> None:
        """Raises NotFound as `find`."""
        remove_folder(self._folder(self.find(tenant, path).path))

    def all(self, tenant: str, model_id: str = "") -> list[AdapterCheckpoint]:
        """A tenant's, named ones only, the oldest first."""
        mine = [found for found in self._everything() if found.tenant == tenant and not _is_unnamed(found.path)]
        wanted = [found for found in mine if not found.is_over and model_id in ("", found.path.model_id)]
        return sorted(wanted, key=lambda found: found.created_unix_ms)

    def unnamed(self, model_id: str) -> list[AdapterCheckpoint]:
        """A model's saves for sampling sessions, the oldest first."""
        found = [each for each in self._everything(model_id) if _is_unnamed(each.path)]
        return sorted(found, key=lambda each: each.created_unix_ms)

    def remove(self, checkpoint: AdapterCheckpoint) -> None:
        """Take it away, whoever's it is."""
        remove_folder(self._folder(checkpoint.path))

    def sweep(self) -> None:
        """Remove what has expired."""
        for found in self._everything():
            if found.is_over:
                self.remove(found)

    def forget_unnamed(self) -> None:
        """Remove all saves for sampling sessions: no session has outlived the process that served it."""
        for found in self._everything():
            if _is_unnamed(found.path):
                self.remove(found)

    def _everything(self, model_id: str = "*") -> Iterator[AdapterCheckpoint]:
        for manifest in self.root.glob(f"{model_id}/*/*/{MANIFEST}") if self.root.is_dir() else ():
            model, kind, name = manifest.parts[-4:-1]
            if _PATH.fullmatch(f"{SCHEME}{model}/{kind}/{name}"):
                found = self._read(CheckpointPath.parse(f"{SCHEME}{model}/{kind}/{name}"))
                if found:
                    yield found

    def _read(self, path: CheckpointPath) -> AdapterCheckpoint | None:
        file = self._folder(path) / MANIFEST
        try:
            head = read_manifest(file)
            return AdapterCheckpoint(
                path=path,
                tenant=str(head["tenant"]),
                shape=LoraShape(**head["shape"]),
                steps=int(head["steps"]),
                created_unix_ms=int(head["created_unix_ms"]),
                expires_unix_ms=int(head["expires_unix_ms"]),
                size_bytes=sum(int(entry["size_bytes"]) for entry in head["files"]),
            )
        except (IntegrityError, KeyError, TypeError, ValueError):
            # A folder without a readable manifest is nobody's.
            return None

    def _head(self, checkpoint: AdapterCheckpoint) -> dict[str, Any]:
        return {
            "epoch": checkpoint.created_unix_ms,
            "tenant": checkpoint.tenant,
            "base_model": self.base_model,
            "shape": checkpoint.shape.document(),
            "steps": checkpoint.steps,
            "created_unix_ms": checkpoint.created_unix_ms,
            "expires_unix_ms": checkpoint.expires_unix_ms,
        }

    def _require_room(self, checkpoint: AdapterCheckpoint) -> None:
        if not _is_unnamed(checkpoint.path) and len(self.all(checkpoint.tenant)) >= self.most:
            message = f"{self.most} checkpoints of yours are kept; delete some"
            raise ResourceExhausted(message, code="tinker_limit")

    def _folder(self, path: CheckpointPath) -> Path:
        return self.root / path.model_id / path.kind / path.name


def checked_name(name: str) -> str:
    """A client's name for a checkpoint. Raises InvalidInput unless it is a plain one."""
    if not _NAME.fullmatch(name) or name.startswith(UNNAMED):
        message = f"a checkpoint is named by letters, digits, _, . and -, and not {UNNAMED}...: {name[:140]!r} is not"
        raise InvalidInput(message, code="tinker_name")
    return name


def _is_unnamed(path: CheckpointPath) -> bool:
    return path.kind == "sampler_weights" and path.name.startswith(UNNAMED)


def _absent(path: str) -> NotFound:
    return NotFound(f"there is no checkpoint {path[:300]}", code="tinker_not_found")
