"""A real engine in a process of its own: samples a model folder, then other weights of it; `python -m` with a request.

The request is JSON: folder, weights (paths of version 1), manifest (its own), prompt, ends. Prints `SAMPLED ` and JSON:
samples before version 1, when it came by broadcast and when by files, and the names of files opened in the folder.
"""

from __future__ import annotations

import json
import sys
import threading
from dataclasses import asdict
from pathlib import Path
from typing import Any

SAMPLES = 6
TOKENS = 16


def sampled(engine: Any, prompt: tuple[int, ...], ends: tuple[int, ...]) -> list[dict[str, Any]]:
    """Samples at temperature 1, whole distribution."""
    from services.inference.engine import SampleRequest

    for seed in range(SAMPLES):
        engine.add(str(seed), SampleRequest(prompt, 1.0, 1.0, TOKENS, seed, end_token_ids=ends))
    found: dict[str, dict[str, Any]] = {}
    while len(found) < SAMPLES:
        found |= {name: asdict(sample) for name, sample in engine.step()}
    return [found[name] for name in sorted(found)]


def receive(engine: Any, request: dict[str, Any]) -> None:
    """Version 1, sent by a thread as a trainer's sender would."""
    from services.inference.weights import reached
    from spo.v1.weights_pb2 import BroadcastOffer
    from spo.weights.broadcast import Push, send, serve
    from spo.weights.store import digest_of

    store, port = serve("127.0.0.1", 0)
    push = Push("key", request["manifest"], request["weights"], receivers=1, window_seconds=30, seconds=30)
    sender = threading.Thread(target=send, args=(store, "127.0.0.1", "gloo", push))
    sender.start()
    offer = BroadcastOffer(host="127.0.0.1", port=port, key=push.key, transport="gloo", window_seconds=30)
    offered = reached(offer, digest_of(request["manifest"]), lambda _: None)
    assert offered
    engine.receive(offered.join(1), 1)
    sender.join()


def main(request: dict[str, Any]) -> None:
    """Answer the request."""
    folder, opened = request["folder"], set[str]()

    def on_open(event: str, arguments: tuple[Any, ...]) -> None:
        if event == "open" and str(arguments[0]).startswith(folder):
            opened.add(str(arguments[0])[len(folder) + 1 :])

    sys.addaudithook(on_open)
    from services.inference.engine import Engine, EngineSpec
    from services.inference.settings import Settings

    settings = Settings(max_sequences=SAMPLES, kv_cache_memory_bytes=32 << 20)
    engine = Engine(EngineSpec(Path(folder), "hash", "float32", 128), settings)
    prompt, ends = tuple(request["prompt"]), tuple(request["ends"])
    before = sampled(engine, prompt, ends)
    receive(engine, request)
    received = sampled(engine, prompt, ends)
    engine.load(list(Path(folder).glob("*.safetensors")), 0)
    engine.load([Path(path) for path in request["weights"]], 1)
    after = sampled(engine, prompt, ends)
    found = {"before": before, "received": received, "after": after, "opened": sorted(opened)}
    print("SAMPLED " + json.dumps(found), flush=True)


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
