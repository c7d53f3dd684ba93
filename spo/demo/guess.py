"""A program that knows the package `openai` and nothing of the platform: a model guesses a number in three guesses.

`python guess.py` plays the game of statement.txt and prints the guesses; `python guess.py score` prints the reward of
those in answer.txt, 1 or 0. The number is hidden, from 1 to 8, or it is a sum: `27 + 82 =`.
"""

from __future__ import annotations

import re
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import openai

GUESSES = 3
ASKED = "a number from 1 to 8\n"
HIGHER, LOWER = "higher\n", "lower\n"
NUMBER = re.compile(r"-?\d{1,18}", re.ASCII)


@dataclass(frozen=True)
class Game:
    """What the model is asked, the number that is right, and what it hears where that is higher or lower."""

    asked: str
    number: int
    higher: str = HIGHER
    lower: str = LOWER


def game_of(statement: str) -> Game:
    """The game of a statement: a sum, which is said again with each answer, or a number that is its last word."""
    words = statement.split()
    if words[1:2] == ["+"]:
        return Game(statement, int(words[0]) + int(words[2]), f"higher: {statement}", f"lower: {statement}")
    return Game(ASKED, int(words[-1]))


def play(client: openai.OpenAI, game: Game) -> list[int]:
    """What the model guesses, until it is right, has no guess left or no room to come to an end; 0 is no number."""
    import openai

    said: list[Any] = [{"role": "user", "content": game.asked}]
    guesses: list[int] = []
    while len(guesses) < GUESSES:
        try:
            answer = client.chat.completions.create(model="policy", messages=said).choices[0]
        except openai.BadRequestError as error:
            if error.code != "context_length_exceeded":
                raise
            # It has said so much that it could not be answered: lost, as in the environment.
            return [*guesses, 0]
        content = answer.message.content or ""
        found = [] if answer.finish_reason == "length" else NUMBER.findall(content)
        guesses.append(int(found[-1]) if found else 0)
        if is_right(guesses, game.number) or answer.finish_reason == "length":
            break
        said.append({"role": "assistant", "content": content})
        said.append({"role": "user", "content": game.lower if guesses[-1] > game.number else game.higher})
    return guesses


def is_right(guesses: list[int], number: int) -> bool:
    """Whether the last guess is the number."""
    return guesses[-1:] == [number]


def main() -> None:
    """Play or score the game of this folder."""
    game = game_of(Path("statement.txt").read_text())
    if sys.argv[1:] == ["score"]:
        print(float(is_right([int(guess) for guess in Path("answer.txt").read_text().split()], game.number)))
        return
    # In `play`, too, as it is a second of processor time, which scoring does without.
    import openai

    print(*play(openai.OpenAI(max_retries=5), game))


if __name__ == "__main__":
    main()
