"""`spo verifier calibrate`: how well a model as judge agrees with people."""

from __future__ import annotations

import json
import os
from collections import defaultdict
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer
import yaml
from pydantic import ValidationError

from spo.console import Output, console, print_document, print_rows
from spo.errors import FieldViolation, InvalidInput, NotFound
from spo.local.state import running_platforms
from spo.rpc.client import RpcClient
from spo.rpc.token import show_token
from spo.service.settings import PlatformSettings
from spo.spec.verifier import ModelVerifier
from spo.tasks.calibration import calibration_of
from spo.tasks.verifier_pool import VERIFIER
from spo.v1.judge_service_pb2 import PRIORITY_EVALUATION, JudgeRequest, JudgeResponse, UploadTestsRequest
from spo.v1.judge_service_pb2_grpc import JudgeServiceStub
from spo.v1.verdict_pb2 import ModelScore, TestSet

CALL_SECONDS = 3600.0

verifier = typer.Typer(no_args_is_help=True, help="Verifiers: how far to trust one.")


@verifier.command("calibrate")
def calibrate(
    examples: Annotated[Path, typer.Argument(help="JSON lines: statement, response, label (0 to 1), reference.")],
    judge: Annotated[Path, typer.Argument(help="YAML file with a job's section tasks.verifier, of kind model.")],
    where: Annotated[str, typer.Option("--verifier", help="host:port; default: the one that runs here.")] = "",
    job: Annotated[str, typer.Option("--job", help="A running job whose pi0 judges, without an address.")] = "",
    output: Annotated[Output, typer.Option("--output", "-o", help="How to print.")] = Output.TABLE,
) -> None:
    """Score labelled examples and tell agreement, confusion, order and what each score stands for."""
    rows = read_examples(examples)
    asked = read_judge(judge)
    groups: dict[tuple[str, str], list[dict[str, Any]]] = defaultdict(list)
    for row in rows:
        groups[row["statement"], row["reference"]].append(row)
    show_token(PlatformSettings().rpc_token.get_secret_value())
    client = RpcClient(VERIFIER, where or _running(), JudgeServiceStub)
    for (statement, reference), theirs in groups.items():
        model = ModelScore(
            rubric=asked.rubric,
            statement=statement,
            reference=reference,
            address=asked.address or "",
            model=asked.model,
            votes=asked.votes,
        )
        _score(client, TestSet(model=model, pass_score=asked.pass_score), theirs, job)
    client.close()
    found = calibration_of([row["score"] for row in rows], [row["label"] for row in rows], asked.pass_score)
    if output is not Output.TABLE:
        print_document(asdict(found), output)
        return
    told = asdict(found)
    bins = told.pop("bins")
    for name, value in told.items():
        console.print(f"{name.replace('_', ' ')}: {value if isinstance(value, int | None) else round(value, 3)}")
    print_rows(bins, ("low", "examples", "mean_score", "mean_label"), output)


def read_judge(path: Path) -> ModelVerifier:
    """The model as judge that a file describes. Raises InvalidInput with a pointer to each fault."""
    try:
        return ModelVerifier.model_validate(yaml.safe_load(path.read_text(encoding="utf-8")))
    except ValidationError as error:
        faults = [("/".join(("", *map(str, each["loc"]))), each["msg"]) for each in error.errors()]
    except (yaml.YAMLError, UnicodeError) as error:
        faults = [("", str(error)[:200])]
    violations = tuple(FieldViolation(pointer, message) for pointer, message in faults)
    raise InvalidInput(f"{path} describes no model as judge", code="invalid_job_spec", violations=violations)


def read_examples(path: Path) -> list[dict[str, Any]]:
    """The labelled examples of a file. Raises InvalidInput naming each line that is none."""
    rows, faults = [], []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
            label = float(row["label"])
            if not 0 <= label <= 1 or not isinstance(row["response"], str):
                raise ValueError("the label must be from 0 to 1, the response a text")
            statement, reference = str(row.get("statement", "")), str(row.get("reference", ""))
            rows.append({"statement": statement, "reference": reference, "response": row["response"], "label": label})
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            faults.append(FieldViolation(f"/{number}", f"{type(error).__name__}: {error}"[:200]))
    if faults or not rows:
        message = f"{path}: {len(faults)} lines are no labelled examples" if faults else f"{path} holds no example"
        raise InvalidInput(message, code="malformed_task", violations=tuple(faults[:20]))
    return rows


def _score(client: RpcClient, test_set: TestSet, rows: list[dict[str, Any]], job: str) -> None:
    (digest,) = client.call("UploadTests", UploadTestsRequest(test_sets=[test_set])).digests
    responses = list(dict.fromkeys(row["response"] for row in rows))
    request = JudgeRequest(
        programs=responses, language="text", tests_digest=digest, priority=PRIORITY_EVALUATION, run_id=job
    )
    reply: JudgeResponse = client.call("Judge", request, CALL_SECONDS)
    scores = {response: verdict.score for response, verdict in zip(responses, reply.verdicts, strict=True)}
    for row in rows:
        row["score"] = scores[row["response"]]


def _running() -> str:
    if named := os.environ.get("SPO_VERIFIER_ADDRESS"):
        return named
    for state in running_platforms(Path(os.environ.get("SPO_LAUNCHER_RUNS_PATH", "runs"))):
        for service in state["services"]:
            if service["name"] == VERIFIER:
                return str(service["address"])
    raise NotFound("no platform runs here: `spo up` starts one, --verifier names another's", code="platform_not_found")
