"""What services and models have said of a response is remembered, and some of it is asked for a second time."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

from blake3 import blake3

from services.verifier import redis_keys as own_keys
from services.verifier.settings import Settings
from services.verifier.test_set_rules import ResponseScorer
from spo import redis_keys
from spo.observability import metrics
from spo.observability.logs import get_logger
from spo.service.verdict_cache import VerdictCache, VerdictStore
from spo.spec.reward import reaches
from spo.tasks.problem import tests_digest
from spo.v1.verdict_pb2 import OUTCOME_ACCEPTED, OUTCOME_WRONG_ANSWER, Outcome, PartScore, TestSet, Verdict

log = get_logger("remembered")

# A response whose second look ends differently gets so many looks in all.
MOST_LOOKS = 4


@dataclass(frozen=True)
class RememberingScorer:
    """Asks a scorer about what the cache does not know. behaviour: what decides beside the test set."""

    scorer: ResponseScorer
    cache: VerdictCache
    behaviour: str
    recheck_rate: float

    async def verdicts(
        self, responses: Sequence[str], test_set: TestSet, language: str = "", look: int = 0
    ) -> list[Verdict]:
        """One verdict per response. Raises what the scorer raises; then nothing is remembered."""
        keys = {response: self._key(response, test_set) for response in dict.fromkeys(responses)}
        known = await asyncio.to_thread(self.cache.find, keys)
        missing = [response for response in keys if response not in known]
        if missing:
            first = await self.scorer.verdicts(missing, test_set, language, look)
            fresh = dict(zip(missing, first, strict=True))
            await self._look_again(fresh, keys, test_set, language)
            await asyncio.to_thread(self._remember, fresh, keys)
            known |= fresh
        return [known[response] for response in responses]

    async def _look_again(
        self, fresh: dict[str, Verdict], keys: dict[str, str], test_set: TestSet, language: str
    ) -> None:
        """Ask again about those that their keys sample, the same ones on every replica, and put the mean in place."""
        looks = {response: [fresh[response]] for response in fresh if self._sampled(keys[response])}
        for look in range(1, MOST_LOOKS):
            asked = [response for response, seen in looks.items() if look == 1 or _differ(seen)]
            if not asked:
                return
            for response, verdict in zip(
                asked, await self.scorer.verdicts(asked, test_set, language, look), strict=True
            ):
                looks[response].append(verdict)
                fresh[response] = _mean(looks[response], test_set.pass_score)
            if look == 1:
                differing = [seen for seen in looks.values() if _differ(seen)]
                metrics.JUDGE_RECHECKED_PROGRAMS.inc(len(looks))
                metrics.JUDGE_FLAKY_PROGRAMS.inc(len(differing))
                for seen in differing:
                    log.warning("a second look ended differently", scores=[round(one.score, 3) for one in seen])

    def _remember(self, fresh: dict[str, Verdict], keys: dict[str, str]) -> None:
        for response, verdict in fresh.items():
            self.cache.put(keys[response], verdict)

    def _key(self, response: str, test_set: TestSet) -> str:
        said = blake3(response.encode("utf-8", "surrogatepass")).hexdigest()
        return own_keys.remembered(redis_keys.digest(said, tests_digest(test_set), self.behaviour))

    def _sampled(self, key: str) -> bool:
        return int(key[-8:], 16) < self.recheck_rate * (1 << 32)


def remembering(
    scorers: dict[str, ResponseScorer], store: VerdictStore, settings: Settings, version: str
) -> dict[str, ResponseScorer]:
    """The scorers, each with its memory in Redis."""
    cache = VerdictCache(
        store,
        settings.cache_seconds,
        settings.cache_bytes,
        order=own_keys.remembered_order(),
        held=own_keys.remembered_bytes(),
    )
    voting = f"{settings.model_temperature:g} {settings.model_tokens}"
    return {
        kind: RememberingScorer(
            scorer, cache, f"{version} {voting}" if kind == "model" else version, settings.recheck_rate
        )
        for kind, scorer in scorers.items()
    }


def _differ(seen: Sequence[Verdict]) -> bool:
    return len({verdict.outcome for verdict in seen}) > 1


def _mean(seen: Sequence[Verdict], pass_score: float) -> Verdict:
    """The verdict of several looks: scores and parts are means, and who ends otherwise than the mean differs."""
    verdict = Verdict()
    verdict.CopyFrom(seen[0])
    verdict.score = fmean(one.score for one in seen)
    right = reaches(verdict.score, pass_score)
    verdict.outcome = OUTCOME_ACCEPTED if right else OUTCOME_WRONG_ANSWER
    names = [part.name for part in seen[0].parts]
    if all([part.name for part in one.parts] == names for one in seen):
        del verdict.parts[:]
        scores = zip(*([part.score for part in one.parts] for one in seen), strict=True)
        verdict.parts.extend(PartScore(name=name, score=fmean(each)) for name, each in zip(names, scores, strict=True))
    verdict.tests_passed = int(right)
    verdict.runs = len(seen)
    verdict.differing_runs = sum(one.outcome != verdict.outcome for one in seen)
    if verdict.differing_runs:
        told = ", ".join(f"{Outcome.Name(one.outcome).removeprefix('OUTCOME_').lower()} {one.score:g}" for one in seen)
        verdict.detail = f"looks: {told}"
    return verdict
