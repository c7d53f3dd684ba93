"""A stored version into a live engine: by broadcast (NCCL over two devices; gloo in a dry run), and by files."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from benchmarks.gpu.result import report

RUN = "job_benchmark"


def measure(dry_run: bool) -> dict[str, object]:
    """Seconds from the engine's wish to the loaded model, each way; the store's folder is in the page cache."""
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    transport = "gloo" if dry_run else "nccl"
    sender = _sender(transport)
    if not dry_run:
        # Before anything here looks for devices.
        os.environ["CUDA_VISIBLE_DEVICES"] = "1"
    from safetensors.torch import load_file

    from benchmarks.gpu.shapes import write_shape
    from services.inference.engine import Engine, EngineSpec
    from services.inference.settings import Settings
    from services.inference.weights import OfferedBroadcast
    from spo.v1.weights_pb2 import BroadcastOffer
    from spo.weights.broadcast import connect
    from spo.weights.store import WeightStore

    shape = "tiny" if dry_run else "1.5B"
    with tempfile.TemporaryDirectory() as folder, sender:
        model = Path(folder) / "model"
        write_shape(model, shape)
        tensors = {name: tensor for path in model.glob("*.safetensors") for name, tensor in load_file(path).items()}
        store = WeightStore(Path(folder) / "weights")
        shards = [("model-00001.safetensors", tensors)]
        stored = store.write(RUN, 1, parent=0, step=1, dtype="bfloat16", shards=shards)
        engine = Engine(EngineSpec(model, "benchmark", "bfloat16", 128), Settings(kv_cache_memory_bytes=32 << 20))
        assert sender.stdin
        assert sender.stdout
        port = _said(sender)["port"]
        seconds: dict[str, float] = {}
        for number in range(3):
            key = f"transfer-{number}"
            files = [str(path) for path in stored.files]
            push = {"key": key, "manifest": stored.manifest, "files": files, "receivers": 1}
            sender.stdin.write(json.dumps(push | {"window_seconds": 30, "seconds": 60}) + "\n")
            sender.stdin.flush()
            offer = BroadcastOffer(host="127.0.0.1", port=port, key=key, transport=transport, window_seconds=30)
            offered = OfferedBroadcast(offer, connect("127.0.0.1", port), stored.manifest_digest, lambda shapes: None)
            began = time.perf_counter()
            engine.receive(offered.join(1), 1)
            seconds["broadcast"] = min(seconds.get("broadcast", float("inf")), time.perf_counter() - began)
            _said(sender)
            began = time.perf_counter()
            engine.load(store.open(RUN, 1).files, 1)
            seconds["files"] = min(seconds.get("files", float("inf")), time.perf_counter() - began)
        sender.kill()
    return {
        "shape": shape,
        "transport": transport,
        "bytes": stored.size_bytes,
        "seconds": {name: round(value, 3) for name, value in seconds.items()},
    }


def _sender(transport: str) -> subprocess.Popen[str]:
    """The process that a trainer starts; over NCCL on the first device."""
    command = [sys.executable, "-m", "spo.weights.broadcast", "--host", "127.0.0.1", "--port", "0"]
    device = {"CUDA_VISIBLE_DEVICES": "0"} if transport == "nccl" else {}
    return subprocess.Popen(
        [*command, "--transport", transport],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | device,
    )


def _said(sender: subprocess.Popen[str]) -> dict[str, int]:
    """The sender's next line, past whatever libraries print."""
    for line in sender.stdout or ():
        if line.startswith("{"):
            said: dict[str, int] = json.loads(line)
            if "problem" in said:
                raise RuntimeError(str(said["problem"]))
            return said
    raise RuntimeError("the sender ended")


if __name__ == "__main__":
    sys.exit(report(measure))
