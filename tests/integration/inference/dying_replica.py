"""An inference replica, run as a module, that is killed in the middle of its second broadcast."""

from __future__ import annotations

import os
import signal
import sys

from torch import Tensor

from services.inference.__main__ import main
from spo.weights.broadcast import GlooGroup


class DyingGroup:
    """Counts the groups that were joined and what came through them."""

    groups = 0
    tensors = 0


_broadcast, _join = GlooGroup.broadcast, GlooGroup.__init__


def _joined(self: GlooGroup, *positional: object, **named: object) -> None:
    DyingGroup.groups += 1
    DyingGroup.tensors = 0
    _join(self, *positional, **named)  # type: ignore[arg-type]


def _received(self: GlooGroup, tensor: Tensor) -> None:
    DyingGroup.tensors += 1
    if DyingGroup.groups == 2 and DyingGroup.tensors == 4:
        os.kill(os.getpid(), signal.SIGKILL)
    _broadcast(self, tensor)


if __name__ == "__main__":
    GlooGroup.__init__, GlooGroup.broadcast = _joined, _received  # type: ignore[method-assign]
    sys.exit(main())
