"""The trainer with checkpoints that take SLOW_SECONDS longer, as those of a large model do; started by torchrun."""

from __future__ import annotations

import os
import sys
import time
from typing import Any

from services.trainer import train
from services.trainer.__main__ import main

save = train.save_checkpoint


def save_slowly(*arguments: Any, **options: Any) -> Any:
    time.sleep(float(os.environ["SLOW_SECONDS"]))
    return save(*arguments, **options)


if __name__ == "__main__":
    train.save_checkpoint = save_slowly
    sys.exit(main())
