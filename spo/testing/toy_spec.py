"""Specs of the toy contest's size: what a document leaves out fits a model of 128 positions and 261,000 parameters."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from spo.spec.job_spec import PAPER_BETA, JobSpec, parse_job_spec

TOY: Mapping[str, Mapping[str, Any]] = {
    "model": {"dtype": "float32", "max_prompt_tokens": 64, "max_response_tokens": 44},
    "algorithm": {"beta": PAPER_BETA},
    "value": {"samples": 128, "unsolved": "keep"},
    "rollout": {"temperature": (0.1, 0.8), "top_p": 0.95},
    "replay": {
        "mix": (
            {"source": "online", "share": 0.5},
            {"source": "reference", "share": 0.25, "correct_only": True},
            {"source": "human", "share": 0.25},
        )
    },
    "trainer": {
        "steps": 100,
        "batch_size": 64,
        "micro_batch_size": 64,
        "learning_rate": 4e-4,
        "adam_betas": (0.9, 0.98),
    },
}


def toy_document(document: Mapping[str, Any]) -> dict[str, Any]:
    """The document with the toy's numbers where its sections, or members of them, are missing."""
    filled = dict(document)
    for name, section in TOY.items():
        own = document.get(name, {})
        filled[name] = {**section, **own} if isinstance(own, Mapping) else own
    return filled


def toy_spec(document: Mapping[str, Any]) -> JobSpec:
    """The spec of such a document. Raises InvalidInput (code "invalid_job_spec")."""
    return parse_job_spec(toy_document(document))


def distilled(document: Mapping[str, Any], teacher: Path) -> dict[str, Any]:
    """The document of a job that a model in another folder teaches, on its own samples alone."""
    return {
        **document,
        "algorithm": {"losses": [{"objective": "distillation"}], "teacher": {"path": str(teacher)}},
        "rollout": {"temperature": 1.0, "top_p": 1.0},
        "offline": {"human_solutions": False, "keep_reference_samples": False},
        "replay": {"mix": [{"source": "online", "share": 1.0}]},
        "value": None,
    }
