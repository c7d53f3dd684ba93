"""The toy tokenizer: exact round trip of every program, in transformers and after being saved."""

import random
from pathlib import Path

import pytest
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from spo.model.tokenizer import encode_prompt, encode_response
from spo.tasks.toy import human_solutions, sample_composition, toy_tasks
from spo.tasks.toy_tokenizer import SEPARATOR, build_tokenizer, save_tokenizer, vocabulary


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> PreTrainedTokenizerFast:
    """As the services meet it: saved and loaded again."""
    folder: Path = tmp_path_factory.mktemp("tokenizer")
    save_tokenizer(folder)
    return AutoTokenizer.from_pretrained(folder)


def test_any_program_of_the_grammar_survives_the_round_trip(tokenizer: PreTrainedTokenizerFast) -> None:
    rng = random.Random(0)
    for _ in range(500):
        for program in human_solutions(sample_composition(rng), rng):
            token_ids = encode_response(tokenizer, program)
            assert tokenizer.unk_token_id not in token_ids
            assert len(token_ids) <= 44
            assert tokenizer.decode(token_ids, skip_special_tokens=True) == program


def test_a_random_sequence_of_ordinary_tokens_decodes_to_their_concatenation(
    tokenizer: PreTrainedTokenizerFast,
) -> None:
    rng = random.Random(1)
    words = vocabulary()
    for _ in range(200):
        token_ids = [rng.randrange(5, len(words)) for _ in range(20)]
        assert tokenizer.decode(token_ids) == "".join(words[token] for token in token_ids)


def test_wrong_solutions_can_be_written_too(tokenizer: PreTrainedTokenizerFast) -> None:
    for problem in toy_tasks(40, 0, 0).train:
        for program in problem.wrong_solutions:
            assert tokenizer.decode(encode_response(tokenizer, program), skip_special_tokens=True) == program


def test_a_prompt_is_bos_words_separator_and_short(tokenizer: PreTrainedTokenizerFast) -> None:
    rng = random.Random(2)
    separator = tokenizer.convert_tokens_to_ids(SEPARATOR)
    for _ in range(2_000):
        statement = sample_composition(rng).prompt
        token_ids = encode_prompt(tokenizer, statement)
        assert token_ids[0] == tokenizer.bos_token_id
        assert token_ids[-1] == separator
        assert tokenizer.unk_token_id not in token_ids
        assert len(token_ids) <= 16
        assert tokenizer.decode(token_ids[1:-1]) == statement


def test_words_outside_the_grammar_become_unknown_instead_of_an_error(tokenizer: PreTrainedTokenizerFast) -> None:
    assert tokenizer.unk_token_id in encode_prompt(tokenizer, "écris un programme")


def test_the_vocabulary_has_no_repeats_and_fits_the_model() -> None:
    assert len(set(vocabulary())) == len(vocabulary()) == len(build_tokenizer()) <= 128
