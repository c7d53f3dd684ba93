"""python -m services.trainer (one rank), or torchrun -m services.trainer (several)."""

from __future__ import annotations

import os
import signal
import sys

from services.trainer.settings import Settings, keep_memory_whole
from spo.local.die_with_parent import die_with_torchrun
from spo.observability import configure_logs
from spo.service.process import ServiceProcess


def main() -> int:
    settings = Settings()
    keep_memory_whole(os.environ)
    rank = os.environ.get("RANK", "0")
    # At once: a torchrun that is killed while the libraries load leaves ranks that find each other without it.
    die_with_torchrun()
    configure_logs(f"trainer-{rank}", settings.log_level, settings.log_format)
    # torchrun signals every rank, and they stop when rank 0 tells them to. One that is alone ends while it loads.
    signal.signal(signal.SIGTERM, signal.SIG_DFL if os.environ.get("WORLD_SIZE", "1") == "1" else signal.SIG_IGN)
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
