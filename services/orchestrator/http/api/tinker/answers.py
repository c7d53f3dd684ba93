"""Answers in Tinker's form: protobuf where its clients read that, JSON elsewhere."""

from __future__ import annotations

from datetime import UTC, datetime

from fastapi import Response
from fastapi.responses import JSONResponse

from spo.errors import NotFound
from spo.v1 import tinker_service_pb2 as tinker

PROTOBUF = "application/x-protobuf"
Json = dict[str, object]


def pending(request_id: str) -> Response:
    """It is not done; clients ask again at once."""
    return JSONResponse({"type": "try_again", "request_id": request_id, "queue_state": "active"}, 408)


def of_result(result: tinker.TinkerResult) -> Response:
    """What came of an operation. Raises NotFound where nobody of this tenant asked for it."""
    match result.WhichOneof("result"):
        case "forward_backward":
            return Response(result.forward_backward.SerializeToString(), media_type=PROTOBUF)
        case "sampled":
            return Response(result.sampled.SerializeToString(), media_type=PROTOBUF)
        case "failure":
            return JSONResponse({"error": result.failure.message, "category": result.failure.category})
        case "made":
            return JSONResponse({"type": "create_model", "model_id": result.made.model_id})
        case "stepped":
            return JSONResponse({"metrics": dict(result.stepped.metrics)})
        case "loaded":
            loaded = result.loaded
            return JSONResponse({"type": "load_weights", "path": loaded.path, "model_id": loaded.model_id})
        case "saved":
            return JSONResponse(_saved(result.saved))
    message = f"there is no result of {result.request_id}: it is too old, or the service has restarted since"
    raise NotFound(message, code="tinker_not_found")


def training_run(model_id: str, base_model: str, found: list[tinker.TinkerCheckpoint]) -> Json:
    """A model as a run, from its checkpoints (at least one)."""
    newest = found[-1]
    of_kind = {kind: [each for each in found if f"/{kind}/" in each.path] for kind in ("weights", "sampler_weights")}
    trained, sampled = of_kind["weights"], of_kind["sampler_weights"]
    return {
        "training_run_id": model_id,
        "base_model": base_model,
        "model_owner": "you",
        "is_lora": True,
        "lora_rank": newest.lora.rank,
        "last_request_time": _time(newest.created_unix_ms),
        "last_checkpoint": checkpoint(trained[-1]) if trained else None,
        "last_sampler_checkpoint": checkpoint(sampled[-1]) if sampled else None,
    }


def checkpoint(found: tinker.TinkerCheckpoint) -> Json:
    """One checkpoint; its id is what follows the model's in its path."""
    kind, _, name = found.path.rpartition("/")
    is_sampler = kind.endswith("/sampler_weights")
    return {
        "checkpoint_id": f"{kind.rpartition('/')[2]}/{name}",
        "checkpoint_type": "sampler" if is_sampler else "training",
        "time": _time(found.created_unix_ms),
        "tinker_path": found.path,
        "size_bytes": found.size_bytes,
        "public": False,
        "expires_at": _time(found.expires_unix_ms) if found.expires_unix_ms else None,
    }


def _saved(saved: tinker.TinkerSaved) -> Json:
    kind = "save_weights_for_sampler" if "/sampler_weights/" in saved.path else "save_weights"
    if saved.sampling_session_id:
        return {"type": kind, "path": None, "sampling_session_id": saved.sampling_session_id}
    return {"type": kind, "path": saved.path}


def _time(unix_ms: int) -> str:
    return datetime.fromtimestamp(unix_ms / 1000, UTC).isoformat()
