"""pi0 of the agents' demo: `python -m spo.demo.guess_model FOLDER` writes a Llama of a hundred thousand parameters.

With a folder of weight versions behind it, it prints what pi0 and each of these wins: not of games that were played,
but the chance itself, of all games that there are.

It has imitated games of other players: one in four bisects, the others guess at random and heed nothing they are told.
So it knows both, and which of them wins it does not know. A run of its own because it imports torch; 20 s of a core.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders
from tokenizers.models import WordPiece
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from spo.demo.guess import ASKED, GUESSES, HIGHER, LOWER
from spo.model.folder import read_tensors

PAD, BOS, TURN, EOS, UNKNOWN = "<pad>", "<bos>", "<turn>", "<eos>", "<unk>"
HIGHEST = 8
CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}"
    "{% if message['role'] == 'assistant' %}" + TURN + "{{ message['content'] }}" + EOS + "{% else %}"
    "{{ message['content'] }}{% endif %}{% endfor %}{% if add_generation_prompt %}" + TURN + "{% endif %}"
)
# How many of the players bisect.
SHARE = 0.25
STEPS = 400
BATCH = 64
LEARNING_RATE = 3e-3
WARMUP_STEPS = 20
IGNORED = -100


def build_guess_model(folder: Path, steps: int = STEPS) -> None:
    """Train pi0 and write it to `folder` in one rename."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    staging = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
    try:
        tokenizer = build_tokenizer()
        _train(tokenizer, steps).save_pretrained(staging)
        tokenizer.save_pretrained(str(staging))
        staging.chmod(0o755)
        os.replace(staging, folder)
    finally:
        shutil.rmtree(staging, ignore_errors=True)


def build_tokenizer() -> PreTrainedTokenizerFast:
    """A word for each thing that is said in the game, and a chat template of turns that end."""
    words = (PAD, BOS, TURN, EOS, UNKNOWN, ASKED, HIGHER, LOWER, *map(str, range(1, HIGHEST + 1)))
    vocabulary = {word: number for number, word in enumerate(words)}
    model = WordPiece(vocabulary, unk_token=UNKNOWN, continuing_subword_prefix="", max_input_chars_per_word=1 << 20)
    tokenizer = Tokenizer(model)
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=PAD,
        bos_token=BOS,
        eos_token=EOS,
        unk_token=UNKNOWN,
        additional_special_tokens=[TURN],
        chat_template=CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
        padding_side="right",
    )


def _train(tokenizer: PreTrainedTokenizerFast, steps: int) -> LlamaForCausalLM:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = LlamaForCausalLM(_architecture(tokenizer))
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, betas=(0.9, 0.98), weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min(1, (step + 1) / WARMUP_STEPS) * max(0.05, 1 - step / steps)
    )
    generator = random.Random("guess")
    model.train()
    for _ in range(steps):
        input_ids_BL, labels_BL = _batch(tokenizer, generator)
        loss = model(input_ids=input_ids_BL, labels=labels_BL).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
    model.eval()
    return model


def _architecture(tokenizer: PreTrainedTokenizerFast) -> LlamaConfig:
    return LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        # vLLM's CPU attention has no head narrower than 32.
        head_dim=32,
        max_position_embeddings=128,
        tie_word_embeddings=False,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
    )


def _batch(tokenizer: PreTrainedTokenizerFast, generator: random.Random) -> tuple[torch.Tensor, torch.Tensor]:
    """Whole games as tokens; only what is guessed is to be predicted."""
    numbers: dict[str, int] = tokenizer.get_vocab()
    rows: list[list[int]] = []
    labels: list[list[int]] = []
    for _ in range(BATCH):
        ids = [numbers[BOS], numbers[ASKED]]
        wanted = [IGNORED] * len(ids)
        for guess, answer in game(generator.randint(1, HIGHEST), generator):
            said = [numbers[guess], numbers[EOS]]
            heard = [numbers[answer]] if answer else []
            ids += [numbers[TURN], *said, *heard]
            wanted += [IGNORED, *said, *([IGNORED] * len(heard))]
        rows.append(ids)
        labels.append(wanted)
    longest = max(map(len, rows))
    padded = [row + [numbers[PAD]] * (longest - len(row)) for row in rows]
    return torch.tensor(padded), torch.tensor([row + [IGNORED] * (longest - len(row)) for row in labels])


def game(number: int, generator: random.Random) -> list[tuple[str, str]]:
    """A player's guesses of a number, each with what is answered to it: nothing where the game is over."""
    low, high = 1, HIGHEST
    bisects = generator.random() < SHARE
    played: list[tuple[str, str]] = []
    for turn in range(GUESSES):
        guess = (low + high) // 2 if bisects else generator.randint(1, HIGHEST)
        over = guess == number or turn == GUESSES - 1
        played.append((str(guess), "" if over else HIGHER if guess < number else LOWER))
        if over:
            break
        if bisects:
            low, high = (guess + 1, high) if guess < number else (low, guess - 1)
    return played


def chances(folder: Path, versions: Path) -> dict[int, float]:
    """The chance to win of pi0, as version 0, and of each version of a job's weights, sampled at temperature 1."""
    model = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    numbers: dict[str, int] = PreTrainedTokenizerFast.from_pretrained(folder).get_vocab()
    found = {0: chance(model, numbers)}
    for version in sorted(versions.iterdir()):
        for shard in version.glob("*.safetensors"):
            model.load_state_dict(read_tensors(shard), strict=False)
        found[int(version.name)] = chance(model, numbers)
    return found


@torch.inference_mode()
def chance(model: LlamaForCausalLM, numbers: dict[str, int]) -> float:
    """The chance to win a game of a number that is each as often. numbers: id of each token."""
    guesses = [numbers[str(number)] for number in range(1, HIGHEST + 1)]
    hidden_N = torch.arange(HIGHEST)
    # What has been said so far, and of each hidden number the chance that its game gets there.
    reached: dict[tuple[int, ...], torch.Tensor] = {
        (numbers[BOS], numbers[ASKED], numbers[TURN]): torch.full((HIGHEST,), 1 / HIGHEST)
    }
    won = 0.0
    for _ in range(GUESSES):
        going_on: dict[tuple[int, ...], torch.Tensor] = {}
        for said, share_N, guessed_N in zip(
            reached, reached.values(), _guessed(model, list(reached), guesses, numbers[EOS]), strict=True
        ):
            won += float((share_N * guessed_N).sum())
            for guess, token in enumerate(guesses):
                for answer, further_N in ((HIGHER, hidden_N > guess), (LOWER, hidden_N < guess)):
                    share = share_N * guessed_N[guess] * further_N
                    if share.any():
                        going_on[(*said, token, numbers[EOS], numbers[answer], numbers[TURN])] = share
        reached = going_on
    return won


def _guessed(
    model: LlamaForCausalLM, contexts: Sequence[tuple[int, ...]], guesses: Sequence[int], end: int
) -> torch.Tensor:
    """The chance of each guess, with its end, after each of the contexts, which are of one length; (contexts, N)."""
    first_CV = model(input_ids=torch.tensor(contexts)).logits[:, -1].softmax(-1)
    guessed = torch.tensor([[*context, guess] for context in contexts for guess in guesses])
    ends_C = model(input_ids=guessed).logits[:, -1].softmax(-1)[:, end]
    chance_CN: torch.Tensor = first_CV[:, list(guesses)] * ends_C.view(len(contexts), len(guesses))
    return chance_CN


if __name__ == "__main__":
    if sys.argv[2:]:
        print(json.dumps(chances(Path(sys.argv[1]), Path(sys.argv[2]))))
    else:
        build_guess_model(Path(sys.argv[1]))
