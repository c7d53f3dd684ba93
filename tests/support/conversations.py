"""What conversations are sampled among in tests: an engine that says what it is told, and what a replica would hold."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

from spo.spec.tasks import ConversationSetup
from spo.tasks.toy_tokenizer import build_tokenizer
from spo.testing.runs import toy_spec
from spo.v1.prompt_pb2 import SOURCE_ONLINE, Prompt, PromptGroup, Sampling

RUN = "job_01"


@dataclass
class ScriptedEngine:
    """Answers each request with `speak(request, how many the same sample has had)`, from a thread, as an engine does.

    `fed` has every request with its answer, in order, by the sample's first seed.
    """

    speak: Callable[[Any, int], Any]
    fed: list[tuple[Any, Any]] = field(default_factory=list)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def submit(self, group: Any) -> None:
        """As EngineThread.submit."""
        threading.Thread(target=self._answer, args=(group,), daemon=True).start()

    def _answer(self, group: Any) -> None:
        future: Future[list[Any]] = group.future
        if not future.set_running_or_notify_cancel():
            return
        answers = []
        for request in group.requests:
            with self.lock:
                turn = sum(_same_sample(request, earlier) for earlier, _ in self.fed)
                answers.append(self.speak(request, turn))
                self.fed.append((request, answers[-1]))
        future.set_result(answers)

    def turns_of(self, temperature: float) -> list[tuple[Any, Any]]:
        """Requests and answers of the sample that is drawn at this temperature, which no other has."""
        return [(request, answer) for request, answer in self.fed if request.temperature == temperature]


def _same_sample(request: Any, earlier: Any) -> bool:
    return bool(request.temperature == earlier.temperature)


def assignment(engine: ScriptedEngine, max_tokens: int = 100_000, **model: Any) -> Any:
    """What a replica that serves RUN with the toy contest's tokenizer would hold."""
    tokenizer = build_tokenizer()
    sections = {"path": "/models/pi0", "max_prompt_tokens": 1000, **model}
    return SimpleNamespace(
        run_id=RUN,
        spec=toy_spec({"model": sections}),
        engine=engine,
        engine_spec=SimpleNamespace(max_tokens=max_tokens),
        tenant="",
        tokenizer=tokenizer,
        sampler="scripted",
        end_token_ids=(tokenizer.eos_token_id,),
    )


def conversation_group(
    environment: str, setup: ConversationSetup, *, samples: int = 4, max_tokens: int = 400, seed: int = 7
) -> PromptGroup:
    """A group whose samples talk to an environment."""
    return PromptGroup(
        group_id="group-1",
        run_id=RUN,
        prompt=Prompt(
            prompt_id="prompt-1", text="sum of the numbers", environment=environment, environment_json=setup.to_json()
        ),
        sampling=Sampling(
            samples=samples, temperature_min=0.1, temperature_max=0.9, top_p=1.0, max_tokens=max_tokens, seed=seed
        ),
        source=SOURCE_ONLINE,
    )


def says(text: str, tokenizer: Any, sample: Callable[..., Any], *, ended: bool = True, version: int = 0) -> Any:
    """A sample of the engine's that holds this text; `sample`: services.inference.engine.Sample."""
    token_ids: Sequence[int] = tokenizer.encode(text, add_special_tokens=False)
    ends = [tokenizer.eos_token_id] if ended else []
    tokens = (*token_ids, *ends)
    logprobs = tuple(-0.5 - index / 100 for index in range(len(tokens)))
    return sample(tokens, logprobs, ended, version, version)
