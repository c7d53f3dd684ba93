"""What is checked before a job is accepted: the spec, its model folder and its problems, all faults at once."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from services.orchestrator.datasets.library import TaskLibrary
from services.orchestrator.lifecycle.model_check import ModelCheck
from spo.errors import FieldViolation, InvalidInput
from spo.rpc.address_rules import AddressRules
from spo.spec.job_spec import JobSpec, parse_job_spec
from spo.spec.verifier import HttpVerifier, ModelVerifier, verifiers_in
from spo.tasks.problem import TaskSets

MAX_DEPTH = 32


@dataclass(frozen=True)
class SpecCheck:
    """What a spec must pass, whether it is submitted or made by a fork."""

    library: TaskLibrary
    model: ModelCheck
    addresses: AddressRules

    def accept(self, body: bytes, admitted: Callable[[JobSpec], JobSpec] = lambda spec: spec) -> JobSpec:
        """Return the resolved spec of a request body; `admitted` refuses what is not the caller's, and resolves names.

        Raises InvalidInput: code "malformed_json" (HTTP 400), or as `require_possible`.
        """
        document = parse_json(body)
        if isinstance(document, dict):
            # As a resolved spec comes back: it may be submitted as it is.
            document.pop("warnings", None)
        spec = admitted(parse_job_spec(document))
        self.require_possible(spec)
        return spec

    def require_possible(self, spec: JobSpec) -> None:
        """Refuse a spec unless its problems are there, and its model can serve them.

        Raises InvalidInput (code "invalid_job_spec") with a pointer to each fault, NotReady when the machine has no
        time to find out.
        """
        tasks = None
        violations: list[FieldViolation] = []
        try:
            tasks = self._problems(spec)
        except InvalidInput as error:
            violations += error.violations or [FieldViolation("/tasks/path", error.message)]
        violations = [*self.model.at_submit(spec, tasks), *violations, *self._faults_of_addresses(spec)]
        violations += _sources_that_stay_empty(spec, tasks)
        if violations:
            raise InvalidInput(
                "the job cannot run as it is specified", code="invalid_job_spec", violations=tuple(violations)
            )

    def _faults_of_addresses(self, spec: JobSpec) -> Iterator[FieldViolation]:
        """What verifiers would refuse to call; by which address a name is reached, they find out when they call it."""
        for pointer, verifier in verifiers_in(spec.tasks.verifier):
            match verifier:
                case HttpVerifier():
                    address, field = verifier.url, "url"
                case ModelVerifier(address=str(address)):
                    field = "address"
                case _:
                    continue
            try:
                self.addresses.require_named(address, f"/tasks/{pointer}/{field}")
            except InvalidInput as error:
                yield from error.violations

    def _problems(self, spec: JobSpec) -> TaskSets:
        tasks = self.library.load(spec.tasks)
        if not tasks.train:
            raise InvalidInput("there is no training problem in it")
        return tasks


def _sources_that_stay_empty(spec: JobSpec, tasks: TaskSets | None) -> list[FieldViolation]:
    """Shares of a batch that no problem would ever fill: the job would fail at its first step."""
    if tasks is None or not tasks.train or not spec.trainer.steps:
        return []
    right = spec.offline.human_solutions and any(problem.human_solutions for problem in tasks.train)
    wrong = spec.offline.wrong_human_solutions and any(problem.wrong_solutions for problem in tasks.train)
    return [
        FieldViolation(
            f"/replay/mix/{index}",
            f"none of the {len(tasks.train)} training problems comes with solutions by people, which this share is "
            "drawn from",
        )
        for index, part in enumerate(spec.replay.mix)
        if part.source == "human" and part.share > 0 and not (right or (wrong and not part.correct_only))
    ]


def parse_json(body: bytes) -> Any:
    """Decode a JSON body. Raises InvalidInput (code "malformed_json").

    NaN, integers of more than 64 bits, a key twice and absurd depth are refused as well.
    """
    try:
        document = json.loads(body, parse_constant=_refuse_constant, parse_int=_integer, object_pairs_hook=_unique)
        _check_depth(document, 0)
    except (ValueError, RecursionError) as error:
        reason = "nested too deep" if isinstance(error, RecursionError) else str(error)
        raise InvalidInput(f"the body is not valid JSON: {reason[:200]}", code="malformed_json") from None
    return document


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not a number in JSON")


def _integer(text: str) -> int:
    number = int(text)
    if abs(number) >= 2**63:
        raise ValueError(f"{text[:30]} needs more than 64 bits")
    return number


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    members = dict(pairs)
    if len(members) < len(pairs):
        raise ValueError("a key appears twice in one object")
    return members


def _check_depth(node: Any, depth: int) -> None:
    if depth > MAX_DEPTH:
        raise ValueError(f"nested deeper than {MAX_DEPTH}")
    for child in node.values() if isinstance(node, dict) else node if isinstance(node, list) else ():
        _check_depth(child, depth + 1)
