"""A rank's part of a checkpoint is a safetensors file like any other, though it is written tensor by tensor."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import load_file

from services.trainer.checkpoints import write_tensors


def test_what_was_written_is_read_whatever_its_width_and_shape(tmp_path: Path) -> None:
    tensors = {
        "random": torch.arange(13, dtype=torch.uint8),
        "step": torch.tensor(7.0),
        "master": torch.randn(5, 3).t(),
        "weights": torch.randn(7).to(torch.bfloat16),
        "count": torch.tensor([3]),
        "none": torch.empty(0),
    }

    write_tensors(tmp_path / "part.safetensors", tensors)
    found = load_file(tmp_path / "part.safetensors")

    assert found.keys() == tensors.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in tensors.items())
