"""Device memory of the trainer: told to torch before it is there, and left alone where someone else told it."""

from __future__ import annotations

import subprocess
import sys

import pytest

from services.trainer.settings import keep_memory_whole


@pytest.mark.parametrize(
    ("told", "found"),
    [
        ({}, {"PYTORCH_ALLOC_CONF": "expandable_segments:True"}),
        ({"PYTORCH_ALLOC_CONF": "backend:native"}, {"PYTORCH_ALLOC_CONF": "backend:native"}),
        ({"PYTORCH_CUDA_ALLOC_CONF": "backend:native"}, {"PYTORCH_CUDA_ALLOC_CONF": "backend:native"}),
    ],
)
def test_segments_grow_unless_the_allocator_is_told_otherwise(told: dict[str, str], found: dict[str, str]) -> None:
    keep_memory_whole(told)
    assert told == found


def test_the_trainers_first_module_comes_without_torch_so_that_the_allocator_can_still_be_told() -> None:
    code = "import sys, services.trainer.__main__; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout.strip() == "False"
