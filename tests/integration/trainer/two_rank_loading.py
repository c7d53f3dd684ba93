"""Run by torchrun on two ranks: a policy and its reference at ZeRO stage 3, their memory and log-probs.

two_rank_loading.py MODEL OTHER-WEIGHTS FOLDER
"""

from __future__ import annotations

import json
import sys
import threading
import time
from pathlib import Path

import torch
from safetensors.torch import save_file

from services.trainer.deepspeed_engine import leave_deepspeed, prepare_deepspeed, take_weights
from services.trainer.learner import Policy, load_model
from services.trainer.ranks import join_ranks
from spo.model.logprobs import token_logprobs
from spo.spec.job_spec import parse_job_spec

TOKENS_BL = torch.arange(4, 28).reshape(2, 12)


def resident_bytes(kind: str) -> int:
    """VmRSS: all pages of the process, mapped files among them; RssAnon: without those."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * int(next(line for line in lines if line.startswith(kind)).split()[1])


class PeakMemory(threading.Thread):
    """The most memory of its own that the process has held since this began."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.peak_bytes = 0
        self.ended = False

    def run(self) -> None:
        while not self.ended:
            self.peak_bytes = max(self.peak_bytes, resident_bytes("RssAnon"))
            time.sleep(0.005)


def main(model: Path, other: Path, folder: Path) -> None:
    ranks = join_ranks(timeout_seconds=120)
    prepare_deepspeed(folder)
    trainer = {"zero_stage": 3, "reference": "in_trainer"}
    spec = parse_job_spec({"model": {"path": str(model), "dtype": "float32"}, "trainer": trainer})
    torch.randn(64, 64).matmul(torch.randn(64, 64))
    before, own_before = resident_bytes("VmRSS"), resident_bytes("RssAnon")
    watch = PeakMemory()
    watch.start()
    loaded = load_model(spec, ranks.device)
    take_weights(loaded, [other])
    watch.ended = True
    facts = {
        "loaded": resident_bytes("VmRSS") - before,
        "peak": watch.peak_bytes - own_before,
        "whole": sum(parameter.ds_numel * parameter.element_size() for parameter in loaded.parameters()),
    }
    del loaded
    policy = Policy(spec, ranks, [other], passes=1)
    facts["ready"] = resident_bytes("VmRSS") - before
    with torch.no_grad():
        mask_BL = torch.ones_like(TOKENS_BL)
        found = {"policy": token_logprobs(policy.engine.model, TOKENS_BL, mask_BL)}
        found["reference"] = policy.reference_logprobs(TOKENS_BL, mask_BL, mask_BL.bool())
        policy.set_reference([other])
        found["refreshed"] = policy.reference_logprobs(TOKENS_BL, mask_BL, mask_BL.bool())
    save_file(found, folder / f"logprobs-{ranks.rank}.safetensors")
    (folder / f"memory-{ranks.rank}.json").write_text(json.dumps(facts))
    policy.close()
    leave_deepspeed()


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(*map(Path, sys.argv[1:]))
