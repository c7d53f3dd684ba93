"""Compositions of which a part asks outside: it is scored here, the sandbox judge is asked about the other parts."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence

from services.verifier.test_set_rules import KINDS, ResponseScorer
from spo.errors import NotFound
from spo.rpc.client import RpcClient
from spo.rpc.long_calls import judge
from spo.tasks.problem import tests_digest
from spo.tasks.scoring.composition import composed, gate_has_failed, text_for
from spo.tasks.verifier_pool import kind_of
from spo.v1.judge_service_pb2 import PRIORITY_TRAINING, JudgeRequest, UploadTestsRequest
from spo.v1.verdict_pb2 import Part, TestSet, Verdict

_GATE, _QUICK, _ASKING = range(3)


class CompositionScorer:
    """Puts verdicts together; gates come first, then what takes the sandbox, then what asks outside."""

    def __init__(self, scorers: Mapping[str, ResponseScorer], judges: RpcClient) -> None:
        self._scorers = dict(scorers)
        self._judge = judges

    async def verdicts(
        self, responses: Sequence[str], test_set: TestSet, language: str = "", look: int = 0
    ) -> list[Verdict]:
        """One verdict per response; one that fails a gate is shown to no later part. Raises what the parts raise."""
        judged: dict[str, dict[str, Verdict]] = {response: {} for response in responses}
        parts = [part for part in test_set.composition.parts if part.HasField("verifier")]
        for part in sorted(parts, key=_turn):
            asked = [one for one, known in judged.items() if not gate_has_failed(test_set.composition, known)]
            texts = {one: text_for(part, one, language) for one in asked}
            unique = list(dict.fromkeys(texts.values()))
            if not unique:
                break
            by_text = dict(zip(unique, await self._part(unique, part.verifier, language), strict=True))
            for one, text in texts.items():
                judged[one][part.name] = by_text[text]
        return [composed(response, test_set, judged[response]) for response in responses]

    async def _part(self, texts: Sequence[str], verifier: TestSet, language: str) -> Sequence[Verdict]:
        if (kind := kind_of(verifier)) in KINDS:
            return await self._scorers[kind].verdicts(texts, verifier, language)
        return await asyncio.to_thread(self._of_judge, texts, verifier, language)

    def _of_judge(self, texts: Sequence[str], verifier: TestSet, language: str) -> Sequence[Verdict]:
        request = JudgeRequest(
            programs=texts, language=language, tests_digest=tests_digest(verifier), priority=PRIORITY_TRAINING
        )
        try:
            reply = judge(self._judge, request)
        except NotFound:
            self._judge.call("UploadTests", UploadTestsRequest(test_sets=[verifier]))
            reply = judge(self._judge, request)
        return list(reply.verdicts)


def _turn(part: Part) -> int:
    if part.gate:
        return _GATE
    return _ASKING if kind_of(part.verifier) in KINDS else _QUICK
