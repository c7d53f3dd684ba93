"""`spo verifier calibrate` with a real verifier and a judge at a real HTTP server."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

from typer.testing import CliRunner

from services.verifier.stage import VerifierScheduler, VerifierService
from spo.cli.app import app
from spo.rpc.server import RpcServer
from spo.v1.judge_service_pb2_grpc import add_JudgeServiceServicer_to_server
from tests.integration.verifier.conftest import RewardServer, answer

DIGITS = ">\n4\n<"
RESPONSES = {"four": 1, "4": 1, "five": 0}


def test_a_judge_that_believes_digits_alone_is_told_from_the_labels(
    server: RewardServer, schedulers: Callable[..., VerifierScheduler], tmp_path: Path
) -> None:
    server.reply = lambda asked: answer(
        choices=[{"message": {"content": f"Score: {9 if DIGITS in asked['messages'][0]['content'] else 2}/10"}}]
    )
    door = RpcServer("127.0.0.1", 0)
    add_JudgeServiceServicer_to_server(VerifierService(schedulers()), door.server)
    door.start()
    examples, judge = tmp_path / "examples.jsonl", tmp_path / "judge.yaml"
    rows = ({"statement": "2 + 2", "response": text, "label": label} for text, label in RESPONSES.items())
    examples.write_text("\n".join(map(json.dumps, rows)))
    address = server.url.removesuffix("/score")
    judge.write_text(f"{{kind: model, rubric: 'Is {{response}} right?', address: '{address}', model: judge}}")
    options = [str(judge), "--verifier", door.address]

    shown = CliRunner().invoke(app, ["verifier", "calibrate", str(examples), *options, "-o", "json"])
    door.stop(1)

    assert shown.exit_code == 0, shown.output
    found = json.loads(shown.stdout)
    assert (found["right_and_passed"], found["right_and_failed"], found["wrong_and_failed"]) == (1, 1, 1)
    assert found["auc"] == 0.75
    assert [(each["low"], each["mean_label"]) for each in found["bins"]] == [(0.2, 0.5), (0.9, 1.0)]
