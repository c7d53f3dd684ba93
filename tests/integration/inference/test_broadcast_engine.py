"""The real engine and a trainer's broadcast: the bits of the files, and nothing runs on half of them."""

from __future__ import annotations

import threading
from itertools import islice

import pytest
import torch

from services.inference.engine_thread import NOTHING_WHOLE
from services.inference.weights import Weights
from spo.testing.peers import wait_until
from spo.testing.trainer import random_llama
from spo.v1.weights_pb2 import BroadcastOffer
from spo.weights import broadcast
from spo.weights.broadcast import Push, send, serve
from tests.integration.inference import test_engine
from tests.integration.inference.test_engine import (
    RUN,
    WAIT_SECONDS,
    Served,
    greedy_request,
    sampled_request,
    transformers_greedy,
    write_version,
)

pytestmark = pytest.mark.slow
deaths, served = test_engine.deaths, test_engine.served


def sent(served: Served, version: int, *, tensors: int | None = None) -> tuple[Weights, threading.Thread]:
    """A stored version as a trainer offers it, and the sender at work; tensors: it breaks off after so many."""
    stored = served.store.open(RUN, version)
    store, port = serve("127.0.0.1", 0)
    files = [str(path) for path in stored.files]
    push = Push(f"key-{version}", stored.manifest, files, receivers=1, window_seconds=30, seconds=30)

    def work() -> None:
        with pytest.MonkeyPatch.context() as patch:
            if tensors is not None:
                whole = broadcast.stored_tensors
                patch.setattr(broadcast, "stored_tensors", lambda *file: islice(whole(*file), tensors))
                patch.setattr(broadcast, "await_done", lambda *_: 0)
            send(store, "127.0.0.1", "gloo", push)

    thread = threading.Thread(target=work)
    thread.start()
    offer = BroadcastOffer(host="127.0.0.1", port=port, key=push.key, transport="gloo", window_seconds=30)
    offered = served.versions.offered(RUN, version, stored.manifest_digest, offer)
    assert offered
    return offered, thread


def parameters(served: Served) -> dict[str, torch.Tensor]:
    (found,) = served.engine._llm.collective_rpc(
        lambda worker: {name: tensor.clone() for name, tensor in worker.get_model().named_parameters()}
    )
    return dict(found)


def test_a_broadcast_leaves_the_bits_of_the_files_and_a_broken_one_nothing_until_they_come(served: Served) -> None:
    for version in (5, 6):
        write_version(served.store, version, random_llama(version))

    offered, working = sent(served, 5)
    served.thread.announce(RUN, offered)
    wait_until(lambda: served.thread.loaded == offered, "version 5 by broadcast", WAIT_SECONDS)
    working.join(WAIT_SECONDS)
    received = parameters(served)
    sampled = served.sample(sampled_request(1), weights=offered)
    served.sample(greedy_request(), weights=served.reference)
    files = served.versions.resolve(RUN, 5)
    # The engine goes back to what is newest: only then nothing moves under `parameters`.
    served.thread.announce(RUN, files)
    assert served.sample(sampled_request(1), weights=files) == sampled
    assert all(torch.equal(tensor, received[name]) for name, tensor in parameters(served).items())

    broken, working = sent(served, 6, tensors=3)
    served.thread.announce(RUN, broken)
    wait_until(lambda: served.thread.loaded == NOTHING_WHOLE, "the broadcast to break off", WAIT_SECONDS)
    working.join(WAIT_SECONDS)
    waiting = served.submit(greedy_request())
    # The model is known to be no version a moment before the files are asked for.
    assert wait_until(served.thread.take_missing, "the files to be asked for", WAIT_SECONDS) == broken
    assert not waiting.future.done()
    whole = served.versions.resolve(RUN, 6)
    served.thread.announce(RUN, whole)
    (sample,) = waiting.future.result(WAIT_SECONDS)
    assert sample.version_first == sample.version_last == 6
    assert sample.token_ids == transformers_greedy(random_llama(6))
