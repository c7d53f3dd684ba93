"""Sessions: whose they are, how many models they may have, and when they end."""

from __future__ import annotations

import time
from typing import cast

import pytest

from services.tinker.sessions import Sessions, TrainedModel
from services.tinker.shared_model import TrainingAdapter
from spo.errors import InvalidInput, NotFound, ResourceExhausted

NO_ADAPTER = cast(TrainingAdapter, None)


def sessions(silence: float = 60.0) -> Sessions:
    return Sessions(
        silence, most_models=3, most_models_per_tenant=2, most_sessions_per_tenant=3, most_samplers_per_tenant=2
    )


def train(kept: Sessions, tenant: str, session: str, number: int) -> str:
    kept.require_room(tenant)
    model = TrainedModel(f"{session}:train:{number}", session, tenant, NO_ADAPTER)
    kept.add_model(model)
    return model.id


def test_a_tenant_has_so_many_models_and_all_together_have_so_many() -> None:
    kept = sessions()
    mine, theirs, others = (kept.open(tenant) for tenant in ("mine", "theirs", "others"))
    train(kept, "mine", mine, 0)
    train(kept, "mine", mine, 1)
    with pytest.raises(ResourceExhausted, match="2 training clients of yours"):
        train(kept, "mine", mine, 2)
    train(kept, "theirs", theirs, 0)
    with pytest.raises(ResourceExhausted, match="3 in all"):
        train(kept, "others", others, 0)


def test_a_session_that_is_done_or_silent_ends_with_its_models_and_samplers() -> None:
    kept = sessions()
    done, going = kept.open("t"), kept.open("t")
    model = train(kept, "t", done, 0)
    sampler = kept.add_sampler("t", done, 0, "")
    assert kept.take_ended() == []
    kept.beat("t", done, finish=True)
    assert [each.id for each in kept.take_ended()] == [model]
    for attempt in (lambda: kept.require("t", done), lambda: kept.sampler("t", sampler)):
        with pytest.raises(NotFound):
            attempt()
    kept.require("t", going)
    silent = sessions(silence=-1.0)
    session = silent.open("t")
    silent.take_ended()
    with pytest.raises(NotFound):
        silent.beat("t", session)


def test_a_tenant_has_so_many_sessions_and_samplers_and_is_told_what_to_close() -> None:
    kept = sessions()
    first, *_ = [kept.open("mine") for _ in range(3)]
    with pytest.raises(InvalidInput, match=f"finish one .*{first}") as refused:
        kept.open("mine")
    assert refused.value.code == "tinker_limit"
    kept.beat("mine", first, finish=True)
    second = kept.open("mine")

    for number in (0, 1):
        kept.add_sampler("mine", second, number, f"tinker://{number}")
    with pytest.raises(InvalidInput, match=f"2 samplers of yours.*{second}"):
        kept.add_sampler("mine", second, 2, "")
    assert kept.add_sampler("mine", second, 1, "tinker://1")
    kept.drop_samplers("mine", "tinker://0")
    assert kept.add_sampler("mine", second, 2, "")
    theirs = kept.open("theirs")
    assert kept.add_sampler("theirs", theirs, 0, "")


def test_a_session_lives_by_heartbeats_and_one_without_ends() -> None:
    kept = sessions(silence=0.2)
    beaten, silent = kept.open("t"), kept.open("t")
    ends = time.monotonic() + 0.5
    while time.monotonic() < ends:
        kept.beat("t", beaten)
        kept.take_ended()
        time.sleep(0.01)
    kept.require("t", beaten)
    with pytest.raises(NotFound):
        kept.require("t", silent)


def test_a_sampler_is_opened_once_and_for_one_thing() -> None:
    kept = sessions()
    session = kept.open("t")
    assert kept.add_sampler("t", session, 0, "") == kept.add_sampler("t", session, 0, "")
    with pytest.raises(InvalidInput):
        kept.add_sampler("t", session, 0, "tinker://x")


@pytest.mark.parametrize("model_id", ["", "tnk_x:train:0", "../../etc", "tnk_01M84V14PDXG1G2ACJASA3ANCC:train:0"])
def test_a_model_of_no_session_is_not_there(model_id: str) -> None:
    with pytest.raises(NotFound, match="weights/autosave"):
        sessions().require_model("t", model_id)
