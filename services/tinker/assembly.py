"""The service and its worker, put together around one base model."""

from __future__ import annotations

from services.tinker.checkpoints import CheckpointStore
from services.tinker.futures import Operations
from services.tinker.service import TinkerService
from services.tinker.sessions import Sessions
from services.tinker.settings import Settings
from services.tinker.shared_model import SharedModel
from services.tinker.worker import TinkerWorker


def assemble(settings: Settings) -> tuple[TinkerService, TinkerWorker]:
    """Loads the model. Raises InvalidInput where its folder may not or cannot be loaded."""
    model = SharedModel(settings.model, settings.dtype)
    model.max_tokens = min(model.max_tokens, settings.max_context_tokens)
    sessions = Sessions(
        settings.silence_seconds,
        settings.max_models,
        settings.max_models_per_tenant,
        settings.max_sessions_per_tenant,
        settings.max_samplers_per_tenant,
    )
    operations = Operations(settings.max_waiting, settings.operation_seconds, settings.result_seconds)
    store = CheckpointStore(settings.state_path / "tinker", model.hash, settings.max_checkpoints_per_tenant)
    parts = (settings, model, sessions, operations, store)
    return TinkerService(*parts), TinkerWorker(*parts)
