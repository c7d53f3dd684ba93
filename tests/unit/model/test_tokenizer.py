"""A chat template cannot hold the process that renders it."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

import pytest

from spo.errors import InvalidInput
from spo.model.tokenizer import RENDER_SECONDS, encode_prompt, load_tokenizer
from spo.testing.runs import write_model_without_weights

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


@pytest.mark.parametrize(
    "step",
    [
        "(8 + messages|length) ** (9 ** 8)",
        "9 ** 9 ** 9 ** 9 ** 9",
        "('x' * (messages|length * 2 ** 31))|length",
        "(2 ** 31 * 'x')|length",
        "([1] * 2 ** 31)|length",
        "range(99999)|list * 99999",
        "('%' ~ (3000000000 * messages|length) ~ 'd') % 1",
        "'%*d' % (3000000000, 1)",
        "'%s%999999999d'|format(1, 1)",
        "'{:3000000000}'.format(1)",
        "'{:{}}'.format(1, 3000000000)",
        "'x'.center(3000000000)",
        "'x'|center(3000000000)",
        "'x'.zfill(3000000000)",
        "'x'|indent(3000000000, true)",
        "('a' * 400000)|replace('', 'b' * 400000)",
        "('a' * 400000).replace('a', 'b' * 400000)",
        "('b' * 400000).join('a' * 400000)",
        "(['a' * 900000] * 90000)|join|length",
    ],
)
def test_no_single_step_of_a_template_takes_for_ever_or_all_memory(tokenizer: Any, step: str) -> None:
    tokenizer.chat_template = "{{ " + step + " }}{{ messages[0].content }}"
    began = time.thread_time()

    with pytest.raises(InvalidInput) as caught:
        encode_prompt(tokenizer, "sum of the numbers")

    assert caught.value.code == "template_refused"
    assert time.thread_time() - began < RENDER_SECONDS + 1


@pytest.mark.parametrize(
    "doubling",
    [
        "{% set ns = namespace(x='x') %}{% for i in range(60) %}{% set ns.x = ns.x ~ ns.x %}{% endfor %}",
        "{% set ns = namespace(x='x') %}{% for i in range(60) %}{% set ns.x = ns.x + ns.x %}{% endfor %}",
        "{% set ns = namespace(x=9) %}{% for i in range(60) %}{% set ns.x = ns.x * ns.x %}{% endfor %}",
        "{% set x = 'x' * 900000 %}{% for i in range(99999) %}{{ x }}{% endfor %}",
        "{% macro m(x) %}{{ x }}{{ x }}{% endmacro %}{% set ns = namespace(x='x') %}"
        "{% for i in range(60) %}{% set ns.x = m(ns.x) %}{% endfor %}",
        "{% set ns = namespace(x='x') %}{% for i in range(60) %}{% set y %}{{ ns.x }}{{ ns.x }}{% endset %}"
        "{% set ns.x = y %}{% endfor %}",
    ],
)
def test_no_template_doubles_what_it_has_without_end(tokenizer: Any, doubling: str) -> None:
    tokenizer.chat_template = doubling + "{{ messages[0].content }}"
    with pytest.raises(InvalidInput):
        encode_prompt(tokenizer, "sum of the numbers")


def test_what_real_templates_do_stays_as_it_was(tokenizer: Any) -> None:
    tokenizer.chat_template = (
        "{{ 'a-b'.replace('-', '+') }}{{ 'x'|center(5) }}{{ ['1', '2']|join(',') }}{{ 2 ** 10 % 7 }}{{ '%02d' % 7 }}"
        "{{ 'é' ~ 1 ~ none }}{{ '{:>4}'.format(1) }}{{ 'a\nb'|indent(2) }}{{ '-' * 3 }}{{ ', '.join(['c', 'd']) }}"
        "{{ [{'n': 1}, {'n': 2}]|join('/', attribute='n') }}{{ [1] + [2] }}{{ 3.14159|round(2) }}{{ 123456|center(8) }}"
    )

    rendered = tokenizer.decode(encode_prompt(tokenizer, "sum"))

    expected = (
        "a+b  x  1,2"
        + "2"
        + "07"
        + "é1None"
        + "   1"
        + "a\n  b"
        + "---"
        + "c, d"
        + "1/2"
        + "[1, 2]"
        + "3.14"
        + " 123456 "
    )
    assert rendered == tokenizer.decode(tokenizer.encode(expected))


def test_the_tokens_are_those_of_the_library(tokenizer: Any) -> None:
    turn = [{"role": "user", "content": "sum of the numbers"}]

    theirs = tokenizer.apply_chat_template(turn, add_generation_prompt=True, return_dict=False)

    assert encode_prompt(tokenizer, "sum of the numbers") == list(theirs)
