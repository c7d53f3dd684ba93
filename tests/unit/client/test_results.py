"""Answers as columns, frames and figures, and the bar of waits: with the packages there are, and without."""

from __future__ import annotations

import io
import json
import re
from typing import Any

import httpx
import pytest
from rich.console import Console
from typer.testing import CliRunner

import spo.cli.jobs
import spo.cli.training
from spo.cli.app import app
from spo.client import Client, models
from spo.client.models import Job, MetricSeries, PassAtK, StepEvaluation, Trajectory, columns, frame, plot
from spo.client.waiting_view import LinesNowAndThen, ProgressBar
from spo.errors import InvalidInput, PreconditionFailed
from tests.support.openapi_documents import SCHEMAS, example

SERIES = MetricSeries(steps=[1, 2], series={"reward": [-0.5, None], "loss": [1.0, 0.5]})
EVALUATED = [
    StepEvaluation.model_validate(
        {
            **dict.fromkeys(("step", "version", "distinct_solutions", "entropy", "response_tokens", "seconds"), 0),
            **dict.fromkeys(("public_only_rate", "hard_coded_rate", "problems", "samples"), 0),
            "at": "2026-01-01T00:00:00Z",
            "step": step,
            "pass_at_k": {"10": {"value": 0.5, "low": 0.4, "high": 0.6}},
        }
    )
    for step in (0, 10)
]


def test_columns_are_of_equal_length_and_name_what_lies_deeper() -> None:
    assert columns(SERIES) == {"step": [1, 2], "reward": [-0.5, None], "loss": [1.0, 0.5]}
    found = columns(EVALUATED)
    assert found["pass_at_k.10.value"] == [0.5, 0.5]
    assert {len(column) for column in found.values()} == {2}
    assert columns([]) == {}


def test_a_missing_package_is_said_with_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(name: str) -> None:
        raise ImportError(name)

    monkeypatch.setattr(models, "import_module", absent)
    for ask in (lambda: frame(SERIES), lambda: plot(SERIES)):
        with pytest.raises(PreconditionFailed, match="pip install") as refused:
            ask()
        assert refused.value.code == "package_missing"


def test_a_figure_has_a_panel_for_each_curve_that_is_there() -> None:
    figure = plot(SERIES, EVALUATED, ("reward", "loss", "no_such_curve"))
    drawn = io.BytesIO()
    figure.savefig(drawn)

    assert [panel.get_title() for panel in figure.axes] == ["held-out problems", "reward", "loss"]
    assert drawn.getvalue().startswith(b"\x89PNG")
    assert len(plot(MetricSeries()).axes) == 1
    # What a notebook asks of a cell's value.
    assert figure._repr_png_().startswith(b"\x89PNG")


def job(**changed: Any) -> Job:
    return Job.model_validate(
        example(SCHEMAS["Job"]) | {"id": "job_1", "waits": [], "failure": None, "lineage": None} | changed
    )


@pytest.mark.parametrize("terminal", [True, False])
def test_the_bar_says_how_far_a_job_is_and_is_silent_where_nobody_looks(terminal: bool) -> None:
    said = io.StringIO()
    far = {"values_done": 3, "values_total": 7, "step": 0, "steps": 5, "weight_version": 0, "evaluations": 0}
    bar = ProgressBar(Console(file=said, force_terminal=terminal, width=120))
    bar(job(state="estimating", progress=far))
    bar(job(state="running", progress=far | {"step": 2}))
    bar(job(state="succeeded", progress=far | {"step": 5}))

    assert ("job_1 succeeded: steps" in said.getvalue()) == terminal
    assert bool(said.getvalue()) == terminal


def test_a_bar_names_no_values_where_the_job_reads_none() -> None:
    said = io.StringIO()
    far = {"values_done": 0, "values_total": 0, "step": 0, "steps": 5, "weight_version": 0, "evaluations": 0}
    bar = ProgressBar(Console(file=said, force_terminal=True, width=120))
    with bar:
        bar(job(state="validating", progress=far))
    # What was shown last is drawn at the end.
    assert "job_1 validating" in said.getvalue()
    assert "values" not in said.getvalue()


def test_a_log_has_a_line_for_each_state_and_one_a_minute() -> None:
    said, now = io.StringIO(), [0.0]
    far = {"values_done": 0, "values_total": 0, "step": 0, "steps": 5, "weight_version": 0, "evaluations": 0}
    tell = LinesNowAndThen(Console(file=said), clock=lambda: now[0])
    for second, (state, step) in enumerate([("queued", 0)] * 3 + [("running", 1)] * 118):
        now[0] = float(second)
        tell(job(state=state, progress=far | {"step": step}))

    assert said.getvalue().splitlines() == [
        "job_1 queued: step 0 of 5",
        "job_1 running: step 1 of 5",
        "job_1 running: step 1 of 5",
    ]


def test_a_log_counts_values_while_they_are_estimated() -> None:
    said = io.StringIO()
    far = {"values_done": 3, "values_total": 12, "step": 0, "steps": 5, "weight_version": 0, "evaluations": 0}
    tell = LinesNowAndThen(Console(file=said))
    tell(job(state="estimating", progress=far))
    tell(job(state="running", progress=far | {"step": 2, "values_pending": True}))

    assert said.getvalue().splitlines() == [
        "job_1 estimating: values 3 of 12",
        "job_1 running: step 2 of 5 beside values 3 of 12",
    ]


def test_a_wait_ends_with_what_was_learnt() -> None:
    def after(step: int, **found: float) -> StepEvaluation:
        return EVALUATED[0].model_copy(update={"step": step, "pass_at_k": {"1": PassAtK(**found)}})

    results = [after(40, value=0.73, low=0.6, high=0.86), after(0, value=0.3, low=0.2, high=0.4)]
    assert list(spo.cli.jobs.before_and_after(results)) == ["pass@1 0.30 -> 0.73 [0.60, 0.86], better"]
    assert list(spo.cli.jobs.before_and_after(results[:1])) == []


@pytest.mark.parametrize("waits", [[], ["prompts wait for the judge, which is restarted after a fault of its own"]])
def test_the_bar_fits_eighty_columns_with_the_time_that_is_left(waits: list[str]) -> None:
    said = io.StringIO()
    far = {"values_done": 700, "values_total": 700, "step": 1000, "steps": 2000, "weight_version": 0, "evaluations": 0}
    bar = ProgressBar(Console(file=said, force_terminal=True, width=80, color_system=None))
    # The last state is drawn at once.
    bar(job(id="job_01JXXXXXXXXXXXXXXXXXXXXXXX", state="succeeded", progress=far, waits=waits))

    lines = [re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", line).strip() for line in re.split(r"[\r\n]", said.getvalue())]
    (shown,) = (line for line in lines if "1000/2000" in line)
    assert re.search(r"succeeded: steps.*━.*1000/2000 +\d:\d\d:\d\d -:--:--$", shown)
    assert len(shown) <= 80
    words = shown.partition("━")[0].strip()
    # No word is cut in two.
    assert words.endswith("...") == bool(waits)
    assert set(words.removesuffix("...").replace(",", "").split()) <= {"succeeded:", "steps", *" ".join(waits).split()}


def test_a_job_is_deleted_only_when_the_person_at_the_terminal_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    deleted: list[str] = []

    class Deleting:
        def __enter__(self) -> Deleting:
            return self

        def __exit__(self, *_: object) -> None: ...

        def delete(self, job_id: str) -> None:
            deleted.append(job_id)

    monkeypatch.setattr(spo.cli.jobs, "api", Deleting)
    monkeypatch.setattr(spo.cli.jobs, "is_at_terminal", lambda: True)
    assert CliRunner().invoke(app, ["job", "delete", "job_1"], input="n\n").exit_code == 1
    assert deleted == []
    assert CliRunner().invoke(app, ["job", "delete", "job_2"], input="y\n").exit_code == 0
    assert CliRunner().invoke(app, ["job", "delete", "job_3", "--yes"]).exit_code == 0
    monkeypatch.setattr(spo.cli.jobs, "is_at_terminal", lambda: False)
    # A script has nobody to ask.
    assert CliRunner().invoke(app, ["job", "delete", "job_4"]).exit_code == 0
    assert deleted == ["job_2", "job_3", "job_4"]


def test_a_curve_that_a_job_does_not_have_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    class Measured:
        def __enter__(self) -> Measured:
            return self

        def __exit__(self, *_: object) -> None: ...

        def metrics(self, *_: object, **__: object) -> MetricSeries:
            return MetricSeries(steps=[1], series={"reward": [-1.0]})

    monkeypatch.setattr(spo.cli.training, "api", Measured)
    assert CliRunner().invoke(app, ["job", "metrics", "job_1", "reward"]).exit_code == 0
    refused = CliRunner().invoke(app, ["job", "metrics", "job_1", "reward", "pass@1"]).exception
    assert isinstance(refused, InvalidInput)
    assert refused.code == "no_such_curve"
    assert "no curve pass@1; it has reward" in refused.message


def test_a_client_without_an_address_asks_the_platform_of_its_surroundings(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[httpx.Request] = []

    def answer(request: httpx.Request) -> httpx.Response:
        asked.append(request)
        return httpx.Response(200, json={"items": [], "next_cursor": None})

    monkeypatch.setenv("SPO_API_URL", "http://127.0.0.1:1234")
    monkeypatch.setenv("SPO_API_KEY", "of-the-surroundings")
    for place in ((), ("http://else:1",)):
        with Client(*place, transport=httpx.MockTransport(answer)) as client:
            client.jobs(limit=1)
    assert [f"{each.url.host}:{each.url.port}" for each in asked] == ["127.0.0.1:1234", "else:1"]
    assert [each.headers.get("Authorization") for each in asked] == ["Bearer of-the-surroundings", None]


def test_trajectories_go_into_a_pipe_as_a_line_of_json_each(monkeypatch: pytest.MonkeyPatch) -> None:
    row = Trajectory.model_validate(example(SCHEMAS["Trajectory"]) | {"response_text": "two\nlines", "verdict": None})

    class Asked:
        def __enter__(self) -> Asked:
            return self

        def __exit__(self, *_: object) -> None: ...

        def trajectories(self, *_: object, **__: object) -> list[Trajectory]:
            return [row, row]

    monkeypatch.setattr(spo.cli.training, "api", Asked)
    lines = CliRunner().invoke(app, ["trajectory", "ls", "job_1"], catch_exceptions=False).stdout.splitlines()

    assert [json.loads(line)["response_text"] for line in lines] == ["two\nlines"] * 2
    assert "reward (0: solved)" in CliRunner().invoke(app, ["trajectory", "ls", "job_1", "-o", "table"]).stdout


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_the_shell_is_told_how_to_complete(shell: str) -> None:
    environment = {"_SPO_COMPLETE": f"source_{shell}", "_TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION": "1"}
    told = CliRunner().invoke(app, [], prog_name="spo", env=environment)

    assert "_SPO_COMPLETE" in told.stdout
