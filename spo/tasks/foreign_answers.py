"""Rows of other projects that an answer decides, and rows that are conversations: what is asked, where the right answer
stands in a row, and which rule finds it in a response.

A rule that no prompt asks for makes a problem that nobody can solve, so the instruction is added where it is missing.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from spo.tasks.answer import LONGEST_ANSWER, answer_in, fault_of, number_of
from spo.tasks.records import AnswerRow
from spo.tasks.sources import GSM8K_INSTRUCTION, MARKER
from spo.v1.verdict_pb2 import AnswerComparison, AnswerExtraction, AnswerRule

Fields = Mapping[str, object]
Rule = Mapping[str, str]
Makes = Literal["problems", "experience"]

BOXED: Rule = {"extraction": "boxed", "comparison": "math"}
AFTER_HASHES: Rule = {"extraction": "after_marker", "marker": MARKER, "comparison": "numeric"}
ANSWER_LINE: Rule = {"extraction": "after_marker", "marker": "Answer:", "comparison": "math"}
WORDS_IN_TAG: Rule = {"extraction": "xml_tag", "marker": "answer", "comparison": "regular_expression"}

# verl's data sources -> how its own scorers find and compare an answer (verl, utils/reward_score).
VERL_RULES: dict[str, Rule] = {
    "openai/gsm8k": AFTER_HASHES,
    **dict.fromkeys(("lighteval/MATH", "DigitalLearningGmbH/MATH-lighteval", "HuggingFaceH4/MATH-500"), BOXED),
    **dict.fromkeys(("math_dapo", "math", "math_dapo_reasoning"), ANSWER_LINE),
    **dict.fromkeys(
        (
            *("numina_aops_forum", "numina_synthetic_math", "numina_amc_aime"),
            *("numina_synthetic_amc", "numina_cn_k12", "numina_olympiads"),
        ),
        BOXED,
    ),
    "hiyouga/geometry3k": BOXED,
    **dict.fromkeys(
        (
            *("searchR1_nq", "searchR1_triviaqa", "searchR1_popqa", "searchR1_hotpotqa"),
            *("searchR1_2wikimultihopqa", "searchR1_musique", "searchR1_bamboogle"),
        ),
        WORDS_IN_TAG,
    ),
}
# AIME of any year.
VERL_PREFIX, VERL_PREFIX_RULE = "aime", ANSWER_LINE
ANSWER_COLUMNS = ("ground_truth", "answer", "solution", "final_answer", "expected_answer")
QUESTION_COLUMNS = ("prompt", "question", "problem", "messages", "instruction", "query")
PICTURES = ("images", "image", "videos", "video", "audios", "audio")
# What published sets write where a problem has no answer to compare.
_NO_ANSWERS = frozenset({"proof", "notfound", "not found", "none", "null", "nan", "n/a", "unknown"})
# A longer text, or one of several lines, is a whole solution.
_LONGEST_BARE = 300
_IN_BOX = AnswerRule(extraction=AnswerExtraction.ANSWER_EXTRACTION_BOXED)
_ALONE = re.compile(r"\b(only|alone|just|nothing (else|but)|single (word|number|letter|line))\b", re.IGNORECASE)
# "A boxed set of bricks" asks for nothing.
_BOX = re.compile(r"\\boxed|\\fbox|boxed\{")
_ANSWER_LINE = re.compile(r"\bAnswer: ?\S")
_WORDS = re.compile(r"[^\W\d_]{2,}([ '\u2019.-]+[^\W\d_]+)*")
_LETTER = re.compile(r"\(?([A-J])\)?\.?")
_CHOICES = re.compile(r"(?:^|\s|\()A[).:].*(?:^|\s|\()B[).:]", re.DOTALL | re.MULTILINE)


@dataclass(frozen=True)
class Wish:
    """What a person says of rows that do not say it: parts of a rule, and the column of the right answer."""

    rule: Rule = field(default_factory=dict)
    answer: str | None = None


@dataclass(frozen=True)
class Taken:
    """What was made of one row: one problem, or the responses of a conversation as experience.

    added: the instruction that its prompt lacked. system: the system prompt before its question. note: what else its
    person should know.
    """

    rows: tuple[dict[str, object], ...]
    makes: Makes = "problems"
    added: str = ""
    system: str = ""
    note: str = ""


def answer_problem(fields: Fields, wish: Wish, rule: Rule | None = None, expected: object = None) -> Taken:
    """The problem of a row with a question and an answer; rule: what is known of its source, whatever a person says.

    Raises ValueError with what is missing.
    """
    statement, system = asked(fields)
    found = right_answer(fields, wish) if expected is None else expected
    described = not rule and wish.rule.get("comparison") in ("regular_expression", "json_schema")
    texts = [str(found)] if described else expected_answers(found)
    decided = dict(rule) if rule else _rule_of(f"{system}\n{statement}", texts, wish, fields)
    if decided["comparison"] == "regular_expression" and not described:
        texts = [same_words(text) for text in texts]
    for text in texts:
        _require_comparable(text, decided["comparison"])
    return answered(statement, system, {"expected": texts, **decided}, solutions_in(fields))


def answered(statement: str, system: str, answer: dict[str, object], solutions: Iterable[str] = ()) -> Taken:
    """The problem of an answer's rule, whose instruction is added where the prompt lacks it; solutions that the rule
    finds right are kept."""
    added = missing_instruction(f"{system}\n{statement}", answer)
    row: dict[str, object] = {"statement": f"{statement}\n\n{added}" if added else statement, "answer": answer}
    rule = AnswerRow.model_validate(answer).rule()
    right = [text for text in dict.fromkeys(solutions) if _is_right(rule, text)]
    if right:
        row["human_solutions"] = right
    return Taken((row,), added=added, system=system)


def _is_right(rule: AnswerRule, text: str) -> bool:
    if rule.comparison != AnswerComparison.ANSWER_COMPARISON_MATH:
        return bool(text.strip()) and fault_of(rule, text) is None
    # Mathematics is decided in a process of its own; here the same text or number is enough.
    found = answer_in(rule, text)
    if not found:
        return False
    number = number_of(found)
    return any(
        found == wanted.strip() or (number is not None and number == number_of(wanted)) for wanted in rule.expected
    )


def missing_instruction(prompt: str, answer: Mapping[str, object]) -> str:
    """What a prompt must say so that a response can be right under the rule; "" where it says so."""
    marker = str(answer.get("marker", ""))
    match answer["extraction"]:
        case "boxed":
            return "" if _BOX.search(prompt) else "Put the final answer into \\boxed{}."
        case "after_marker" if marker == MARKER and answer["comparison"] == "numeric":
            return "" if marker in prompt else GSM8K_INSTRUCTION
        case "after_marker":
            return "" if marker in prompt else f"End with a line of its own: {marker} and then the final answer."
        case "xml_tag":
            return "" if f"<{marker}>" in prompt else f"Put the final answer between <{marker}> and </{marker}>."
        case "whole":
            return "" if _ALONE.search(prompt) else "Answer with the final answer alone."
        case "first_line":
            return "" if _ALONE.search(prompt) else "Begin with a line that holds the final answer alone."
    return ""


def _rule_of(prompt: str, texts: Sequence[str], wish: Wish, fields: Fields) -> dict[str, str]:
    """The rule that a person names, its rest as the prompt asks and the answers need."""
    rule = {name: text for name, text in wish.rule.items() if text}
    if "extraction" not in rule:
        # A marker of a person's own says where the answer stands.
        rule = {**(_extraction_asked(prompt) if "marker" not in rule else {"extraction": "after_marker"}), **rule}
    if "comparison" in rule:
        return rule
    if all(_LETTER.fullmatch(text) for text in texts) and (
        str(fields.get("question_type", "")).upper() == "MCQ" or _CHOICES.search(prompt)
    ):
        return {**rule, "comparison": "choice"}
    if all(_WORDS.fullmatch(text) for text in texts):
        return {**rule, "comparison": "regular_expression"}
    numeric = rule.get("marker") == MARKER and all(number_of(text) is not None for text in texts)
    return {**rule, "comparison": "numeric" if numeric else "math"}


def _extraction_asked(prompt: str) -> dict[str, str]:
    if _BOX.search(prompt):
        return {"extraction": "boxed"}
    if MARKER in prompt:
        return {"extraction": "after_marker", "marker": MARKER}
    if "<answer>" in prompt:
        return {"extraction": "xml_tag", "marker": "answer"}
    if _ANSWER_LINE.search(prompt):
        return {"extraction": "after_marker", "marker": "Answer:"}
    return {"extraction": "boxed"}


def asks_for_a_box(prompt: str) -> bool:
    """Whether a prompt asks for the answer in LaTeX's \\boxed{}."""
    return _BOX.search(prompt) is not None


def options_asked(fields: Fields) -> str:
    """The options of the command line that say what a row's prompt asks for."""
    try:
        statement, system = asked(fields)
    except ValueError:
        return "--extraction boxed --comparison math"
    found = _extraction_asked(f"{system}\n{statement}")
    marker = f" --marker '{found['marker']}'" if "marker" in found else ""
    comparison = "numeric" if found.get("marker") == MARKER else "math"
    return f"--extraction {found['extraction']}{marker} --comparison {comparison}"


def same_words(text: str) -> str:
    """The regular expression of the same words in any case, with or without an article and marks between them."""
    words = [re.escape(word) for word in re.findall(r"\w+", re.sub(r"(?i)^(the|an?)\s+(?=\S)", "", text.strip()))]
    return r"(?i)\W*(?:(?:the|an?)\s+)?" + r"\W+".join(words) + r"\W*"


def asked(fields: Fields, names: Sequence[str] = QUESTION_COLUMNS) -> tuple[str, str]:
    """The question of a row and the system prompt before it, of text or of messages; ValueError where there is none."""
    found = next((fields[name] for name in names if fields.get(name) is not None), None)
    system = fields.get("system") or fields.get("system_prompt")
    first = system.strip() if isinstance(system, str) else ""
    if isinstance(found, str) and found.strip():
        if name := next((name for name in ("input", "context") if isinstance(fields.get(name), str)), ""):
            extra = str(fields[name]).strip()
            found = f"{found.rstrip()}\n\n{extra}" if extra and "instruction" in fields else found
        return _without_pictures(found), first
    if not isinstance(found, Sequence) or not found or isinstance(found, str):
        raise ValueError(f"no question: it is looked for in {', '.join(names)}")
    turns = turns_of(found)
    questions = [text for role, text in turns if role not in ("system", "developer")]
    if turns and turns[-1][0] == "assistant" and len(questions) > 1:
        # The last turn of a whole conversation answers what is asked before it.
        questions = questions[:-1]
    if len(questions) != 1 or not questions[0].strip():
        raise ValueError("a conversation of several turns: see docs/conversations.md")
    said = "\n".join(text for role, text in turns if role in ("system", "developer"))
    return _without_pictures(questions[0]), said or first


def turns_of(messages: Sequence[object]) -> list[tuple[str, str]]:
    """Role and text of each turn, in OpenAI's columns or ShareGPT's."""
    roles = {"human": "user", "gpt": "assistant", "chatgpt": "assistant", "bing": "assistant"}
    found = []
    for turn in messages:
        if not isinstance(turn, Mapping):
            raise ValueError("a turn of the conversation is no object")
        role = str(turn.get("role") or turn.get("from") or "")
        if turn.get("tool_calls"):
            raise ValueError("a turn calls tools: see docs/conversations.md")
        found.append((roles.get(role, role), text_of(turn.get("content", turn.get("value")))))
    return found


def text_of(content: object) -> str:
    """The text of a turn, which may stand in parts; ValueError where a part is none."""
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if isinstance(content, Sequence):
        parts = [part if isinstance(part, Mapping) else {} for part in content]
        if all(isinstance(part.get("text"), str) for part in parts):
            return "".join(str(part["text"]) for part in parts)
        kinds = sorted({str(part.get("type")) for part in parts if not isinstance(part.get("text"), str)})
        raise ValueError(f"a turn holds {', '.join(kinds)}: models here read text alone")
    raise ValueError("a turn of the conversation is no text")


def require_text_alone(fields: Fields) -> None:
    """Raises ValueError where a row has pictures or sounds, without which its question is another."""
    for name in PICTURES:
        found = fields.get(name)
        if found is not None and not (isinstance(found, Sequence) and not any(found)):
            raise ValueError(f"column {name} holds pictures or sounds: models here read text alone")


def _without_pictures(text: str) -> str:
    if found := re.search(r"<(image|video|audio)>|<\|image_\w+\|>", text):
        raise ValueError(f"the question shows {found[0]}: models here read text alone")
    return text


def right_answer(fields: Fields, wish: Wish) -> object:
    """The value of the column that holds the right answer; ValueError where there is none, or it is null."""
    reward = fields.get("reward_model")
    if wish.answer is None and isinstance(reward, Mapping) and "ground_truth" in reward:
        name, found = "reward_model.ground_truth", reward["ground_truth"]
    else:
        wanted = (wish.answer,) if wish.answer else ANSWER_COLUMNS
        name = next((name for name in wanted if name in fields), "")
        if not name:
            looked = wish.answer or ", ".join(("reward_model.ground_truth", *ANSWER_COLUMNS))
            raise ValueError(f"no answer: it is looked for in {looked}; --answer names another column")
        found = fields[name]
    if found is None:
        raise ValueError(f"column {name} is null; --answer names another column")
    return found


def expected_answers(found: object) -> list[str]:
    """The right answers of a column's value: text, a number, or a list of them. ValueError where none stands there."""
    if isinstance(found, Mapping):
        found = found.get("target", found.get("text", found.get("value")))
    values = list(found) if isinstance(found, Sequence) and not isinstance(found, str) else [found]
    if not values:
        raise ValueError("the list of right answers is empty")
    return list(dict.fromkeys(_bare_answer(value) for value in values))


def _bare_answer(value: object) -> str:
    if isinstance(value, bool):
        raise ValueError("the answer is true or false, and nothing says how a response writes it")
    if isinstance(value, float) and not math.isfinite(value):
        raise ValueError("the answer is no number")
    if not isinstance(value, str | int | float):
        raise ValueError("the answer is neither text nor a number")
    text = str(value).strip()
    if MARKER in text:
        text = text.rpartition(MARKER)[2].strip().partition("\n")[0].strip()
        if not text:
            raise ValueError(f"nothing stands after the last {MARKER} of the answer")
    elif boxed := answer_in(_IN_BOX, text):
        text = boxed
    if not any(letter.isalnum() or letter in "∅∞" for letter in text):
        raise ValueError(f"the answer {text[:40]!r} holds nothing to compare")
    if text.lower().strip(" .") in _NO_ANSWERS:
        raise ValueError(f"the answer is {text[:40]!r}: there is nothing to compare")
    if "\n" in text or len(text) > _LONGEST_BARE:
        raise ValueError(f"the answer is a whole text with neither {MARKER} nor \\boxed{{}} in it")
    return text


def _require_comparable(text: str, comparison: str) -> None:
    if len(text) > LONGEST_ANSWER:
        raise ValueError(f"the answer is longer than {LONGEST_ANSWER} characters")
    if comparison == "numeric" and number_of(text) is None:
        raise ValueError(f"the answer {text[:40]!r} is no number, which the numeric comparison needs")


def solutions_in(fields: Fields) -> list[str]:
    """What a row has of right responses: whole solutions, and the last turn of its conversation."""
    found: list[str] = []
    for name in ("solution", "completion", "response", "answer", "generated_solution", "gold_standard_solution"):
        value = fields.get(name)
        if isinstance(value, str):
            found.append(value)
        elif name == "completion" and isinstance(value, Sequence) and len(value) == 1:
            found += [text for _, text in _turns_or_none(value)]
    for name in ("messages", "conversations"):
        turns = _turns_or_none(fields.get(name))
        found += [text for role, text in turns[-1:] if role == "assistant"]
    # Where verl's own preparation of GSM8K and MATH keeps the whole solution.
    extra = fields.get("extra_info")
    kept = [extra.get(name) for name in ("answer", "solution")] if isinstance(extra, Mapping) else []
    found += [text for text in kept if isinstance(text, str)]
    return [re.sub(r"<<[^<>]*>>", "", text).strip() for text in found if text.strip()]


def _turns_or_none(messages: object) -> list[tuple[str, str]]:
    if not isinstance(messages, Sequence) or isinstance(messages, str):
        return []
    try:
        return turns_of(messages)
    except ValueError:
        return []


def verl_rule(fields: Fields, wish: Wish) -> Rule | None:
    """How verl scores a row's source, None where a person says it; ValueError for sources that verl does not score."""
    source = str(fields.get("data_source"))
    if rule := VERL_RULES.get(source):
        return rule
    if source.startswith(VERL_PREFIX):
        return VERL_PREFIX_RULE
    if wish.rule:
        return None
    raise ValueError(
        f"data source {source[:80]!r} is none that verl scores itself: say its rule, such as {options_asked(fields)}"
    )


def verl_problem(fields: Fields, wish: Wish) -> Taken:
    """The problem of a row of verl that an answer decides, by the rule of its data source."""
    reward = fields.get("reward_model")
    if isinstance(reward, Mapping) and reward.get("style") == "model":
        raise ValueError("a reward model decides in verl: see tasks.verifier in docs/verifiers.md")
    taken = answer_problem(fields, wish, verl_rule(fields, wish))
    statement = str(taken.rows[0]["statement"])
    searches = "<search>" in f"{taken.system}{statement}"
    note = "their prompt lets the model search, and no search engine answers here: see docs/conversations.md"
    return Taken(taken.rows, added=taken.added, system=taken.system, note=note if searches else "")


def choice_problem(fields: Fields, _wish: Wish) -> Taken:
    """The problem of a question with listed choices, whose answer is a label or a place among them (ARC, MMLU)."""
    statement, system = asked(fields)
    choices = fields.get("choices", fields.get("options"))
    labels: Sequence[object] = ()
    if isinstance(choices, Mapping):
        labels, choices = choices.get("label", ()), choices.get("text", ())
    if isinstance(choices, str) or not isinstance(choices, Sequence) or not 2 <= len(choices) <= 26:
        raise ValueError("choices are no list of two or more texts")
    labels = list(map(str, labels)) or [chr(ord("A") + place) for place in range(len(choices))]
    given = next((fields[name] for name in ("answerKey", "answer_index", "answer", "label") if name in fields), None)
    if isinstance(given, int) and not isinstance(given, bool) and 0 <= given < len(labels):
        given = labels[given]
    elif given in choices and given not in labels:
        given = labels[list(choices).index(given)]
    if not isinstance(given, str) or given not in labels:
        raise ValueError("the answer is none of the choices")
    listed = "\n".join(f"{label}. {text}" for label, text in zip(labels, choices, strict=False))
    answer: dict[str, object] = {"expected": [given], "extraction": "boxed", "comparison": "choice"}
    return answered(f"{statement.rstrip()}\n\n{listed}", system, answer)


def conversation(fields: Fields, _wish: Wish) -> Taken:
    """The response of a row's conversation as experience: rated where a label says so, else taken as right."""
    response, statement, system = _exchange(fields)
    label = fields.get("label")
    reward = -1.0 if label is False else 0.0
    row: dict[str, object] = {"statement": statement, "response_text": response, "reward": reward}
    note = "" if isinstance(label, bool) else "their responses count as right (reward 0); `--judge all` asks a judge"
    return Taken((row,), "experience", system=system, note=note)


def logged(fields: Fields, _wish: Wish) -> Taken:
    """A request to OpenAI's API with its response, as experience that is judged when it is imported."""
    request, response = fields.get("request", fields.get("body", fields)), fields.get("response", fields)
    if isinstance(response, Mapping) and isinstance(response.get("body"), Mapping):
        response = response["body"]
    choices = response.get("choices") if isinstance(response, Mapping) else None
    if not isinstance(request, Mapping) or not isinstance(choices, Sequence) or not choices:
        raise ValueError("a log without choices in its response")
    messages = request.get("messages", request.get("input"))
    if not isinstance(messages, Sequence) or isinstance(messages, str):
        raise ValueError("a log without the messages of its request")
    statement, system = asked({"messages": messages})
    message = choices[0].get("message") if isinstance(choices[0], Mapping) else None
    said = text_of(message.get("content")) if isinstance(message, Mapping) else ""
    if not said:
        raise ValueError("the response holds no text")
    return Taken(({"statement": statement, "response_text": said},), "experience", system=system)


def preference(fields: Fields, _wish: Wish) -> Taken:
    """The two responses of a row of preferences as experience: what was chosen is right, what was rejected is not."""
    chosen, rejected = fields["chosen"], fields["rejected"]
    if fields.get("prompt") is None and fields.get("question") is None:
        statement, system, best = _whole(chosen)
        again, _, worst = _whole(rejected)
        if statement != again:
            raise ValueError("chosen and rejected answer different questions")
    else:
        statement, system = asked(fields)
        best, worst = _last_said(chosen), _last_said(rejected)
    if not best.strip() or not worst.strip():
        raise ValueError("chosen or rejected is empty")
    if best == worst:
        raise ValueError("chosen and rejected are the same")
    rows = tuple(
        {"statement": statement, "response_text": text, "reward": reward}
        for text, reward in ((best, 0.0), (worst, -1.0))
    )
    return Taken(rows, "experience", system=system)


def _exchange(fields: Fields) -> tuple[str, str, str]:
    """Response, question and system prompt."""
    for name in ("messages", "conversations"):
        if isinstance(fields.get(name), Sequence):
            statement, system, said = _whole(fields[name])
            break
    else:
        statement, system = asked(fields)
        name = next((name for name in ("completion", "response", "output") if fields.get(name) is not None), "")
        said = _last_said(fields.get(name))
    if not said.strip():
        raise ValueError("no response: it is looked for in completion, response, output and the last turn")
    return said, statement, system


def _whole(messages: object) -> tuple[str, str, str]:
    """Question, system prompt and response of one exchange."""
    if isinstance(messages, str):
        # Anthropic's form of whole dialogues in one text.
        parts = re.split(r"\n\n(Human|Assistant): ?", messages)[1:]
        roles = {"Human": "user", "Assistant": "assistant"}
        messages = [{"role": roles[who], "content": text} for who, text in zip(parts[::2], parts[1::2], strict=True)]
    if not isinstance(messages, Sequence) or not messages:
        raise ValueError("no question: prompt is missing, and the responses are no whole conversations")
    turns = turns_of(messages)
    if turns[-1][0] != "assistant":
        raise ValueError("the conversation ends without a response, and nothing decides about one")
    statement, system = asked({"messages": messages})
    return statement.strip(), system, turns[-1][1].strip()


def _last_said(value: object) -> str:
    if isinstance(value, Sequence) and not isinstance(value, str):
        turns = turns_of(value)
        return turns[-1][1] if turns else ""
    return value if isinstance(value, str) else ""
