"""A program that knows the package `openai` and nothing of the platform: a model guesses a number from 1 to 8 in three.

`python guess.py` plays the game of statement.txt and prints the guesses; `python guess.py score` prints the reward of
those in answer.txt, 1 or 0.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import openai

GUESSES = 3
ASKED = "a number from 1 to 8\n"
HIGHER, LOWER = "higher\n", "lower\n"


def play(client: openai.OpenAI, number: int) -> list[str]:
    """What the model guesses, until it is right or has no guess left."""
    said: list[Any] = [{"role": "user", "content": ASKED}]
    guesses: list[str] = []
    while len(guesses) < GUESSES:
        answer = client.chat.completions.create(model="policy", messages=said, max_tokens=4)
        guesses.append(answer.choices[0].message.content or "")
        if is_right(guesses, number):
            break
        guess = int(guesses[-1]) if guesses[-1].isdecimal() else 0
        said.append({"role": "assistant", "content": guesses[-1]})
        said.append({"role": "user", "content": LOWER if guess > number else HIGHER})
    return guesses


def is_right(guesses: list[str], number: int) -> bool:
    """Whether the last guess is the number."""
    return guesses[-1:] == [str(number)]


def main() -> None:
    """Play or score the game of this folder."""
    number = int(Path("statement.txt").read_text().split()[-1])
    if sys.argv[1:] == ["score"]:
        print(float(is_right(Path("answer.txt").read_text().split(), number)))
        return
    # A second of processor time, which scoring does without.
    import openai

    print(*play(openai.OpenAI(max_retries=5), number))


if __name__ == "__main__":
    main()
