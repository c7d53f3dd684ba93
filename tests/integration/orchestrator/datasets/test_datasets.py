"""Datasets: uploaded in parts that survive cuts and lies, reported on row by row, then named by jobs."""

from __future__ import annotations

import base64
import contextlib
import hashlib
import json
import shutil
import subprocess
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pyarrow
import pytest
from pyarrow import parquet

from services.orchestrator.container import AppContext
from spo.client import Client
from spo.errors import InvalidInput, NotFound, Unreachable
from spo.spec.job_spec import TasksSpec
from spo.testing.peers import wait_until
from tests.support import command_line

Document = dict[str, Any]

PART_TYPE = "application/offset+octet-stream"


def problem(number: int) -> Document:
    return {
        "statement": f"Print {number}.",
        "tests": [{"stdin": "", "stdout": f"{number}\n", "public": True}],
        "human_solutions": [f"print({number})"],
    }


def rows(*found: Any) -> bytes:
    return b"".join((each if isinstance(each, bytes) else json.dumps(each).encode()) + b"\n" for each in found)


def digest(part: bytes) -> str:
    return f"sha-256=:{base64.b64encode(hashlib.sha256(part).digest()).decode()}:"


def begin(api: httpx.Client, size: int, **fields: Any) -> str:
    answer = api.post("/v1/datasets", json={"name": "mine", "size_bytes": size, **fields})
    assert answer.status_code == 201, answer.text
    assert answer.headers["Location"] == f"/v1/datasets/{answer.json()['id']}"
    return str(answer.json()["id"])


def send(api: httpx.Client, dataset_id: str, offset: int, part: Any, of: str | None = None) -> httpx.Response:
    headers = {"Content-Type": PART_TYPE, "Upload-Offset": str(offset), "Content-Digest": of or digest(part)}
    return api.patch(f"/v1/datasets/{dataset_id}", content=part, headers=headers)


@pytest.fixture(autouse=True)
def examining(context: AppContext) -> Iterator[None]:
    thread = threading.Thread(target=context.datasets.run, args=(context.stop,))
    thread.start()
    yield
    context.stop.set()
    thread.join(30)
    assert not thread.is_alive()


@pytest.fixture
def uploaded(api: httpx.Client) -> Callable[..., Document]:
    def upload(body: bytes, **fields: Any) -> Document:
        dataset_id = begin(api, len(body), **fields)
        assert send(api, dataset_id, 0, body).status_code == 200

        def ended() -> Document | None:
            found: Document = api.get(f"/v1/datasets/{dataset_id}").json()
            return found if found["state"] in ("ready", "invalid") else None

        found: Document = wait_until(ended, "the report is there")
        return found

    return upload


@pytest.fixture
def context(open_context: Callable[..., AppContext]) -> AppContext:
    return open_context(max_part_bytes=1 << 16, max_dataset_bytes=1 << 20)


def test_a_dataset_comes_in_parts_and_a_job_trains_on_it(
    api: httpx.Client, context: AppContext, document: Document
) -> None:
    body = rows(*map(problem, range(12)))
    dataset_id = begin(api, len(body))

    for offset in range(0, len(body), 500):
        grown = send(api, dataset_id, offset, body[offset : offset + 500])
        assert grown.headers["Upload-Offset"] == str(min(offset + 500, len(body)))

    wait_until(lambda: api.get(f"/v1/datasets/{dataset_id}").json()["state"] == "ready", "the dataset is ready")
    report = api.get(f"/v1/datasets/{dataset_id}").json()["report"]
    assert (report["rows"], report["problems"], report["tests"], report["with_solutions"]) == (12, 12, 12, 12)
    tasks = {"kind": "dataset", "id": dataset_id, "train_problems": 8, "evaluation_problems": 4}
    job = api.post("/v1/jobs", json=document | {"tasks": tasks})
    assert job.status_code == 202, job.text
    loaded = context.library.load(context.jobs.spec(job.json()["id"]).tasks)
    assert (len(loaded.train), len(loaded.evaluation)) == (8, 4)
    assert job.json()["spec"]["tasks"]["kind"] == "dataset"


def test_parquet_and_published_schemas_are_read(uploaded: Callable[..., Document], tmp_path: Path) -> None:
    table = pyarrow.Table.from_pylist([problem(number) for number in range(3)])
    parquet.write_table(table, tmp_path / "rows.parquet")
    contest = {"description": "Add.", "public_tests": {"input": ["1 2"], "output": ["3"]}, "difficulty": 1}
    taco = {"question": "Add.", "input_output": json.dumps({"inputs": ["1 2"], "outputs": ["3"]})}
    called = {"question": "Call.", "input_output": json.dumps({"fn_name": "f", "inputs": ["1"], "outputs": ["1"]})}

    own = uploaded((tmp_path / "rows.parquet").read_bytes(), file_format="parquet")
    assert (own["state"], own["report"]["problems"]) == ("ready", 3)
    published = uploaded(rows(contest, contest), task_format="code_contests")
    assert (published["state"], published["report"]["duplicates"]) == ("ready", 1)
    assert published["report"]["difficulties"] == {"easy": 2}
    other = uploaded(rows(taco, called), task_format="taco")
    assert (other["report"]["problems"], other["report"]["left_out"]) == (1, 1)


def test_every_bad_row_is_named_and_the_dataset_cannot_be_used(
    api: httpx.Client, uploaded: Callable[..., Document], document: Document
) -> None:
    found = uploaded(rows(problem(1), b"{", {"statement": "no tests", "tests": []}, problem(2), {**problem(3), "x": 1}))

    assert found["state"] == "invalid"
    report = found["report"]
    assert (report["problems"], report["faults_total"]) == (2, 3)
    assert [fault["place"] for fault in report["faults"]] == ["line 2", "line 3", "line 5"]
    faults = [fault["message"].partition(":")[0] for fault in report["faults"]]
    assert faults == [
        "not valid JSON",
        "a problem needs tests, an answer, code_tests, arguments for the job's verifier, or the name of one",
        "x",
    ]
    assert "/" not in report["faults"][0]["place"]
    refused = api.post("/v1/jobs", json=document | {"tasks": {"kind": "dataset", "id": found["id"]}})
    assert refused.status_code == 422
    assert [fault["pointer"] for fault in refused.json()["errors"]] == ["/tasks/id"]


def test_a_share_of_solutions_that_no_problem_has_is_refused_before_the_job_fails_of_it(
    api: httpx.Client, uploaded: Callable[..., Document], document: Document
) -> None:
    taco = [
        {"question": f"Say {number}.", "input_output": json.dumps({"inputs": ["1"], "outputs": ["1"]})}
        for number in range(12)
    ]
    mix = [{"source": "online", "share": 0.5}, {"source": "human", "share": 0.5}]

    def submitted(dataset_id: str) -> httpx.Response:
        tasks = {"kind": "dataset", "id": dataset_id, "train_problems": 8, "evaluation_problems": 4}
        return api.post("/v1/jobs", json=document | {"tasks": tasks, "replay": {**document["replay"], "mix": mix}})

    without = submitted(uploaded(rows(*taco), task_format="taco")["id"])
    assert without.status_code == 422
    (fault,) = without.json()["errors"]
    assert fault["pointer"] == "/replay/mix/1"
    assert fault["message"].startswith("none of the 8 training problems comes with solutions by people")
    solved = [{**row, "solutions": json.dumps(["print(1)"])} for row in taco]
    assert submitted(uploaded(rows(*solved), task_format="taco")["id"]).status_code == 202


def test_all_faults_of_an_uploaded_row_are_told(uploaded: Callable[..., Document]) -> None:
    wrong = {"statement": 3, "tests": [{"stdin": "", "stdout": "", "stdou": ""}], "language": "rust"}
    found = uploaded(rows(problem(1), wrong, b'{"statement": "x", "statement": "y"}'))

    assert (found["state"], found["report"]["problems"], found["report"]["faults_total"]) == ("invalid", 1, 3)
    assert [(fault["place"], fault["message"]) for fault in found["report"]["faults"]] == [
        ("line 2", "statement: must be text, not a number"),
        ("line 2", "tests/0/stdou: is no field here"),
        ("line 3", "not valid JSON: 'statement' appears twice in one object"),
    ]


@pytest.mark.parametrize("body", [b"\x00" * 400, b"PAR1" + b"\xff" * 400 + b"PAR1"], ids=["zeros", "parquet"])
def test_a_file_that_is_no_table_breaks_nothing(uploaded: Callable[..., Document], body: bytes) -> None:
    assert uploaded(body, file_format="parquet")["state"] == "invalid"
    assert uploaded(rows(problem(1)))["state"] == "ready"


def test_a_fault_of_ours_makes_one_dataset_invalid_and_stops_no_other(
    uploaded: Callable[..., Document], monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: Any) -> Any:
        raise RuntimeError("a defect")

    with monkeypatch.context() as patched:
        patched.setattr("services.orchestrator.datasets.report_on", broken)
        assert uploaded(rows(problem(1)))["state"] == "invalid"

    assert uploaded(rows(problem(2)))["state"] == "ready"


def test_a_part_counts_only_with_its_digest_in_its_place_and_once(api: httpx.Client, context: AppContext) -> None:
    body = rows(problem(1), problem(2))
    dataset_id = begin(api, len(body))

    def code(answer: httpx.Response) -> tuple[int, str]:
        return answer.status_code, answer.json()["code"]

    assert code(send(api, dataset_id, 0, body[:50], of=digest(b"other"))) == (422, "part_digest_mismatch")
    assert code(send(api, dataset_id, 10, body[:50])) == (409, "upload_offset_mismatch")
    assert api.get(f"/v1/datasets/{dataset_id}").json()["uploaded_bytes"] == 0
    assert send(api, dataset_id, 0, body[:50]).status_code == 200
    assert code(send(api, dataset_id, 0, body[:50])) == (409, "upload_offset_mismatch")
    assert code(send(api, dataset_id, 50, body)) == (409, "upload_overflow")
    with context.datasets.file_of(context.datasets.get(dataset_id)).open("ab") as file:
        file.write(b"what a crash left behind")
    assert send(api, dataset_id, 50, body[50:]).status_code == 200
    assert context.datasets.file_of(context.datasets.get(dataset_id)).read_bytes() == body
    assert code(send(api, dataset_id, len(body), b"x")) == (409, "upload_complete")
    assert list((context.datasets.files.root / dataset_id).glob("part-*")) == []


def test_too_much_is_refused_and_leaves_no_bytes(api: httpx.Client, context: AppContext) -> None:
    large = api.post("/v1/datasets", json={"name": "mine", "size_bytes": 1 << 30})
    assert (large.status_code, large.json()["code"]) == (422, "dataset_too_large")
    dataset_id = begin(api, 1 << 20)

    def without_a_length() -> Iterator[bytes]:
        for _ in range(40):
            yield b"x" * 8192

    assert send(api, dataset_id, 0, b"x" * (1 << 17)).json()["code"] == "body_too_large"
    # The server may close the connection on whoever goes on sending.
    with contextlib.suppress(httpx.TransportError):
        assert send(api, dataset_id, 0, without_a_length(), of=digest(b"")).json()["code"] == "body_too_large"
    assert [file.name for file in (context.datasets.files.root / dataset_id).iterdir()] == []


def test_addresses_are_not_fetched(api: httpx.Client) -> None:
    answer = api.post("/v1/datasets", json={"name": "x", "size_bytes": 1, "url": "http://169.254.169.254/"})

    assert (answer.status_code, answer.json()["code"]) == (422, "fetch_refused")
    assert [fault["pointer"] for fault in answer.json()["errors"]] == ["/url"]


def test_a_tenants_datasets_are_absent_for_others(context: AppContext) -> None:
    mine = context.datasets.create("mine", "jsonl", "jsonl", 1, "red")
    part = context.datasets.begin_part(mine.id, "red", 0)
    part.write_bytes(b"{")
    context.datasets.add_part(mine.id, 0, part)

    assert [each.id for each in context.datasets.page("red", "", 10)[0]] == [mine.id]
    assert context.datasets.page("blue", "", 10)[0] == []
    with pytest.raises(InvalidInput, match="cannot be used") as refused:
        context.datasets.require_usable(TasksSpec(kind="dataset", id=mine.id), "blue")
    assert refused.value.violations[0].message == f"there is no dataset {mine.id}"


def test_a_dataset_is_deleted_when_no_unfinished_job_uses_it(
    api: httpx.Client, context: AppContext, document: Document, uploaded: Callable[..., Document]
) -> None:
    dataset = uploaded(rows(*map(problem, range(12))))
    address = f"/v1/datasets/{dataset['id']}"
    tasks = {"kind": "dataset", "id": dataset["id"], "train_problems": 8, "evaluation_problems": 4}
    job = api.post("/v1/jobs", json=document | {"tasks": tasks}).json()["id"]

    refused = api.delete(address)
    assert (refused.status_code, refused.json()["code"]) == (409, "dataset_in_use")
    assert job in refused.json()["detail"]
    assert api.post(f"/v1/jobs/{job}/cancel").status_code == 202
    with pytest.raises(NotFound):
        context.datasets.delete(dataset["id"], "another tenant", context.jobs.users_of)
    file = context.datasets.file_of(context.datasets.get(dataset["id"]))
    assert file.exists()
    assert api.delete(address).status_code == 204

    assert not file.parent.exists()
    assert [api.get(address).status_code, api.delete(address).status_code] == [404, 404]
    assert api.get("/v1/datasets").json()["items"] == []
    late = api.post("/v1/jobs", json=document | {"tasks": tasks})
    assert (late.status_code, late.json()["code"]) == (422, "dataset_unusable")


def test_an_upload_is_deleted_and_takes_no_more_parts(api: httpx.Client, context: AppContext) -> None:
    dataset_id = begin(api, 10)
    assert send(api, dataset_id, 0, b"12345").status_code == 200
    part = context.datasets.begin_part(dataset_id, None, 5)
    assert api.delete(f"/v1/datasets/{dataset_id}").status_code == 204

    assert send(api, dataset_id, 5, b"67890").status_code == 404
    with pytest.raises(NotFound):
        context.datasets.add_part(dataset_id, 5, part)
    assert not part.parent.exists()


def test_a_part_whose_dataset_goes_while_it_arrives_is_refused(api: httpx.Client, context: AppContext) -> None:
    first, second = begin(api, 10), begin(api, 10)

    def arriving() -> Iterator[bytes]:
        yield b"12345"
        assert httpx.delete(f"{api.base_url}/v1/datasets/{first}", trust_env=False, timeout=30).status_code == 204
        yield b"67890"

    assert send(api, first, 0, arriving(), of=digest(b"1234567890")).status_code == 404
    # As a deletion leaves it that has not come to the record yet.
    shutil.rmtree(context.datasets.files.root / second)
    late = send(api, second, 0, b"12345")
    assert (late.status_code, late.json()["code"]) == (404, "dataset_not_found")
    assert [path for path in context.datasets.files.root.rglob("*") if path.is_file()] == []


def test_datasets_are_listed_page_by_page_newest_first(api: httpx.Client) -> None:
    ids = [begin(api, 5, name=f"n{number}") for number in range(5)]
    listed: list[str] = []
    cursor = ""
    while cursor is not None:
        page = api.get("/v1/datasets", params={"limit": 2, "cursor": cursor}).json()
        listed += [each["id"] for each in page["items"]]
        cursor = page["next_cursor"]

    assert listed == sorted(ids, reverse=True)


def test_an_upload_that_was_cut_off_goes_on_where_it_was(
    api: httpx.Client, context: AppContext, tmp_path: Path
) -> None:
    file = tmp_path / "tasks.jsonl"
    file.write_bytes(rows(*map(problem, range(50))))
    sent = []

    class Cutting(httpx.HTTPTransport):
        def handle_request(self, request: httpx.Request) -> httpx.Response:
            if request.method == "PATCH":
                sent.append(request.headers["Upload-Offset"])
                if len(sent) == 3:
                    raise httpx.ReadError("cut", request=request)
            answer = super().handle_request(request)
            if len(sent) == 2 and request.method == "PATCH":
                answer.read()
                raise httpx.ReadError("the answer is lost", request=request)
            return answer

    with Client(str(api.base_url), transport=Cutting(), retry_seconds=0) as client:
        with pytest.raises(Unreachable):
            client.datasets.upload(file, part_bytes=1000)
        (begun,) = client.datasets.all()
        assert begun.uploaded_bytes == 2000
        with pytest.raises(Unreachable):
            client.datasets.upload(file, resume=begun.id, part_bytes=1000)
        client.datasets.upload(file, resume=begun.id, part_bytes=1000)
        found = client.datasets.wait(begun.id, 30)

    assert (found.state, found.report and found.report.problems) == ("ready", 50)
    assert context.datasets.file_of(context.datasets.get(found.id)).read_bytes() == file.read_bytes()


def test_the_command_line_uploads_lists_shows_and_deletes(api: httpx.Client, tmp_path: Path) -> None:
    file = tmp_path / "tasks.jsonl"
    file.write_bytes(rows(problem(1), b"{"))

    def spo(*words: str) -> subprocess.CompletedProcess[str]:
        return command_line.spo("dataset", *words, environment={"SPO_API_URL": str(api.base_url)})

    refused = spo("upload", str(file))
    assert refused.returncode == 3, refused.stderr
    assert "line 2: not valid JSON" in refused.stdout
    file.write_bytes(rows(problem(1)))
    good = spo("upload", str(file), "--name", "good", "-o", "json")
    assert good.returncode == 0, good.stderr
    assert [each["name"] for each in json.loads(spo("ls", "-o", "json").stdout)] == ["good", "tasks"]
    made = json.loads(good.stdout)["id"]
    assert json.loads(spo("show", made, "-o", "json").stdout)["report"]["rows"] == 1
    assert json.loads(spo("delete", made, "-o", "json").stdout) == [{"deleted": made}]
    assert [each["name"] for each in json.loads(spo("ls", "-o", "json").stdout)] == ["tasks"]
