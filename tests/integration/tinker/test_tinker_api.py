"""The paths of the Tinker API, asked as clients ask: whose everything is, what is refused, what a restart leaves."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import numpy as np
import pytest

from spo.testing.peers import wait_until
from spo.v1 import tinker_service_pb2 as wire
from tests.integration.tinker.conftest import OPERATOR_KEY, TinkerPlatform

IDS = [15, 5, 6, 27, 7, 9]
ADAM = {"learning_rate": 1e-2}
Document = dict[str, Any]


class Asker:
    """One client of one tenant, by hand."""

    def __init__(self, platform: TinkerPlatform, key: str) -> None:
        self.http = httpx.Client(
            base_url=f"{platform.url}/api/v1", headers={"X-API-Key": key}, timeout=30, trust_env=False
        )
        self.model = platform.model

    def post(self, path: str, document: Document) -> httpx.Response:
        return self.http.post(f"/{path}", json=document)

    def told(self, path: str, document: Document) -> Document:
        answer = self.post(path, document)
        assert answer.is_success, answer.text
        found: Document = answer.json()
        return found

    def result(self, queued: Document) -> httpx.Response:
        for _ in range(10):
            answer = self.post("retrieve_future", {"request_id": queued["request_id"]})
            if answer.status_code != 408:
                return answer
        raise AssertionError("no result")

    def session(self) -> str:
        return str(self.told("create_session", {"tags": [], "user_metadata": None, "sdk_version": "1"})["session_id"])

    def create(self, session: str, number: int = 0, rank: int = 4) -> str:
        asked = {"session_id": session, "model_seq_id": number, "base_model": self.model, "lora_config": {"rank": rank}}
        made: Document = self.result(self.told("create_model", asked)).json()
        return str(made["model_id"])

    def train(self, model: str, seq: int) -> Document:
        """forward_backward and optim_step, as requests seq and seq + 1."""
        self.http.headers["Content-Type"] = "application/x-protobuf"
        queued = self.http.post("/forward_backward", content=datum(model, seq).SerializeToString())
        del self.http.headers["Content-Type"]
        assert queued.is_success, queued.text
        self.told("optim_step", {"model_id": model, "seq_id": seq + 1, "adam_params": ADAM})
        done: Document = self.result({"request_id": f"{model}:{seq + 1}"}).json()
        return done

    def save(self, model: str, seq: int, name: str) -> str:
        queued = self.told("save_weights", {"model_id": model, "seq_id": seq, "path": name})
        return str(self.result(queued).json()["path"])


def datum(model: str, seq: int, loss: str = "cross_entropy") -> wire.TinkerForwardBackwardRequest:
    request = wire.TinkerForwardBackwardRequest(model_id=model, seq_id=seq, loss_fn=loss)
    one = request.data.add()
    one.model_input.add().encoded_text.tokens = np.array(IDS[:-1], dtype="<i4").tobytes()
    targets, weights = one.loss_fn_inputs["target_tokens"], one.loss_fn_inputs["weights"]
    targets.dtype, targets.dense = wire.TINKER_DTYPE_INT64, np.array(IDS[1:], dtype="<i8").tobytes()
    weights.dtype, weights.dense = wire.TINKER_DTYPE_FLOAT32, np.ones(len(IDS) - 1, dtype="<f4").tobytes()
    return request


@pytest.fixture
def asker(platform: TinkerPlatform) -> Iterator[Callable[[str], Asker]]:
    """A client with the key that is given."""
    opened: list[Asker] = []

    def make(key: str) -> Asker:
        opened.append(Asker(platform, key))
        return opened[-1]

    yield make
    for client in opened:
        client.http.close()


@pytest.fixture
def mine(platform: TinkerPlatform, asker: Callable[[str], Asker]) -> Asker:
    return asker(platform.key("mine"))


@pytest.fixture
def theirs(platform: TinkerPlatform, asker: Callable[[str], Asker]) -> Asker:
    return asker(platform.key("theirs"))


def test_nothing_of_one_tenant_is_there_for_another(mine: Asker, theirs: Asker) -> None:
    session = mine.session()
    model = mine.create(session)
    mine.train(model, 1)
    path = mine.save(model, 3, "canary")
    sampler = {"session_id": session, "sampling_session_seq_id": 0, "model_path": path}
    sampling = mine.told("create_sampling_session", sampler)["sampling_session_id"]
    prompt = {"chunks": [{"type": "encoded_text", "tokens": IDS}]}
    sample = {"sampling_session_id": sampling, "seq_id": 0, "prompt": prompt, "sampling_params": {"max_tokens": 2}}
    queued = mine.told("asample", sample)
    assert mine.result(queued).status_code == 200

    own = theirs.session()
    attempts: list[tuple[str, Document]] = [
        ("session_heartbeat", {"session_id": session}),
        (f"sessions/{session}/finish", {}),
        (
            "create_model",
            {"session_id": session, "model_seq_id": 1, "base_model": mine.model, "lora_config": {"rank": 1}},
        ),
        ("get_info", {"model_id": model}),
        ("optim_step", {"model_id": model, "seq_id": 9, "adam_params": ADAM}),
        ("save_weights", {"model_id": model, "seq_id": 9, "path": "x"}),
        ("save_weights_for_sampler", {"model_id": model, "seq_id": 9, "path": "x"}),
        ("load_weights", {"model_id": model, "seq_id": 9, "path": path, "optimizer": True}),
        ("load_weights", {"session_id": own, "model_seq_id": 0, "path": path, "optimizer": False}),
        ("create_sampling_session", {"session_id": own, "sampling_session_seq_id": 0, "model_path": path}),
        ("create_sampling_session", {**sampler, "sampling_session_seq_id": 1}),
        ("asample", {**sample, "seq_id": 1}),
        ("retrieve_future", {"request_id": queued["request_id"]}),
        ("retrieve_future", {"request_id": f"{model}:1"}),
        ("weights_info", {"tinker_path": path}),
    ]
    for where, document in attempts:
        answer = theirs.post(where, document)
        assert answer.status_code == (410 if where == "session_heartbeat" else 404), (where, answer.text)
    refused = theirs.http.post("/forward_backward", content=datum(model, 9).SerializeToString())
    assert refused.status_code == 404
    for where in (f"samplers/{sampling}", f"training_runs/{model}"):
        assert theirs.http.get(f"/{where}").status_code == 404
    assert theirs.http.delete(f"/training_runs/{model}/checkpoints/weights/canary").status_code == 404
    for where in ("checkpoints", "training_runs", f"training_runs/{model}/checkpoints"):
        assert "canary" not in theirs.http.get(f"/{where}").text
        assert "canary" in mine.http.get(f"/{where}").text
    # And nothing of it has happened.
    info = mine.told("get_info", {"model_id": model})
    assert info["lora_rank"] == 4
    # A sampler goes with the checkpoint that it draws from.
    assert mine.http.get(f"/samplers/{sampling}").is_success
    assert mine.http.delete(f"/training_runs/{model}/checkpoints/weights/canary").is_success
    assert mine.http.get(f"/samplers/{sampling}").status_code == 404


def test_without_a_key_or_with_another_scope_nothing_is_answered(
    platform: TinkerPlatform, asker: Callable[[str], Asker]
) -> None:
    for key in ("", "tml-wrong", "tml-spo_0000_wrong"):
        assert asker(key).post("create_session", {}).status_code == 401
    _, token = platform.context.authenticator.keys.create("reader", "mine", ("jobs:read",))
    reader = asker(f"tml-{token}")
    assert reader.http.get("/get_server_capabilities").status_code == 200
    assert reader.post("create_session", {}).status_code == 403
    operator = asker(f"tml-{OPERATOR_KEY}")
    assert operator.told("create_session", {})["session_id"].startswith("tnk_")


def test_sessions_have_a_limit_and_heartbeats_of_one_that_is_over_are_told_to_stop(
    platform: TinkerPlatform, mine: Asker, theirs: Asker
) -> None:
    opened = [mine.session() for _ in range(64)]
    refused = mine.post("create_session", {})
    assert (refused.status_code, refused.json()["code"]) == (422, "tinker_limit")
    assert opened[0] in refused.json()["detail"]
    theirs.session()
    assert mine.post("session_heartbeat", {"session_id": opened[0]}).is_success
    assert mine.post(f"sessions/{opened[0]}/finish", {}).is_success
    mine.session()

    def beat() -> httpx.Response:
        return mine.post("session_heartbeat", {"session_id": opened[0]})

    # Where the package ends its heartbeats.
    wait_until(lambda: beat().status_code == 410, "the session has ended")
    assert beat().json()["code"] == "tinker_session_over"


def test_a_key_in_tinkers_header_opens_no_other_path(platform: TinkerPlatform) -> None:
    url = platform.url.removesuffix("/tinker")
    answer = httpx.get(f"{url}/v1/jobs", headers={"X-API-Key": f"tml-{OPERATOR_KEY}"}, trust_env=False)
    assert answer.status_code == 401


def test_a_request_that_is_sent_twice_is_done_once(mine: Asker) -> None:
    model = mine.create(mine.session())
    for _ in range(3):
        mine.train(model, 1)
    mine.save(model, 3, "once")
    (found,) = mine.http.get("/training_runs").json()["training_runs"]
    assert found["training_run_id"] == model
    asked = {"model_id": model, "seq_id": 2, "adam_params": {"learning_rate": 1.0}}
    assert mine.post("optim_step", asked).json()["code"] == "tinker_request_reused"


FAULTY: list[tuple[str, Document, int, str]] = [
    ("create_model", {"session_id": "tnk_", "model_seq_id": 0, "base_model": "m"}, 422, "only LoRA"),
    ("create_model", {"session_id": "x", "model_seq_id": -1, "base_model": "m"}, 422, "model_seq_id"),
    ("optim_step", {"model_id": "x", "seq_id": 1, "adam_params": {"beta1": 1.0}}, 422, "beta1"),
    ("save_weights", {"model_id": "x", "seq_id": 1}, 422, "has a name"),
    ("load_weights", {"path": "x", "optimizer": True}, 422, "either a model"),
    ("retrieve_future", {"request_id": "x"}, 404, "no result of x"),
    ("retrieve_future", {}, 422, "request_id"),
]


def test_faulty_requests_are_told_what_is_wrong_with_them(mine: Asker) -> None:
    for where, document, status, part in FAULTY:
        answer = mine.post(where, document)
        assert (answer.status_code, part in answer.text) == (status, True), (where, answer.text)
    assert mine.http.post("/forward_backward", content=b"\xff\xff\xff").json()["code"] == "malformed_request"
    prompt = {"chunks": [{"type": "encoded_text", "tokens": IDS}]}
    top = {"sampling_session_id": "x", "seq_id": 1, "prompt": prompt, "topk_sample_logprobs": 3}
    assert "not offered" in mine.post("asample", top).text
    image = {"chunks": [{"type": "image", "data": "x"}]}
    assert mine.post("asample", {**top, "topk_sample_logprobs": 0, "prompt": image}).status_code == 422
    assert mine.post("asample", {**top, "topk_sample_logprobs": 0, "prompt_logprobs_last_n": 10**30}).status_code == 422


def test_what_cannot_be_done_is_the_result_of_its_request(mine: Asker) -> None:
    model = mine.create(mine.session())
    queued = mine.http.post("/forward_backward", content=datum(model, 1, loss="gspo").SerializeToString()).json()
    failure = mine.result(queued).json()
    assert failure["category"] == "user"
    assert "is not offered" in failure["error"]
    unnamed = mine.told("save_weights", {"model_id": model, "seq_id": 2, "path": "../up"})
    assert "is not" in mine.result(unnamed).json()["error"]
    # And the model goes on.
    assert "metrics" in mine.train(model, 3)


def test_after_a_restart_models_are_told_to_be_gone_and_go_on_from_what_was_saved(
    platform: TinkerPlatform, mine: Asker
) -> None:
    model = mine.create(mine.session())
    for seq in (1, 3):
        mine.train(model, seq)
    port = int(platform.context.settings.tinker_address.rpartition(":")[2])
    platform.process.end()
    platform.process.start(port)
    answer = None
    for _ in range(60):  # Until the orchestrator's connection is there again.
        answer = mine.post("optim_step", {"model_id": model, "seq_id": 5, "adam_params": ADAM})
        if answer.status_code != 503:
            break
        time.sleep(0.5)
    assert answer is not None
    assert answer.status_code == 404
    assert "weights/autosave" in answer.text
    session = mine.session()
    path = f"tinker://{model}/weights/autosave"
    asked = {"session_id": session, "model_seq_id": 0, "path": path, "optimizer": True}
    loaded = mine.result(mine.told("load_weights", asked)).json()
    assert loaded["model_id"] == f"{session}:train:0"
    assert "metrics" in mine.train(loaded["model_id"], 1)


def test_a_platform_without_the_service_says_so(platform: TinkerPlatform, mine: Asker) -> None:
    settings = platform.context.settings
    platform.context.settings = settings.model_copy(update={"tinker_address": ""})
    answer = mine.post("client/config", {"sdk_version": "1"})
    assert (answer.status_code, answer.json()["code"]) == (404, "tinker_not_served")


def test_polls_are_not_audited_and_changes_are(platform: TinkerPlatform, mine: Asker) -> None:
    mine.create(mine.session())
    paths = [entry.path for entry in platform.context.audit.page("", 100)[0]]
    assert any(path.endswith("/create_model") for path in paths)
    assert not any(path.endswith("/retrieve_future") for path in paths)
