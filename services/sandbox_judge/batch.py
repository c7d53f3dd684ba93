"""The verdicts of one request, while they come in; those of a composition are put together when its parts are there."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import CancelledError, Future, wait
from dataclasses import dataclass, field

from spo.tasks.scoring.composition import composed, gate_has_failed, text_for
from spo.v1.verdict_pb2 import TestSet, Verdict

# For comparisons of answers, which take microseconds.
GATE_SECONDS = 1.0


@dataclass(frozen=True)
class Batch:
    """Programs of one request; `programs[i]` gets the verdict of `futures[programs[i]]`, put together from `parts`, or
    that in `known`, which was there at once: most answers take less time than a future does."""

    programs: Sequence[str]
    futures: dict[str, Future[Verdict]]
    cancelled: threading.Event
    parts: Sequence[Batch] = ()
    known: Mapping[str, Verdict] = field(default_factory=dict)

    def verdicts(self, timeout_seconds: float | None = None) -> list[Verdict]:
        """The verdicts in the order of the programs. Raises what judging raised, TimeoutError, CancelledError."""
        known, futures = self.known, self.futures
        return [
            known[program] if program in known else futures[program].result(timeout_seconds)
            for program in self.programs
        ]

    def pending(self) -> list[Future[Verdict]]:
        """What is waited for."""
        return list(self.futures.values())

    def future_of(self, program: str) -> Future[Verdict]:
        """The future of a program's verdict, one that has ended where the verdict was there at once."""
        if program in self.futures:
            return self.futures[program]
        ended: Future[Verdict] = Future()
        ended.set_result(self.known[program])
        return ended

    def cancel(self) -> None:
        """Judge nothing more for it: what waits is dropped, what runs ends before its next test."""
        self.cancelled.set()
        for future in self.futures.values():
            future.cancel()
        for part in self.parts:
            part.cancel()


# Judges texts by the test set of a part.
JudgePart = Callable[[Sequence[str], TestSet], Batch]


def judge_by_parts(responses: Sequence[str], test_set: TestSet, language: str, judge: JudgePart) -> Batch:
    """The verdicts on responses by a composition. Raises what `judge` raises.

    Gates come first, those that compare answers are waited for, and a response that has failed one by then is not shown
    to the others. language: of the programs that parts with tests find in the responses.
    """
    parts = [part for part in test_set.composition.parts if part.HasField("verifier")]
    judged: dict[str, dict[str, Future[Verdict]]] = {response: {} for response in responses}
    batches: list[Batch] = []
    try:
        for part in sorted(parts, key=lambda part: not part.gate):
            asked = [one for one in judged if not gate_has_failed(test_set.composition, _known(judged[one]))]
            if asked:
                texts = [text_for(part, response, language) for response in asked]
                batches.append(judge(texts, part.verifier))
                for response, text in zip(asked, texts, strict=True):
                    judged[response][part.name] = batches[-1].future_of(text)
                if part.gate and part.verifier.HasField("answer"):
                    wait(batches[-1].futures.values(), GATE_SECONDS)
    except Exception:
        for batch in batches:
            batch.cancel()
        raise
    futures = {response: _whole(response, test_set, verdicts) for response, verdicts in judged.items()}
    return Batch(responses, futures, threading.Event(), batches)


def _known(verdicts: Mapping[str, Future[Verdict]]) -> dict[str, Verdict]:
    """Those that have come in by now."""
    ended = {name: one for name, one in verdicts.items() if one.done() and not one.cancelled()}
    return {name: one.result() for name, one in ended.items() if one.exception() is None}


def _whole(response: str, test_set: TestSet, verdicts: Mapping[str, Future[Verdict]]) -> Future[Verdict]:
    """The future of the whole, set by whichever part ends last."""
    whole: Future[Verdict] = Future()
    waiting = len(verdicts)
    lock = threading.Lock()

    def one_ended(_part: Future[Verdict]) -> None:
        nonlocal waiting
        with lock:
            waiting -= 1
            if waiting:
                return
        if not whole.set_running_or_notify_cancel():
            return
        try:
            whole.set_result(composed(response, test_set, {name: one.result() for name, one in verdicts.items()}))
        except (Exception, CancelledError) as error:
            whole.set_exception(error)

    for future in verdicts.values():
        future.add_done_callback(one_ended)
    return whole
