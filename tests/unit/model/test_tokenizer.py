"""A chat template cannot hold the process that renders it."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

import pytest

from spo.errors import InvalidInput
from spo.model.tokenizer import RENDER_SECONDS, encode_prompt, load_tokenizer
from spo.testing.model_folder import write_model_without_weights

SPINNING = "{% for a in range(90000) %}{% for b in range(90000) %}{% endfor %}{% endfor %}x"


@pytest.fixture
def tokenizer(tmp_path: Path) -> Any:
    write_model_without_weights(tmp_path / "pi0")
    return load_tokenizer(tmp_path / "pi0")


def test_a_template_that_spins_is_ended(tokenizer: Any) -> None:
    tokenizer.chat_template = SPINNING
    began, before = time.thread_time(), sys.gettrace()

    with pytest.raises(InvalidInput) as caught:
        encode_prompt(tokenizer, "sum of the numbers")

    assert caught.value.code == "template_refused"
    assert time.thread_time() - began < RENDER_SECONDS + 1
    assert sys.gettrace() is before


def test_a_prompt_is_the_same_on_every_day(tokenizer: Any) -> None:
    tokenizer.chat_template = "{{ strftime_now('%d %m %Y') }}{{ messages[0].content }}"
    assert tokenizer.decode(encode_prompt(tokenizer, "sum")) == tokenizer.decode(tokenizer.encode("26 07 2024sum"))


def test_only_the_prompt_that_makes_it_spin_is_refused(tokenizer: Any) -> None:
    tokenizer.chat_template = "{% if 'sum' in messages[0].content %}" + SPINNING + "{% else %}count{% endif %}"

    assert encode_prompt(tokenizer, "count of the numbers")
    with pytest.raises(InvalidInput):
        encode_prompt(tokenizer, "sum of the numbers")


@pytest.mark.parametrize(
    "template",
    [
        "{{ raise_exception('no') }}",
        "{{ messages[0].content.foo.bar }}",
        "{{ 1 / 0 }}",
        "{% for %}",
        "{{ [1][5] + 1 }}",
        "{{ 'x' * 9999999999999 }}",
        "{{ 'x' * 9000000 }}",
    ],
)
def test_a_template_that_fails_is_a_fault_of_the_input(tokenizer: Any, template: str) -> None:
    tokenizer.chat_template = template
    with pytest.raises(InvalidInput) as caught:
        encode_prompt(tokenizer, "sum of the numbers")
    assert caught.value.code == "template_refused"


def test_the_tokens_are_those_of_the_library(tokenizer: Any) -> None:
    turn = [{"role": "user", "content": "sum of the numbers"}]

    theirs = tokenizer.apply_chat_template(turn, add_generation_prompt=True, return_dict=False)

    assert encode_prompt(tokenizer, "sum of the numbers") == list(theirs)
