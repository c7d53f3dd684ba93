"""The real engine on a tiny Llama: what it samples, how it follows weights, and that versions take turns."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import redis
import torch
from transformers import LlamaForCausalLM
from vllm.model_executor.model_loader import weight_utils

from services.inference.engine import Engine, EngineSpec, Sample, SampledPart, SampleRequest, ServedSampling
from services.inference.engine_thread import EngineDeaths, EngineThread, SampleGroup
from services.inference.episodes import MAX_SAMPLES, sample_requests
from services.inference.settings import Settings
from services.inference.weights import PolicyVersions, Weights, reference_weights
from spo.errors import IntegrityError, InvalidInput, NotFound, NotReady
from spo.model.chat import ChatFormat
from spo.model.folder import open_tensors
from spo.model.tokenizer import decode_response, tokens_to_stop
from spo.tasks.toy_tokenizer import build_tokenizer
from spo.testing.peers import wait_until
from spo.testing.trainer import random_llama, write_random_llama
from spo.v1.prompt_pb2 import Sampling
from spo.weights.store import WeightStore

pytestmark = pytest.mark.slow
RUN = "job_test"
WAIT_SECONDS = 120.0
# Longer than one cache block, so that the prefix cache has something to keep.
PROMPT = tuple(range(5, 75))


@dataclass
class Served:
    """An engine thread at version 0 of a tiny model, with version 1 of the run in the store."""

    thread: EngineThread
    engine: Engine
    versions: PolicyVersions
    store: WeightStore
    reference: Weights
    models: dict[int, LlamaForCausalLM]

    def submit(self, *requests: SampleRequest, weights: Weights | None = None, run_id: str = RUN) -> SampleGroup:
        group = SampleGroup(run_id, requests, weights)
        self.thread.submit(group)
        return group

    def sample(self, *requests: SampleRequest, weights: Weights | None = None) -> list[Sample]:
        return self.submit(*requests, weights=weights).future.result(WAIT_SECONDS)


def write_version(store: WeightStore, version: int, model: LlamaForCausalLM) -> Path:
    tensors = {name: tensor.detach().contiguous() for name, tensor in model.state_dict().items()}
    shards = [("a.safetensors", tensors)]
    return store.write(RUN, version, parent=version - 1, step=version, dtype="float32", shards=shards).path


@pytest.fixture(scope="module")
def deaths(redis_server: str) -> Iterator[EngineDeaths]:
    client = redis.Redis.from_url(redis_server)
    yield EngineDeaths(client)
    client.close()


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory, deaths: EngineDeaths) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("inference")
    model_path = folder / "model"
    write_random_llama(model_path, seed=0)
    store = WeightStore(folder / "weights")
    models = {version: random_llama(version) for version in (0, 1)}
    write_version(store, 1, models[1])
    reference = reference_weights(model_path, "hash")
    engines: list[Engine] = []
    settings = Settings(max_sequences=32, kv_cache_memory_bytes=32 << 20, turn_seconds=0.05, in_flight="finish")

    def build() -> Engine:
        engines.append(Engine(EngineSpec(model_path, "hash", "float32", 128), settings))
        return engines[0]

    thread = EngineThread(build, reference, settings, deaths)
    thread.start()
    assert thread.ready.wait(WAIT_SECONDS), thread.failure
    yield Served(thread, engines[0], PolicyVersions(store, reference), store, reference, models)
    thread.stop()


def greedy_request(max_tokens: int = 24, prompt: tuple[int, ...] = PROMPT) -> SampleRequest:
    return SampleRequest(prompt, temperature=0.0, top_p=1.0, max_tokens=max_tokens, seed=0)


def sampled_request(seed: int, temperature: float = 0.7, top_p: float = 0.9, max_tokens: int = 24) -> SampleRequest:
    return SampleRequest(PROMPT[:20], temperature, top_p, max_tokens, seed)


def transformers_greedy(model: LlamaForCausalLM, max_tokens: int = 24) -> tuple[int, ...]:
    with torch.no_grad():
        tokens = model.generate(torch.tensor([PROMPT]), max_new_tokens=max_tokens, do_sample=False)
    return tuple(tokens[0, len(PROMPT) :].tolist())


def test_greedy_output_equals_transformers_after_a_live_weight_update(served: Served) -> None:
    first = served.versions.resolve(RUN, 1)
    before, after = served.sample(greedy_request())[0], served.sample(greedy_request(), weights=first)[0]
    again = served.sample(greedy_request(), weights=served.reference)[0]

    assert before.token_ids == transformers_greedy(served.models[0])
    assert after.token_ids == transformers_greedy(served.models[1])
    assert again.token_ids == before.token_ids
    assert before.token_ids != after.token_ids
    assert (before.version_first, after.version_first, after.version_last) == (0, 1, 1)


def test_what_ends_a_response_is_passed_by_where_a_count_of_tokens_is_asked_for(served: Served) -> None:
    whole = served.sample(greedy_request())[0].token_ids
    # One that does not stand before.
    place = next(place for place, token in enumerate(whole) if place > 3 and token not in whole[:place])
    ending = replace(greedy_request(), end_token_ids=(whole[place],))

    def shown(**how: bool) -> tuple[int, ...]:
        parts: list[SampledPart] = []
        group = SampleGroup(RUN, [replace(ending, served=ServedSampling(**how))], None)
        group.on_part = lambda number, part: parts.append(part)
        served.thread.submit(group)
        wait_until(lambda: bool(parts and parts[-1].finish_reason), "the end of it", WAIT_SECONDS)
        return tuple(token for part in parts for token in part.token_ids)

    assert shown() == served.sample(ending)[0].token_ids == whole[: place + 1]
    assert shown(ignore_eos=True) == whole


def test_the_comparison_with_transformers_would_have_caught_a_stale_prefix_cache(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(served.engine, "salt", lambda: "one for all loads")
    served.sample(greedy_request(), weights=served.reference)
    stale = served.sample(greedy_request(), weights=served.versions.resolve(RUN, 1))[0]
    monkeypatch.undo()

    assert stale.token_ids != transformers_greedy(served.models[1])


def test_logprobs_are_those_of_the_distribution_that_was_sampled(served: Served) -> None:
    requests = [sampled_request(seed, 0.3 + 0.1 * seed, 0.6 + 0.05 * seed) for seed in range(8)]
    for request, sample in zip(requests, served.sample(*requests, weights=served.reference), strict=True):
        expected = sampling_logprobs(served.models[0], request, sample.token_ids)
        torch.testing.assert_close(torch.tensor(sample.logprobs), expected, atol=1e-4, rtol=0)


def sampling_logprobs(model: LlamaForCausalLM, request: SampleRequest, response: tuple[int, ...]) -> torch.Tensor:
    """log-probs under temperature, then the smallest set of tokens that holds top_p of the mass, renormalised."""
    tokens = torch.tensor([request.prompt_token_ids + response])
    with torch.no_grad():
        logits_TV = model(tokens).logits[0, len(request.prompt_token_ids) - 1 : -1].double() / request.temperature
    probabilities, order = logits_TV.softmax(-1).sort(-1, descending=True)
    outside = probabilities.cumsum(-1) - probabilities >= request.top_p
    logits_TV = logits_TV.masked_fill(torch.zeros_like(outside).scatter(-1, order, outside), float("-inf"))
    return logits_TV.log_softmax(-1).gather(-1, torch.tensor(response)[:, None])[:, 0].float()


def test_the_same_seeds_on_the_same_version_give_the_same_samples(served: Served) -> None:
    requests = [sampled_request(seed, 1.0, 1.0) for seed in range(16)]
    first = served.sample(*requests)
    assert [sample.token_ids for sample in served.sample(*requests)] == [sample.token_ids for sample in first]
    assert len({sample.token_ids for sample in first}) == len(requests)


def test_a_response_that_stops_ends_with_the_end_of_sequence_token(served: Served) -> None:
    end = build_tokenizer().eos_token_id
    samples = served.sample(*[sampled_request(seed, 2.0, 1.0, max_tokens=100) for seed in range(64)])
    stopped = [sample for sample in samples if sample.stopped]
    assert stopped
    assert all(sample.token_ids[-1] == end and end not in sample.token_ids[:-1] for sample in stopped)
    assert all(len(sample.token_ids) == 100 and end not in sample.token_ids for sample in samples if not sample.stopped)
    assert all("<eos>" not in decode_response(build_tokenizer(), sample.token_ids) for sample in samples)
    assert all(len(sample.logprobs) == len(sample.token_ids) for sample in samples)


def test_a_response_ends_with_the_token_that_completes_a_stop_string(served: Served) -> None:
    tokenizer = build_tokenizer()
    chat = ChatFormat(stop=("\n", ")["))
    free = served.sample(*[sampled_request(seed, 2.0, 1.0) for seed in range(32)])
    samples = served.sample(*[replace(sampled_request(seed, 2.0, 1.0), stop=chat.stop) for seed in range(32)])

    lengths = [tokens_to_stop(tokenizer, sample.token_ids, chat) for sample in free]
    assert sum(length is not None for length in lengths) > 4
    for length, whole, sample in zip(lengths, free, samples, strict=True):
        assert sample.token_ids == whole.token_ids[:length], "the same seed gives the same tokens up to the stop"
        assert sample.logprobs == pytest.approx(whole.logprobs[:length], abs=1e-5)
        assert sample.stopped == (whole.stopped or length is not None)


def test_vllm_has_been_told_to_read_files_and_not_to_map_them(served: Served) -> None:
    assert weight_utils.safe_open is open_tensors


def test_groups_of_two_versions_at_once_are_each_sampled_from_their_own(served: Served) -> None:
    first = served.versions.resolve(RUN, 1)
    expected = {0: transformers_greedy(served.models[0]), 1: transformers_greedy(served.models[1])}
    groups = [
        served.submit(*[greedy_request()] * 8, weights=first if number % 2 else served.reference)
        for number in range(24)
    ]
    for number, group in enumerate(groups):
        samples = group.future.result(WAIT_SECONDS)
        assert {sample.token_ids for sample in samples} == {expected[number % 2]}
        assert {(sample.version_first, sample.version_last) for sample in samples} == {(number % 2, number % 2)}


def test_no_version_waits_for_ever_while_another_is_always_asked_for(served: Served) -> None:
    stop = threading.Event()

    def keep_asking() -> None:
        while not stop.is_set():
            served.sample(*[sampled_request(seed) for seed in range(8)], weights=served.reference)

    askers = [threading.Thread(target=keep_asking) for _ in range(4)]
    for asker in askers:
        asker.start()
    try:
        other = served.sample(greedy_request(), weights=served.versions.resolve(RUN, 1))[0]
    finally:
        stop.set()
        for asker in askers:
            asker.join(WAIT_SECONDS)
    assert other.token_ids == transformers_greedy(served.models[1])


def test_newest_means_the_announced_version_and_running_groups_finish_on_theirs(served: Served) -> None:
    running = served.submit(*[sampled_request(seed, max_tokens=100) for seed in range(32)], run_id="job_other")
    served.thread.announce("job_other", served.versions.resolve(RUN, 1))
    later = served.submit(greedy_request(), run_id="job_other")

    assert later.future.result(WAIT_SECONDS)[0].token_ids == transformers_greedy(served.models[1])
    for sample in running.future.result(WAIT_SECONDS):
        assert sample.version_first == sample.version_last
    served.thread.announce("job_other", served.reference)


def switched(
    served: Served,
    deaths: EngineDeaths,
    requests: list[SampleRequest],
    *,
    versions: tuple[int, int] = (0, 1),
    may_switch: bool = True,
    recompute: bool = False,
) -> list[Sample]:
    """Samples of a group that runs under the first version while the second is announced."""
    before, after = (served.versions.resolve(RUN, version) for version in versions)
    # Once the module's own thread is idle, this one may drive its engine.
    served.sample(greedy_request(1))
    wait_until(
        lambda: served.thread.loaded == served.reference, "the engine to be idle at version 0", WAIT_SECONDS, 0.002
    )
    thread = EngineThread(lambda: served.engine, served.reference, Settings(max_sequences=32), deaths)
    thread.start()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(served.engine, "_recomputes", recompute)
        thread.announce(RUN, before)
        wait_until(lambda: thread.loaded == before, "the first version", WAIT_SECONDS, 0.002)
        group, later = (
            SampleGroup(RUN, asked, None, may_switch=may_switch) for asked in (requests, [greedy_request()])
        )
        thread.submit(group)
        wait_until(lambda: thread.running_sequences > 0, "sequences to run", WAIT_SECONDS, 0.002)
        thread.announce(RUN, after)
        thread.submit(later)
        samples = group.future.result(WAIT_SECONDS)
        # What begins under the second version shares no block with what began under the first.
        assert later.future.result(WAIT_SECONDS)[0].token_ids == transformers_greedy(served.models[versions[1]])
    thread.announce(RUN, served.reference)
    wait_until(lambda: thread.loaded == served.reference, "the weights to be put back", WAIT_SECONDS, 0.002)
    thread.stop()
    return samples


@pytest.mark.parametrize("recompute", [True, False])
def test_kept_groups_go_on_under_new_weights_with_true_logprobs_and_versions(
    served: Served, deaths: EngineDeaths, recompute: bool
) -> None:
    requests = [sampled_request(seed, 1.0, 1.0, max_tokens=100) for seed in range(32)]
    samples = switched(served, deaths, requests, recompute=recompute)

    found = [sample for sample in samples if (sample.version_first, sample.version_last) == (0, 1)]
    assert found
    for sample in found:
        request = requests[samples.index(sample)]
        sampled = torch.tensor(sample.logprobs)
        old, new = (sampling_logprobs(served.models[version], request, sample.token_ids) for version in (0, 1))
        is_old, is_new = (sampled - old).abs() < 1e-3, (sampled - new).abs() < 1e-3
        at = int(is_old.long().cumprod(0).sum())
        assert at > 0
        # With the blocks of the old version what follows is of neither alone.
        assert bool(is_new[at:].all()) == recompute


@pytest.mark.parametrize(("versions", "may_switch"), [((0, 1), False), ((1, 0), True)])
def test_groups_finish_on_a_version_that_is_their_anchor_or_is_rolled_back(
    served: Served, deaths: EngineDeaths, versions: tuple[int, int], may_switch: bool
) -> None:
    requests = [sampled_request(seed, 1.0, 1.0, max_tokens=60) for seed in range(8)]
    samples = switched(served, deaths, requests, versions=versions, may_switch=may_switch)
    assert {(sample.version_first, sample.version_last) for sample in samples} == {(versions[0],) * 2}


def test_temperatures_and_seeds_are_drawn_from_the_groups_seed() -> None:
    sampling = Sampling(samples=500, temperature_min=0.1, temperature_max=0.8, top_p=0.95, max_tokens=8, seed=7)
    drawn = sample_requests((1, 2), sampling)
    temperatures = [request.temperature for request in drawn]
    assert drawn == sample_requests((1, 2), sampling)
    assert 0.1 <= min(temperatures) < 0.12
    assert 0.78 < max(temperatures) <= 0.8
    assert abs(sum(temperatures) / 500 - 0.45) < 0.03
    assert len({request.seed for request in drawn}) == 500
    sampling.seed = 8
    assert drawn != sample_requests((1, 2), sampling)


@pytest.mark.parametrize(
    "wrong",
    [
        {"samples": 0},
        {"samples": MAX_SAMPLES + 1},
        {"max_tokens": 0},
        {"temperature_min": -0.1},
        {"temperature_min": 0.9},
        {"temperature_max": float("nan")},
        {"temperature_max": float("inf")},
        {"top_p": 0.0},
        {"top_p": 1.5},
    ],
)
def test_impossible_sampling_is_refused(wrong: dict[str, float]) -> None:
    sampling = Sampling(samples=1, temperature_min=0.1, temperature_max=0.8, top_p=0.95, max_tokens=8)
    for name, value in wrong.items():
        setattr(sampling, name, value)
    with pytest.raises(InvalidInput):
        sample_requests((1, 2), sampling)


def test_a_group_nobody_waits_for_frees_its_sequences(served: Served) -> None:
    group = served.submit(*[sampled_request(seed, max_tokens=100) for seed in range(32)])
    assert group.future.cancel()
    assert served.sample(greedy_request(4))
    wait_until(lambda: served.thread.running_sequences == 0, "the cancelled sequences to be gone", WAIT_SECONDS, 0.002)


def test_a_prompt_vllm_cannot_take_fails_alone(served: Served) -> None:
    good = served.submit(greedy_request(4))
    bad = served.submit(greedy_request(4, prompt=tuple(range(5, 105)) * 2))
    with pytest.raises(InvalidInput, match="vLLM refuses"):
        bad.future.result(WAIT_SECONDS)
    assert good.future.result(WAIT_SECONDS)


def test_sampling_that_vllm_does_not_do_fails_alone(served: Served) -> None:
    good = served.submit(greedy_request(4))
    bad = served.submit(sampled_request(1, temperature=3.3))
    with pytest.raises(InvalidInput, match="vLLM refuses"):
        bad.future.result(WAIT_SECONDS)
    assert good.future.result(WAIT_SECONDS)
    assert served.sample(greedy_request(4)), "and the engine goes on"


def test_damaged_weights_are_refused_before_the_engine_sees_them(served: Served) -> None:
    shard = write_version(served.store, 2, random_llama(2)) / "a.safetensors"
    content = bytearray(shard.read_bytes())
    content[-5] ^= 1
    shard.write_bytes(bytes(content))
    with pytest.raises(IntegrityError, match=r"a\.safetensors does not match"):
        served.versions.resolve(RUN, 2)


def test_weights_of_another_shape_are_refused(served: Served) -> None:
    write_version(served.store, 3, random_llama(3, width=64))
    with pytest.raises(IntegrityError, match="does not fit the model"):
        served.versions.resolve(RUN, 3)


def test_a_version_that_is_not_kept_is_not_found(served: Served) -> None:
    with pytest.raises(NotFound):
        served.versions.resolve(RUN, 99)


def test_a_model_that_cannot_be_built_fails_loudly(deaths: EngineDeaths) -> None:
    def build() -> Engine:
        raise OSError("no such model")

    thread = EngineThread(build, Weights("", 0, "", ()), Settings(), deaths)
    waiting = SampleGroup(RUN, [greedy_request()], None)
    thread.submit(waiting)
    thread.start()
    with pytest.raises(NotReady, match="failed"):
        waiting.future.result(WAIT_SECONDS)
    assert isinstance(thread.failure, OSError)
    with pytest.raises(NotReady):
        thread.submit(SampleGroup(RUN, [greedy_request()], None))


def test_a_tenants_flood_of_groups_delays_another_tenants_group_by_its_share_alone(served: Served) -> None:
    def ask(tenant: str, number: int) -> SampleGroup:
        requests = [sampled_request(100 * number + each, max_tokens=16) for each in range(8)]
        group = SampleGroup(RUN, requests, None, tenant=tenant)
        group.future.add_done_callback(lambda _: ended.append(tenant))
        served.thread.submit(group)
        return group

    ended: list[str] = []
    flood = [ask("a", number) for number in range(40)]
    other = [ask("b", number) for number in range(40, 44)]
    for group in (*other, *flood):
        group.future.result(WAIT_SECONDS)

    last_of_other = max(place for place, tenant in enumerate(ended) if tenant == "b")
    assert last_of_other < 16, f"the other tenant was served within turns, not behind 40 groups: {ended}"
