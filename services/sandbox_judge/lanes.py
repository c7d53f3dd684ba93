"""A lane judges one program at a time; it owns the zygotes that it needs and replaces those that fail or have aged."""

from __future__ import annotations

import enum
import os
import shutil
import tempfile
from dataclasses import dataclass, field

from services.sandbox_judge.backends.zygote import Zygote
from services.sandbox_judge.isolation import launch, program_uid
from services.sandbox_judge.settings import IsolationTier


class Role(enum.Enum):
    """Zygotes never serve two roles: a checker sees answers, a compiler may write and start processes."""

    PROGRAM = "program"
    COMPILER = "compiler"
    CHECKER = "checker"


@dataclass
class Lane:
    """The zygotes of one worker thread, started when first needed."""

    tier: IsolationTier
    index: int
    programs_per_zygote: int = 2000
    _zygotes: dict[Role, Zygote] = field(default_factory=dict, init=False)
    _scratch: str | None = field(default=None, init=False)

    def zygote(self, role: Role) -> Zygote:
        """The lane's zygote for a role. Raises JudgeFault when it cannot be started."""
        zygote = self._zygotes.get(role)
        if zygote is None:
            scratch = self._private_folder() if role is Role.COMPILER else None
            zygote = self._zygotes[role] = Zygote(launch(self.tier, self.index, scratch))
        return zygote

    def retire_old(self) -> None:
        """End zygotes that have served long enough."""
        for role, zygote in list(self._zygotes.items()):
            if zygote.programs >= self.programs_per_zygote:
                self._zygotes.pop(role).close()

    def close(self) -> None:
        """End everything the lane has started; it can be used again."""
        while self._zygotes:
            self._zygotes.popitem()[1].close()
        if self._scratch:
            shutil.rmtree(self._scratch, ignore_errors=True)
            self._scratch = None

    def _private_folder(self) -> str | None:
        """Where compilers write in tiers without a file system of their own."""
        if self.tier.startswith("namespaces"):
            return None
        if self._scratch is None:
            self._scratch = tempfile.mkdtemp(prefix="spo-judge-")
            if (uid := program_uid(self.index)) is not None:
                os.chown(self._scratch, uid, uid)
        return self._scratch
