"""python -m services.trainer (one rank), or torchrun -m services.trainer (several)."""

from __future__ import annotations

import os
import signal
import sys

from services.trainer.settings import Settings
from spo.observability.logs import configure_logs


def main() -> int:
    settings = Settings()
    # Imported late: a wrong setting is reported at once, not after the seconds that these imports take.
    from services.trainer.deepspeed_engine import leave_deepspeed, prepare_deepspeed
    from services.trainer.process import follow, lead
    from services.trainer.ranks import join_ranks

    configure_logs(f"trainer-{os.environ.get('RANK', '0')}", settings.log_level, settings.log_format)
    # torchrun signals every rank; the others stop when rank 0 tells them to, after its last checkpoint.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    ranks = join_ranks(settings.collective_timeout_seconds)
    prepare_deepspeed(settings.state_path)
    status = lead(ranks, settings) if ranks.leads else follow(ranks, settings)
    leave_deepspeed()
    return status


if __name__ == "__main__":
    sys.exit(main())
