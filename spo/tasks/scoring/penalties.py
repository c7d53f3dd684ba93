"""Penalties of a composition: how much of one a response earns, between 0 and 1."""

from __future__ import annotations

import unicodedata
from functools import lru_cache

from spo.v1.verdict_pb2 import LanguagePenalty, LengthPenalty

# How the names of a script's letters begin; Japanese mixes kana with the letters of Chinese.
SCRIPTS: dict[str, tuple[str, ...]] = {
    "arabic": ("ARABIC",),
    "cjk": ("CJK",),
    "cyrillic": ("CYRILLIC",),
    "devanagari": ("DEVANAGARI",),
    "greek": ("GREEK",),
    "hangul": ("HANGUL",),
    "hebrew": ("HEBREW",),
    "kana": ("HIRAGANA", "KATAKANA", "CJK"),
    "latin": ("LATIN",),
    "thai": ("THAI",),
}
# Letters of no script, such as those of formulas.
_NEUTRAL = ("MATHEMATICAL", "DOUBLE-STRUCK", "SCRIPT", "MICRO", "MODIFIER", "FEMININE", "MASCULINE", "PLANCK", "ALEF")


def length_penalty(penalty: LengthPenalty, response: str) -> float:
    """0 up to the free characters, 1 from the most on, linear between."""
    beyond = len(response) - penalty.free_characters
    return min(1.0, max(0.0, beyond / (penalty.most_characters - penalty.free_characters)))


def language_penalty(penalty: LanguagePenalty, response: str) -> float:
    """The share of the letters that are of another script; 0 without letters."""
    beginnings = SCRIPTS[penalty.script]
    names = (_name(character) for character in response if character.isalpha())
    letters = [name for name in names if not name.startswith(_NEUTRAL)]
    return sum(not name.startswith(beginnings) for name in letters) / len(letters) if letters else 0.0


@lru_cache(maxsize=4096)
def _name(character: str) -> str:
    return unicodedata.name(character, "UNNAMED").removeprefix("FULLWIDTH ").removeprefix("HALFWIDTH ")
