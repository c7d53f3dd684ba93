"""Sessions of clients, the models they train and the samplers they draw from: whose each is, and how long it stays."""

from __future__ import annotations

import re
import threading
import time
from dataclasses import dataclass, field

from ulid import ULID

from services.tinker.training_adapter import TrainingAdapter
from spo.errors import InvalidInput, NotFound, ResourceExhausted

PREFIX = "tnk_"
_MODEL_ID = re.compile(r"(tnk_[0-9A-Za-z]{26}):train:\d{1,9}")


@dataclass
class Session:
    """One client process; `finished`: it has said that it is done."""

    id: str
    tenant: str
    beaten: float
    finished: bool = False


@dataclass(frozen=True)
class Sampler:
    """One sampling client; path: the checkpoint it draws from, empty: the base model."""

    id: str
    session_id: str
    tenant: str
    path: str


@dataclass
class TrainedModel:
    """One training client; saved_steps: those that a checkpoint has."""

    id: str
    session_id: str
    tenant: str
    adapter: TrainingAdapter
    saved_steps: int = 0


@dataclass
class Sessions:
    """Safe from several threads; models are added and removed by the one that computes."""

    silence_seconds: float
    most_models: int
    most_models_per_tenant: int
    most_sessions_per_tenant: int
    most_samplers_per_tenant: int
    _sessions: dict[str, Session] = field(default_factory=dict)
    _samplers: dict[str, Sampler] = field(default_factory=dict)
    _models: dict[str, TrainedModel] = field(default_factory=dict)
    _lock: threading.RLock = field(default_factory=threading.RLock)

    def open(self, tenant: str) -> str:
        """A new session's id. Raises InvalidInput (code "tinker_limit") where the tenant has all it may have."""
        session = Session(f"{PREFIX}{ULID()}", tenant, time.monotonic())
        with self._lock:
            own = [each for each in self._sessions.values() if each.tenant == tenant and not self._is_over(each)]
            if len(own) >= self.most_sessions_per_tenant:
                message = (
                    f"{len(own)} sessions of yours are open; finish one (close its client), or wait: without a "
                    f"heartbeat it ends after {self.silence_seconds:g} s. The oldest is {own[0].id}"
                )
                raise InvalidInput(message, code="tinker_limit")
            self._sessions[session.id] = session
        return session.id

    def beat(self, tenant: str, session_id: str, *, finish: bool = False) -> None:
        """It is alive, or done. Raises NotFound (code "tinker_session_over" at a heartbeat)."""
        with self._lock:
            session = self._session(tenant, session_id, "tinker_not_found" if finish else "tinker_session_over")
            session.beaten, session.finished = time.monotonic(), session.finished or finish

    def require(self, tenant: str, session_id: str) -> None:
        """Raises NotFound for another tenant's session as for one that never was."""
        with self._lock:
            self._session(tenant, session_id)

    def require_model(self, tenant: str, model_id: str) -> None:
        """Raises NotFound unless it may be a model of one of the tenant's sessions, one that is being made included."""
        found = _MODEL_ID.fullmatch(model_id)
        with self._lock:
            session = self._sessions.get(found[1]) if found else None
        if session is None or session.tenant != tenant:
            raise _no_model(model_id)

    def model(self, tenant: str, model_id: str) -> TrainedModel:
        """Raises NotFound."""
        with self._lock:
            found = self._models.get(model_id)
        if found is None or found.tenant != tenant:
            raise _no_model(model_id)
        return found

    def require_room(self, tenant: str) -> None:
        """Raises ResourceExhausted where the tenant, or the service, has all the models it may have."""
        with self._lock:
            own = sum(model.tenant == tenant for model in self._models.values())
            if own >= self.most_models_per_tenant or len(self._models) >= self.most_models:
                message = f"{own} training clients of yours and {len(self._models)} in all are there; finish some"
                raise ResourceExhausted(message, code="tinker_limit")

    def add_model(self, model: TrainedModel) -> None:
        """Known from now on."""
        with self._lock:
            self._models[model.id] = model

    def drop_model(self, model_id: str) -> TrainedModel | None:
        """Known no more."""
        with self._lock:
            return self._models.pop(model_id, None)

    def models(self) -> list[TrainedModel]:
        """Every tenant's."""
        with self._lock:
            return list(self._models.values())

    def add_sampler(self, tenant: str, session_id: str, number: int, path: str) -> str:
        """A sampling session's id; the same for the same number. Raises NotFound, InvalidInput on another path
        and where the tenant has all it may have.
        """
        sampler = Sampler(f"{session_id}:sample:{number}", session_id, tenant, path)
        with self._lock:
            self.require_sampler_room(tenant, session_id, number)
            known = self._samplers.setdefault(sampler.id, sampler)
        if known != sampler:
            raise InvalidInput(f"{sampler.id} samples from something else", code="tinker_request_reused")
        return sampler.id

    def require_sampler_room(self, tenant: str, session_id: str, number: int) -> None:
        """Raises NotFound, and InvalidInput (code "tinker_limit") where a further sampler is one too many."""
        with self._lock:
            self._session(tenant, session_id)
            if f"{session_id}:sample:{number}" in self._samplers:
                return
            own = [each for each in self._samplers.values() if each.tenant == tenant]
            if len(own) >= self.most_samplers_per_tenant:
                message = (
                    f"{len(own)} samplers of yours are open; finish a session (close its client), and those opened "
                    "in it go, or delete a checkpoint, and those of it go. "
                    f"The oldest is of session {own[0].session_id}"
                )
                raise InvalidInput(message, code="tinker_limit")

    def drop_samplers(self, tenant: str, path: str) -> None:
        """Forget what draws from a checkpoint that is there no more."""
        with self._lock:
            gone = [name for name, each in self._samplers.items() if (each.tenant, each.path) == (tenant, path)]
            for name in gone:
                del self._samplers[name]

    def sampler(self, tenant: str, sampler_id: str) -> Sampler:
        """Raises NotFound."""
        with self._lock:
            found = self._samplers.get(sampler_id)
        if found is None or found.tenant != tenant:
            raise NotFound(f"there is no sampling session {sampler_id[:200]}", code="tinker_not_found")
        return found

    def take_ended(self) -> list[TrainedModel]:
        """Forget sessions that are done or silent, and what they sampled from; returns the models they trained."""
        with self._lock:
            ended = {each.id for each in self._sessions.values() if self._is_over(each)}
            for session_id in ended:
                del self._sessions[session_id]
            self._samplers = {name: each for name, each in self._samplers.items() if each.session_id not in ended}
            return [model for model in self._models.values() if model.session_id in ended]

    def _is_over(self, session: Session) -> bool:
        return session.finished or session.beaten < time.monotonic() - self.silence_seconds

    def _session(self, tenant: str, session_id: str, code: str = "tinker_not_found") -> Session:
        found = self._sessions.get(session_id)
        if found is None or found.tenant != tenant:
            raise NotFound(f"there is no session {session_id[:200]}: it is over, or was never yours", code=code)
        return found


def _no_model(model_id: str) -> NotFound:
    message = (
        f"there is no model {model_id[:200]}: it is not yours, or its session has ended; where it was, a new training "
        "client can go on from its checkpoints, weights/autosave among them"
    )
    return NotFound(message, code="tinker_not_found")
