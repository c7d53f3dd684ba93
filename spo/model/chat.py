"""How a job writes its prompts, where its responses end, and which tokens of a conversation are learned from; needs
no tokenizer.

Which tokens of a response are learned from: in a conversation those that the policy sampled, its actions.
Observations, which an environment wrote, are context: no log-prob of theirs is computed, compared or counted. A
response without segments is one action. An episode of several branches is one response: they stand one after the
other, each begun by a segment of the kind branch, which holds all that is read before its first own action, and no
token sees those of another branch. No torch here. Axes: T token of the response.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import accumulate, groupby, pairwise
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from spo.v1.trajectory_pb2 import (
    SEGMENT_KIND_ACTION,
    SEGMENT_KIND_BRANCH,
    SEGMENT_KIND_OBSERVATION,
    Segment,
    Trajectory,
)

TemplateArgument = bool | int | float | str | None

Mask = NDArray[np.bool_]
KINDS = frozenset({SEGMENT_KIND_ACTION, SEGMENT_KIND_OBSERVATION, SEGMENT_KIND_BRANCH})


@dataclass(frozen=True)
class ChatFormat:
    """What `spo.model.tokenizer` writes prompts and reads responses by; the fields of JobSpec's model.chat and stop."""

    template: Literal["auto", "none"] = "auto"
    system: str | None = None
    template_arguments: Mapping[str, TemplateArgument] = field(default_factory=dict)
    stop: tuple[str, ...] = ()
    reasoning: tuple[str, str] | None = ("<think>", "</think>")
    # Of chats with tools alone: neither prompts nor responses of a job depend on it.
    tool_parser: str = "auto"

    @property
    def address(self) -> str:
        """What differs from the defaults, as canonical text; "" for the defaults.

        A part of every key under which something outlives a job that depends on its prompts or its responses' ends.
        """
        usual = asdict(USUAL)
        chosen = {name: value for name, value in asdict(self).items() if value != usual[name] and name != "tool_parser"}
        return json.dumps(chosen, sort_keys=True) if chosen else ""

    def cut(self, text: str) -> str:
        """The text before the first stop string that is complete in it."""
        ends = [(start + len(stop), start) for stop in self.stop if (start := text.find(stop)) >= 0]
        return text[: min(ends)[1]] if ends else text

    def opens_reasoning(self, prompt: str) -> bool:
        """Whether the prompt ends with the beginning of reasoning, as some templates write it."""
        return self.reasoning is not None and prompt.rstrip().endswith(self.reasoning[0].rstrip())

    def reasoning_length(self, response: str, *, opened: bool = False) -> int:
        """How many characters of a response, from its beginning, are reasoning; opened: the prompt has begun it.

        Reasoning that is not ended is all there is: its drafts are no answer.
        """
        if self.reasoning is None:
            return 0
        begins, ends = self.reasoning
        before, ended, answer = response.rpartition(ends)
        is_open = begins in answer or (opened and not ended)
        return len(response) if is_open else len(before) + len(ended)


USUAL = ChatFormat()


@dataclass(frozen=True)
class Turn:
    """A segment with its text, where that begins in the response's text, and where its tokens begin and end."""

    segment: Segment
    text: str
    begins: int
    first: int
    end: int

    @property
    def is_action(self) -> bool:
        """Whether the policy sampled it."""
        return self.segment.kind == SEGMENT_KIND_ACTION


def action_mask(segments: Sequence[Segment], tokens: int) -> Mask:
    """True at the tokens that the policy sampled; (T,). The segments must hold that many tokens."""
    if not segments:
        return np.ones(tokens, dtype=np.bool_)
    kinds = np.array([segment.kind == SEGMENT_KIND_ACTION for segment in segments], dtype=np.bool_)
    return np.repeat(kinds, [segment.tokens for segment in segments])


def trained_mask(trajectory: Trajectory) -> Mask:
    """True at the response tokens that are learned from; (T,)."""
    return action_mask(trajectory.segments, len(trajectory.response_token_ids))


def is_untempered(trajectory: Trajectory) -> bool:
    """Whether a policy was sampled as it is: neither hotter nor cooler, nothing cut off."""
    return trajectory.temperature == 1 and trajectory.top_p == 1


def is_unchanged_sample(trajectory: Trajectory) -> bool:
    """Whether pi0 was sampled as it is; its log-probs are then ln pi0."""
    return is_untempered(trajectory) and trajectory.policy_version_last == 0 and bool(trajectory.sampling_logprobs)


def keep_sampled_logprobs(trajectory: Trajectory) -> bool:
    """Whether pi0 sampled it whole; then the sampler's log-probs become its reference log-probs.

    It names no model as their reference: another engine's rounding is in them, so that whoever needs those of one
    forward computes them anew.
    """
    if not is_unchanged_sample(trajectory) or len(trajectory.sampling_logprobs) != len(trajectory.response_token_ids):
        return False
    trajectory.reference_logprobs[:] = trajectory.sampling_logprobs
    trajectory.reference_hash = ""
    return True


def branch_starts(segments: Sequence[Segment]) -> tuple[int, ...]:
    """How many response tokens stand before each branch after the first; empty where there is one alone."""
    if all(segment.kind != SEGMENT_KIND_BRANCH for segment in segments):
        return ()
    begins = accumulate((segment.tokens for segment in segments), initial=0)
    kinds = (segment.kind for segment in segments)
    return tuple(start for start, kind in zip(begins, kinds, strict=False) if kind == SEGMENT_KIND_BRANCH)


def branch_lengths(trajectory: Trajectory) -> list[int]:
    """Tokens of each branch as the model reads it, the first one's with the prompt; of most responses one number."""
    counted = len(trajectory.prompt_token_ids), len(trajectory.response_token_ids)
    return lengths_of_branches(trajectory.segments, *counted)


def lengths_of_branches(segments: Sequence[Segment], prompt_tokens: int, response_tokens: int) -> list[int]:
    """`branch_lengths` of a trajectory whose tokens are counted elsewhere."""
    return [end - start for start, end in pairwise((-prompt_tokens, *branch_starts(segments), response_tokens))]


def trained_tokens(trajectory: Trajectory, response_tokens: int | None = None) -> int:
    """How many response tokens are learned from: what a length in tokens means everywhere after sampling.

    response_tokens: how many there are, where they are not here.
    """
    if not trajectory.segments:
        return len(trajectory.response_token_ids) if response_tokens is None else response_tokens
    return sum(segment.tokens for segment in trajectory.segments if segment.kind == SEGMENT_KIND_ACTION)


def turns(trajectory: Trajectory) -> list[Turn]:
    """The segments in order, with their texts and tokens; none where the response is a single turn."""
    segments = trajectory.segments
    characters = list(accumulate((segment.characters for segment in segments), initial=0))
    tokens = list(accumulate((segment.tokens for segment in segments), initial=0))
    return [
        Turn(
            segment,
            trajectory.response_text[characters[index] : characters[index + 1]],
            characters[index],
            tokens[index],
            tokens[index + 1],
        )
        for index, segment in enumerate(segments)
    ]


def reasoning_characters(trajectory: Trajectory, reasoning_length: Callable[[str, int], int]) -> int:
    """How many characters of a response are reasoning and no answer: of a conversation, of its last action.

    reasoning_length: the same of an answer's text, which begins after so many of the response's tokens.
    """
    last = next((turn for turn in reversed(turns(trajectory)) if turn.is_action), None)
    if last is None:
        return reasoning_length(trajectory.response_text, 0)
    found = reasoning_length(last.text, last.first)
    return last.begins + found if found else 0


def segments_of_mask(mask: Iterable[bool]) -> list[Segment]:
    """Segments of a mask of trained tokens, as other libraries keep it; where they stand in the text is not known."""
    return [
        Segment(kind=SEGMENT_KIND_ACTION if trained else SEGMENT_KIND_OBSERVATION, tokens=sum(1 for _ in run))
        for trained, run in groupby(map(bool, mask))
    ]


def segment_faults(segments: Sequence[Segment], tokens: int, characters: int | None) -> list[tuple[str, str]]:
    """What keeps segments from being those of a response of so many tokens and characters: pointers and reasons.

    characters None: they are not looked at, since nobody knows where the segments stand in the text.
    """
    if not segments:
        return []
    found = []
    for index, segment in enumerate(segments):
        place = f"/segments/{index}"
        if segment.kind not in KINDS:
            found.append((f"{place}/kind", "is neither an action nor an observation, and begins no branch"))
        # An action needs something to follow.
        least = int(segment.kind == SEGMENT_KIND_BRANCH)
        if segment.tokens < least:
            found.append((f"{place}/tokens", f"are fewer than {least}"))
        if segment.characters < 0:
            found.append((f"{place}/characters", "are fewer than 0"))
        if segment.HasField("score") and not 0 <= segment.score <= 1:
            found.append((f"{place}/score", "is not between 0 and 1"))
    held = sum(segment.tokens for segment in segments)
    if held != tokens:
        found.append(("/segments", f"hold {held} tokens of {tokens}"))
    said = sum(segment.characters for segment in segments)
    if characters is not None and said != characters:
        found.append(("/segments", f"hold {said} characters of {characters}"))
    if not any(segment.kind == SEGMENT_KIND_ACTION and segment.tokens > 0 for segment in segments):
        found.append(("/segments", "hold no token that the policy sampled"))
    return found
