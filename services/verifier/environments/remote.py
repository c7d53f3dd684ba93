"""Environments in another process: asked by the same contract, and trusted with nothing but their own episodes."""

from __future__ import annotations

import base64
import json
from dataclasses import asdict

from services.verifier.environments.environment import Reply, Setup, State
from spo.errors import InternalError
from spo.rpc.client import RpcClient
from spo.spec.reward import score_in_range
from spo.v1.environment_service_pb2 import BeginRequest, BeginResponse, Observation, StepRequest, StepResponse, Turn
from spo.v1.environment_service_pb2_grpc import EnvironmentServiceStub
from spo.v1.verdict_pb2 import OUTCOME_ACCEPTED, OUTCOME_WRONG_ANSWER, Verdict

MARGIN_SECONDS = 1.0
_SHOWN = 500


class RemoteEnvironment:
    """One environment of a server that the operator has named; its state travels inside ours, which is signed."""

    def __init__(self, name: str, address: str) -> None:
        self.name = name
        self._client = RpcClient(f"environment {name}", address, EnvironmentServiceStub, is_ours=False)

    def begin(self, setup: Setup, seed: int) -> Reply:
        """The first observation. Raises what the server raises, Unreachable while it is away."""
        request = BeginRequest(environment=self.name, environment_json=_written(setup), seeds=[seed])
        found: BeginResponse = self._client.call("Begin", request, _deadline(setup))
        return self._reply(list(found.observations))

    def step(self, setup: Setup, state: State, action: str) -> Reply:
        """What follows on an action. Raises as `begin`."""
        turn = Turn(state=base64.b64decode(state["remote"]), action=action)
        request = StepRequest(environment=self.name, environment_json=_written(setup), turns=[turn])
        found: StepResponse = self._client.call("Step", request, _deadline(setup))
        return self._reply(list(found.observations))

    def _reply(self, found: list[Observation]) -> Reply:
        if len(found) != 1:
            raise self._broken(f"gave {len(found)} observations for one episode")
        (said,) = found
        return Reply(
            text=said.text,
            state={} if said.done else {"remote": base64.b64encode(said.state).decode()},
            done=said.done,
            score=said.score if said.HasField("score") else None,
            verdict=self._checked(said.verdict) if said.HasField("verdict") else None,
            label=said.label,
        )

    def _checked(self, verdict: Verdict) -> Verdict:
        """Only what a verdict on an episode may say."""
        if verdict.outcome not in (OUTCOME_ACCEPTED, OUTCOME_WRONG_ANSWER):
            raise self._broken(f"gave a verdict with the outcome {verdict.outcome}")
        checked = Verdict(outcome=verdict.outcome, detail=verdict.detail[:_SHOWN], runs=1)
        checked.judge_version = verdict.judge_version[:100] or self.name
        if verdict.HasField("score"):
            score = score_in_range(verdict.score)
            if score is None:
                raise self._broken(f"gave a score of {verdict.score}, which is not between 0 and 1")
            checked.score = score
        return checked

    def _broken(self, what: str) -> InternalError:
        return InternalError(f"environment {self.name} {what}", code="environment_broken")


def _written(setup: Setup) -> str:
    document = asdict(setup)
    del document["seconds"]
    return json.dumps(document, sort_keys=True, separators=(",", ":"))


def _deadline(setup: Setup) -> float:
    return max(MARGIN_SECONDS, setup.seconds - MARGIN_SECONDS)
