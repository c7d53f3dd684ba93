"""A model cut over two of vLLM's workers: sampled, given new weights by files and by broadcast, and a worker killed."""

from __future__ import annotations

from collections.abc import Iterator

import psutil
import pytest

from services.inference.engine import Engine, EngineSpec
from services.inference.engine_thread import EngineThread
from services.inference.settings import Settings
from services.inference.weights import PolicyVersions, reference_weights
from spo.errors import NotReady
from spo.testing.peers import wait_until
from spo.testing.trainer import random_llama, write_random_llama
from spo.weights.store import WeightStore
from tests.integration.inference import test_engine
from tests.integration.inference.test_broadcast_engine import sent
from tests.integration.inference.test_engine import (
    RUN,
    WAIT_SECONDS,
    EngineDeaths,
    Served,
    greedy_request,
    sampled_request,
    transformers_greedy,
    write_version,
)

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
deaths = test_engine.deaths
# Two workers start Python, torch and vLLM anew.
READY_SECONDS = 240.0


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory, deaths: EngineDeaths) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("tensor_parallel")
    write_random_llama(folder / "model", seed=0, width=128)
    store, reference = WeightStore(folder / "weights"), reference_weights(folder / "model", "hash")
    models = {version: random_llama(version, width=128) for version in (0, 1, 2)}
    for version in (1, 2):
        write_version(store, version, models[version])
    engines: list[Engine] = []
    settings = Settings(max_sequences=8, kv_cache_memory_bytes=32 << 20, tensor_parallel_size=2)

    def build() -> Engine:
        engines.append(Engine(EngineSpec(folder / "model", "hash", "float32", 128), settings))
        return engines[0]

    thread = EngineThread(build, reference, settings, deaths)
    thread.start()
    assert thread.ready.wait(READY_SECONDS), thread.failure
    yield Served(thread, engines[0], PolicyVersions(store, reference), store, reference, models)
    thread.stop()


def workers() -> list[psutil.Process]:
    """The processes that vLLM started, by the titles that it gives them."""
    return [child for child in psutil.Process().children(recursive=True) if "Worker" in " ".join(child.cmdline())]


def test_two_workers_sample_what_one_model_does_by_file_and_by_broadcast_and_the_death_of_one_is_told(
    served: Served,
) -> None:
    assert len(workers()) == 2
    assert served.sample(greedy_request())[0].token_ids == transformers_greedy(served.models[0])

    first = served.versions.resolve(RUN, 1)
    assert served.sample(greedy_request(), weights=first)[0].token_ids == transformers_greedy(served.models[1])

    offered, working = sent(served, 2)
    served.thread.announce(RUN, offered)
    wait_until(lambda: served.thread.loaded == offered, "version 2 by broadcast", WAIT_SECONDS)
    working.join(WAIT_SECONDS)
    assert served.sample(greedy_request())[0].token_ids == transformers_greedy(served.models[2])

    running = served.submit(*[sampled_request(seed, 1.0, 1.0, max_tokens=100) for seed in range(8)])
    wait_until(lambda: served.thread.running_sequences > 0, "sequences to run", WAIT_SECONDS, 0.002)
    workers()[0].kill()
    with pytest.raises(NotReady) as caught:
        running.future.result(WAIT_SECONDS)
    assert caught.value.code == "engine_failed"
    assert served.thread.failure
