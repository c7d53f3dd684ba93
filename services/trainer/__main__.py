"""python -m services.trainer (one rank), or torchrun -m services.trainer (several)."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import MutableMapping

from services.trainer.settings import Settings
from spo.local.die_with_parent import die_with_torchrun
from spo.observability import configure_logs
from spo.service.process import ServiceProcess

# What torch's allocator of device memory is told by; the second is its older name.
ALLOCATOR = "PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"


def keep_memory_whole(environment: MutableMapping[str, str]) -> None:
    """Have device memory in segments that grow, unless the allocator is told otherwise; before torch is imported.

    Micro-batches have as many tokens as come: segments of fixed sizes would be left with holes that none fits into.
    """
    if not any(name in environment for name in ALLOCATOR):
        environment[ALLOCATOR[0]] = "expandable_segments:True"


def main() -> int:
    settings = Settings()
    keep_memory_whole(os.environ)
    rank = os.environ.get("RANK", "0")
    # At once: a torchrun that is killed while the libraries load leaves ranks that find each other without it.
    die_with_torchrun()
    configure_logs(f"trainer-{rank}", settings.log_level, settings.log_format)
    # torchrun signals every rank, and they stop when rank 0 tells them to. One that is alone ends while it loads.
    alone = os.environ.get("WORLD_SIZE", "1") == "1"
    signal.signal(signal.SIGTERM, signal.SIG_DFL if alone else signal.SIG_IGN)
    process = ServiceProcess("trainer", settings) if rank == "0" else None
    if process:
        process.answer_probes("loads its libraries")
    # Imported late: a wrong setting is reported at once and probes are answered while these take their time.
    from services.trainer.deepspeed_engine import leave_deepspeed, prepare_deepspeed
    from services.trainer.loop import follow, lead
    from services.trainer.ranks import join_ranks

    ranks = join_ranks(settings.collective_timeout_seconds)
    prepare_deepspeed(settings.state_path)
    status = lead(process, ranks, settings) if process else follow(ranks, settings)
    leave_deepspeed()
    return status


if __name__ == "__main__":
    sys.exit(main())
