"""What the plan says when a trainer has run out of memory, or may: needs, what there is, and the settings that help."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from spo.spec.job_spec import JobSpec
from spo.spec.plan.fit import USABLE_SHARE, what_fits
from spo.spec.plan.plan import in_gigabytes, words_of
from spo.spec.plan.shapes import ModelShape
from spo.spec.plan.trainer_memory import trainer_memory

# The plan errs by less than this; where it says that a trainer fits which does not, so much less is asked for.
PLAN_ERROR = 0.15


@dataclass(frozen=True)
class MemoryAdvice:
    """Bytes of a rank: needed by the plan and usable; `changes` of settings make it fit, None: nothing does."""

    ranks: int
    needed_bytes: int
    usable_bytes: int
    changes: Mapping[str, Any] | None

    @property
    def fits(self) -> bool:
        """Whether the plan says that there is enough."""
        return self.needed_bytes <= self.usable_bytes

    @property
    def words(self) -> str:
        """All of it in one sentence."""
        needs = f"by `spo plan` each of {self.ranks} ranks needs {in_gigabytes(self.needed_bytes)}"
        has = f"{needs} and has {in_gigabytes(self.usable_bytes)} to use"
        if self.changes is None:
            return f"{has}; no setting makes it fit: take more or larger devices, or a smaller model"
        helps = words_of(self.changes)
        if self.fits:
            return f"{has}, so something else takes memory there too; less is needed {helps}"
        return f"{has}; it fits {helps}"


def memory_advice(spec: JobSpec, shape: ModelShape, ranks: int, device_bytes: int) -> MemoryAdvice:
    """For so many ranks with so much memory each; where it fits, the cheapest settings that need clearly less."""
    needed = trainer_memory(spec, shape, ranks).peak
    usable = int(USABLE_SHARE * device_bytes)
    wanted = device_bytes if needed > usable else int((1 - PLAN_ERROR) * needed / USABLE_SHARE)
    return MemoryAdvice(ranks, needed, usable, what_fits(spec, shape, ranks, wanted))
