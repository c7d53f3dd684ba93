"""People who use a served model: they ask, look whether the answer is right, and say so; some of them wrongly.

They know the platform by two addresses alone: OpenAI's API, through the unmodified `openai` package, and the judge,
which stands for their own look at an answer.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from spo.client import Client
from spo.rpc.client import RpcClient
from spo.tasks.problem import Problem, program_of
from spo.tasks.verifier_pool import SANDBOX_JUDGE
from spo.v1.judge_service_pb2 import PRIORITY_TRAINING, JudgeRequest, JudgeResponse, UploadTestsRequest
from spo.v1.judge_service_pb2_grpc import JudgeServiceStub
from spo.v1.trajectory_pb2 import Trajectory
from spo.v1.verdict_pb2 import OUTCOME_ACCEPTED

if TYPE_CHECKING:
    import openai

ASKING_AT_ONCE = 8
ASK_SECONDS = 120.0
# An engine that starts again for another model's version takes minutes on a busy machine.
RETRIES = 12
JUDGE_SECONDS = 120.0
UPLOADED_AT_ONCE = 64
CONSENT = "terms of the demo"


@dataclass(frozen=True)
class Crowd:
    """Some of the people who ask: a share of all requests, tagged with their name.

    wrong: the share of their feedback that says the opposite of the truth.
    """

    name: str
    share: float
    wrong: float


@dataclass
class CrowdCount:
    """What a crowd has asked and said."""

    answers: int = 0
    right: int = 0
    wrong_feedback: int = 0


@dataclass
class TrafficCount:
    """What a phase of traffic came to, by crowd."""

    by_crowd: dict[str, CrowdCount] = field(default_factory=dict)

    @property
    def answers(self) -> int:
        return sum(said.answers for said in self.by_crowd.values())

    @property
    def right(self) -> int:
        return sum(said.right for said in self.by_crowd.values())

    @property
    def wrong_feedback(self) -> int:
        return sum(said.wrong_feedback for said in self.by_crowd.values())


@dataclass(frozen=True)
class Answered:
    """The samples of one request, each with whether it is right."""

    completion_id: str
    texts: Sequence[str]
    right: Sequence[bool]


@dataclass(frozen=True)
class GreedyAnswer:
    """An answer without chance, and the log-prob of each of its tokens."""

    text: str
    logprobs: tuple[float, ...]


class People:
    """Clients of one served name. Use as a context manager; `ask` may be called by several threads."""

    def __init__(self, url: str, judge_address: str, model: str, problems: Sequence[Problem]) -> None:
        # Whoever asks has it; the platform itself does not need it.
        import openai

        self.model = model
        self.problems = problems
        self.openai: openai.OpenAI = openai.OpenAI(
            base_url=f"{url}/v1", api_key="none", timeout=ASK_SECONDS, max_retries=RETRIES
        )
        self.spo = Client(url, retry_seconds=ASK_SECONDS)
        self._judge = RpcClient(SANDBOX_JUDGE, judge_address, JudgeServiceStub)

    def __enter__(self) -> People:
        for start in range(0, len(self.problems), UPLOADED_AT_ONCE):
            chunk = [problem.tests for problem in self.problems[start : start + UPLOADED_AT_ONCE]]
            self._judge.call("UploadTests", UploadTestsRequest(test_sets=chunk))
        return self

    def __exit__(self, *_: object) -> None:
        self._judge.close()
        self.spo.close()
        self.openai.close()

    def use(self, crowds: Sequence[Crowd], samples: int, seed: int, told: Callable[[int, int], None]) -> TrafficCount:
        """Every problem is asked once, by one of the crowds, who say of each answer whether it is right.

        told: how many of the problems were asked. Equal seeds give equal crowds, prompts and flips.
        """
        rng = random.Random(seed)
        who = [_drawn(rng, crowds) for _ in self.problems]
        lies = [[rng.random() < crowd.wrong for _ in range(samples)] for crowd in who]
        count = TrafficCount({crowd.name: CrowdCount() for crowd in crowds})

        def one(number: int) -> Answered:
            found = self.ask(self.problems[number], who[number].name, samples, seed + number)
            for index, (right, lie) in enumerate(zip(found.right, lies[number], strict=True)):
                self.spo.serving.feedback(found.completion_id, index, thumbs="up" if right != lie else "down")
            return found

        with ThreadPoolExecutor(ASKING_AT_ONCE, thread_name_prefix="people") as pool:
            for number, found in enumerate(pool.map(one, range(len(self.problems)))):
                said = count.by_crowd[who[number].name]
                said.answers += len(found.texts)
                said.right += sum(found.right)
                said.wrong_feedback += sum(lies[number])
                told(number + 1, len(self.problems))
        return count

    def ask(self, problem: Problem, source: str, samples: int, seed: int) -> Answered:
        """Ask with consent to capture, and look at the answers. Raises what `openai` does, SpoError."""
        reply = self.openai.chat.completions.create(
            model=self.model,
            messages=[{"role": "user", "content": problem.statement}],
            n=samples,
            temperature=0.8,
            top_p=0.95,
            seed=seed,
            store=True,
            metadata={"source": source},
            extra_headers={"X-SPO-Consent": CONSENT},
        )
        texts = [choice.message.content or "" for choice in reply.choices]
        return Answered(reply.id, texts, self.judged(problem, texts))

    def ask_anything(self, text: str) -> None:
        """Ask something beyond the problems, which may be kept."""
        said: Any = [{"role": "user", "content": text}]
        self.openai.chat.completions.create(model=self.model, messages=said, max_tokens=8, store=True)

    def say_in_private(self, text: str) -> None:
        """Ask the same model something that nobody may keep."""
        self.openai.chat.completions.create(
            model=self.model,
            messages=[{"role": "user", "content": text}],
            max_tokens=8,
            metadata={"who": text},
            user=text,
        )

    def greedy(self, problems: Sequence[Problem]) -> list[GreedyAnswer]:
        """The likeliest answer to each, uncaptured: equal weights give equal answers and equal log-probs."""
        return [self._greedy(problem) for problem in problems]

    def _greedy(self, problem: Problem) -> GreedyAnswer:
        reply = self.openai.chat.completions.create(
            model=self.model,
            messages=[{"role": "user", "content": problem.statement}],
            temperature=0,
            logprobs=True,
        )
        choice = reply.choices[0]
        said = choice.logprobs.content if choice.logprobs else None
        return GreedyAnswer(choice.message.content or "", tuple(token.logprob for token in said or ()))

    def judged(self, problem: Problem, texts: Sequence[str]) -> list[bool]:
        """Whether each answer passes the problem's tests."""
        programs = [program_of(Trajectory(response_text=text), problem.response_format) for text in texts]
        request = JudgeRequest(
            programs=programs,
            language=problem.language,
            tests_digest=problem.tests_digest,
            priority=PRIORITY_TRAINING,
        )
        reply: JudgeResponse = self._judge.call("Judge", request, JUDGE_SECONDS)
        return [verdict.outcome == OUTCOME_ACCEPTED for verdict in reply.verdicts]


def _drawn(rng: random.Random, crowds: Sequence[Crowd]) -> Crowd:
    return rng.choices(crowds, [crowd.share for crowd in crowds])[0]
