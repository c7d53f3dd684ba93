"""The scorers that a verifier has, by kind of test set."""

from __future__ import annotations

from services.verifier.circuit import Circuits, RetryRule
from services.verifier.composition_scorer import CompositionScorer
from services.verifier.guarded_post import GuardedPost
from services.verifier.http_scorer import HttpScorer
from services.verifier.model_scorer import ModelScorer
from services.verifier.platform_model import PlatformModel
from services.verifier.remembered import remembering
from services.verifier.settings import Settings
from services.verifier.test_set_rules import VERIFIER_VERSION, ResponseScorer
from spo.messaging.redis_client import RedisClient
from spo.rpc.address_rules import AddressRules
from spo.rpc.client import RpcClient
from spo.tasks.verifier_pool import SANDBOX_JUDGE
from spo.v1.judge_service_pb2_grpc import JudgeServiceStub


def scorers_of(settings: Settings, store: RedisClient | None = None) -> dict[str, ResponseScorer]:
    """One scorer per kind, which remembers in `store`. Raises InvalidInput on a network that is none."""
    rules = AddressRules.of(settings.verifier_http_hosts, settings.http_networks)
    post = GuardedPost(rules, settings.http_answer_bytes, settings.http_calls)
    patience = RetryRule(settings.attempts, settings.backoff_seconds, settings.failures_to_rest, settings.rest_seconds)
    circuits = Circuits(patience)
    asking: dict[str, ResponseScorer] = {
        "http": HttpScorer(post, circuits, settings),
        "model": ModelScorer(post, circuits, settings, PlatformModel(store, circuits, settings) if store else None),
    }
    if store is not None:
        asking = remembering(asking, store, settings, VERIFIER_VERSION)
    judge = RpcClient(SANDBOX_JUDGE, settings.sandbox_judge_address, JudgeServiceStub)
    return {**asking, "composition": CompositionScorer(asking, judge)}
