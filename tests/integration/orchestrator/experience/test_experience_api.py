"""The experience store over a live orchestrator: import with a report by row, listing, export, rejudging, pruning."""

from __future__ import annotations

import io
import json
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pyarrow
import pytest
from pyarrow import parquet

from services.orchestrator.container import AppContext
from services.orchestrator.datasets import prompt_of
from spo import redis_keys
from spo.experience.columns import StoredTrajectory
from spo.experience.store import Origin
from spo.spec.job_spec import TasksSpec
from spo.tasks.load import load_tasks
from spo.testing.peers import ServiceDoubles
from spo.v1.prompt_pb2 import SOURCE_ONLINE
from spo.v1.trajectory_pb2 import FINISH_REASON_STOP, Trajectory
from spo.v1.verdict_pb2 import OUTCOME_ACCEPTED, OUTCOME_WRONG_ANSWER, Verdict
from tests.support import command_line

Document = dict[str, Any]
TASKS = TasksSpec(kind="toy", train_problems=6, evaluation_problems=3)
PROBLEMS = load_tasks(TASKS).train
JSONL = {"Content-Type": "application/x-ndjson"}
PARQUET = {"Content-Type": "application/vnd.apache.parquet"}


def row(number: int = 0, **fields: Any) -> Document:
    return {"statement": PROBLEMS[number].statement, "response_text": f"right {number}", **fields}


def lines(*rows: Document) -> bytes:
    return b"".join(json.dumps(each).encode() + b"\n" for each in rows)


def put(api: httpx.Client, body: bytes, headers: dict[str, str] = JSONL, **options: Any) -> httpx.Response:
    tasks = {} if "job" in options else {"tasks": TASKS.model_dump_json()}
    parameters = {"name": "theirs", **tasks, **options}
    return api.post("/v1/experience/import", params=parameters, content=body, headers=headers)


def faults(response: httpx.Response) -> list[tuple[str, str]]:
    assert response.status_code == 422, response.text
    assert response.headers["content-type"] == "application/problem+json"
    return [(each["pointer"], each["message"].partition(":")[0]) for each in response.json()["errors"]]


def stored(api: httpx.Client, **filters: Any) -> list[Document]:
    found: list[Document] = api.get("/v1/experience/rows", params=filters).json()["items"]
    return found


def parquet_of(**columns: Any) -> bytes:
    target = io.BytesIO()
    parquet.write_table(pyarrow.table(columns), target)
    return target.getvalue()


def test_rows_without_a_reward_are_judged_and_those_with_one_are_believed(
    api: httpx.Client, peers: ServiceDoubles
) -> None:
    body = lines(
        row(0),
        row(1, response_text="wrong"),
        row(2, reward=-0.25, licence="CC0"),
        {"prompt_id": PROBLEMS[3].problem_id, "response_text": "right as well"},
    )

    report = put(api, body, licence="").json()

    assert (report["rows"], report["stored"], report["refused"], report["judged"]) == (4, 4, 0, 3)
    assert peers.judge.programs == 3
    assert {PROBLEMS[0].tests_digest} <= peers.judge.uploaded
    by_prompt = {each["prompt_id"]: each for each in stored(api)}
    assert by_prompt[PROBLEMS[0].problem_id]["reward"] == 0
    assert by_prompt[PROBLEMS[1].problem_id]["outcome"] == "wrong_answer"
    believed = by_prompt[PROBLEMS[2].problem_id]
    assert (believed["reward"], believed["outcome"], believed["licence"]) == (-0.25, None, "CC0")


def test_the_same_file_again_changes_nothing_and_equal_rows_are_one(api: httpx.Client) -> None:
    body = lines(row(0), row(0), row(1))

    first, second = put(api, body).json(), put(api, body).json()

    assert first == second
    assert (first["stored"], first["duplicates"]) == (2, 1)
    assert len(stored(api)) == 2


def test_every_bad_row_is_named_and_nothing_is_stored_unless_the_good_are_wanted(api: httpx.Client) -> None:
    bad = [
        {"statement": PROBLEMS[0].statement},
        row(0, statement="a problem of nobody's"),
        {"response_text": "right"},
        row(0, prompt_id="0" * 64, statement=""),
        row(0, reward=0.5),
        row(0, reward=-1e9),
        row(0, reward="high"),
        row(0, response_text="x" * ((1 << 20) + 1)),
        row(0, response_text="x" * (5 << 20)),
        row(0, response_token_ids=[1, 2]),
        row(0, surprise=1),
        row(0, response_text="half a character \ud800"),
    ]
    body = lines(row(0), *bad) + b'{"statement": NaN}\n[1]\nnot json\n' + b"[" * 100_000 + b"\n"

    refused = put(api, body)
    found = dict(faults(refused))
    kept = put(api, body, keep_good=True).json()

    assert found == {
        "/rows/2/response_text": "missing_field",
        "/rows/3/statement": "unknown_problem",
        "/rows/4/statement": "missing_field",
        "/rows/5/prompt_id": "unknown_problem",
        "/rows/6/reward": "reward_out_of_range",
        "/rows/7/reward": "reward_out_of_range",
        "/rows/8/reward": "malformed_row",
        "/rows/9/response_text": "oversize_row",
        "/rows/10": "oversize_row",
        "/rows/11/reference_hash": "missing_field",
        "/rows/12/surprise": "unknown_field",
        "/rows/13": "malformed_row",
        "/rows/14": "malformed_row",
        "/rows/15": "malformed_row",
        "/rows/16": "malformed_row",
        "/rows/17": "malformed_row",
    }
    assert "nothing is stored" in refused.json()["detail"]
    assert (kept["stored"], kept["refused"]) == (1, 16)
    assert len(kept["faults"]) == 16
    assert len(stored(api)) == 1


def test_other_reward_ranges_come_in_by_a_declared_map(api: httpx.Client) -> None:
    report = put(api, lines(row(0, reward=1), row(1, reward=0.25)), reward_scale=1, reward_shift=-1)

    assert report.status_code == 201, report.text
    assert sorted(each["reward"] for each in stored(api)) == [-0.75, 0.0]
    assert faults(put(api, lines(row(0, reward=1)), reward_scale=2)) == [("/rows/1/reward", "reward_out_of_range")]
    assert faults(put(api, lines(row(0)), judging="never")) == [("/rows/1/reward", "missing_field")]


def test_tokens_of_another_model_are_refused_where_a_model_is_named(
    api: httpx.Client, context: AppContext, document: Document
) -> None:
    job = api.post("/v1/jobs", json=document).json()["id"]
    tokens = {"prompt_token_ids": [1], "response_token_ids": [2, 3], "reference_hash": "f" * 64}

    refused = put(api, lines(row(0, **tokens)), job=job)

    assert faults(refused) == [("/rows/1/reference_hash", "foreign_tokenizer")]
    assert put(api, lines(row(0, **tokens))).status_code == 201, "without a model the tokens are checked when used"


@pytest.mark.parametrize(
    "body",
    [
        b"PAR1 but not really PAR1",
        b"",
        parquet_of(statement=["a"], response_text=[{"nested": {"deeper": 1}}]),
        parquet_of(statement=[[["list of lists"]]], response_text=["x"]),
        parquet_of(statement=["a"], response_text=pyarrow.array([{"a": 1}], pyarrow.map_(pyarrow.string(), "int8"))),
        parquet_of(statement=["a"], response_text=pyarrow.array([b"\x80\x04pickle"], pyarrow.binary())),
        parquet_of(day=pyarrow.array([0], pyarrow.date32())),
    ],
    ids=["magic only", "empty", "struct", "list of lists", "map", "binary", "date"],
)
def test_parquet_with_surprises_is_refused_as_a_whole(api: httpx.Client, body: bytes) -> None:
    refused = put(api, body, PARQUET, keep_good=True)

    assert (refused.status_code, refused.json()["code"]) == (422, "bad_upload")
    assert stored(api) == []


def test_a_parquet_that_unpacks_to_too_much_is_refused_and_the_orchestrator_lives(api: httpx.Client) -> None:
    word = "x" * (1 << 20)
    bomb = parquet_of(
        response_text=pyarrow.DictionaryArray.from_arrays(pyarrow.array([0] * 5000, "int32"), pyarrow.array([word]))
    )
    assert len(bomb) < 1 << 20

    refused = put(api, bomb, PARQUET)

    assert refused.json()["code"] == "bad_upload"
    assert api.get("/healthz").is_success


def test_a_truncated_or_flipped_parquet_never_gets_in(api: httpx.Client) -> None:
    whole = parquet_of(statement=[PROBLEMS[0].statement] * 50, response_text=[f"right {n}" for n in range(50)])
    assert put(api, whole, PARQUET).json()["stored"] == 50

    for cut in (1, 4, 7):
        damaged = whole[: len(whole) * cut // 8]
        assert put(api, damaged, PARQUET).status_code == 422
    assert len(stored(api)) == 50


def test_what_is_exported_can_be_imported_again(api: httpx.Client, tmp_path: Path) -> None:
    put(api, lines(row(0), row(1, response_text="wrong"), row(2, reward=-0.5)))

    for kind, headers in (("jsonl", JSONL), ("parquet", PARQUET)):
        sent = api.post("/v1/experience/export", json={"run": "theirs", "format": kind})
        again = put(api, sent.content, headers, name=f"again-{kind}")
        assert again.json()["stored"] == 3, again.text
        parents = {parent for each in stored(api, run=f"again-{kind}") for parent in each["parents"]}
        assert parents == {each["trajectory_id"] for each in stored(api, run="theirs")}
    only_right = api.post("/v1/experience/export", json={"run": "theirs", "right": True})
    assert len(only_right.content.splitlines()) == 1


def store_run(
    context: AppContext,
    run: str,
    texts: list[str],
    *,
    right: bool = True,
    tests_digest: str = "",
    environment: str = "",
) -> None:
    """As the replay buffer stores a job's trajectories on the first problem."""
    prompt = prompt_of(PROBLEMS[0], context.jobs.spec(run))
    prompt.environment = environment
    prompt.tests_digest = tests_digest or prompt.tests_digest
    rows = [
        StoredTrajectory(
            Trajectory(
                trajectory_id=f"traj_{run}_{number}",
                run_id=run,
                prompt_id=prompt.prompt_id,
                source=SOURCE_ONLINE,
                response_text=text,
                response_token_ids=[1, 2],
                finish_reason=FINISH_REASON_STOP,
                reference_hash="a" * 64,
                reward=0.0 if right else -1.0,
                verdict=Verdict(outcome=OUTCOME_ACCEPTED if right else OUTCOME_WRONG_ANSWER, judge_version="test"),
            ),
            prompt,
            "float32",
        )
        for number, text in enumerate(texts)
    ]
    context.experience.write(Origin(run, "run", "toy", "a" * 64), "part-1", rows)


@pytest.fixture
def job(api: httpx.Client, document: Document) -> str:
    return str(api.post("/v1/jobs", json=document).json()["id"])


def test_new_tests_give_new_verdicts_under_a_lineage_of_their_own(
    api: httpx.Client, context: AppContext, job: str, peers: ServiceDoubles
) -> None:
    store_run(context, job, ["right", "fooled weak tests"], tests_digest="weak tests")
    requested = {"run": job, "job": job, "name": "stricter"}

    looked = api.post("/v1/experience/rejudge", json={**requested, "dry_run": True}).json()
    done = api.post("/v1/experience/rejudge", json=requested).json()
    again = api.post("/v1/experience/rejudge", json={**requested, "run": "stricter"}).json()

    assert looked["run"] is None
    assert (done["looked_at"], done["judged"], done["newly_accepted"], done["newly_rejected"]) == (2, 2, 0, 1)
    assert done["changed"] == looked["changed"]
    assert (done["changed"][0]["before"], done["changed"][0]["after"]) == ("accepted", "wrong_answer")
    rows = {each["response_text"]: each for each in stored(api, run="stricter")}
    assert rows["fooled weak tests"]["reward"] == -1
    assert rows["fooled weak tests"]["parents"] == [f"traj_{job}_1"]
    listed = api.get("/v1/experience", params={"run": "stricter"}).json()["items"][0]
    assert (listed["kind"], listed["parents"]) == ("rejudge", [job])
    assert again["judged"] == 0, "already judged by these tests and this judge"
    assert len(stored(api, run=job)) == 2, "what was judged before stays as it was"


def test_another_judge_is_reason_enough_to_judge_again(
    api: httpx.Client, context: AppContext, job: str, peers: ServiceDoubles
) -> None:
    store_run(context, job, ["right after all"], right=False)
    assert api.post("/v1/experience/rejudge", json={"job": job}).json()["judged"] == 0

    peers.judge.version = "better"
    report = api.post("/v1/experience/rejudge", json={"job": job}).json()

    assert (report["judged"], report["newly_accepted"]) == (1, 1)


def test_a_conversation_is_judged_again_by_other_tests_alone(
    api: httpx.Client, context: AppContext, job: str, peers: ServiceDoubles
) -> None:
    peers.judge.version = "better"
    for tests_digest, judged in (("", 0), ("older", 1)):
        store_run(context, job, ["right"], tests_digest=tests_digest, environment="retry")
        assert api.post("/v1/experience/rejudge", json={"job": job, "name": "anew"}).json()["judged"] == judged
    columns = api.get(f"/v1/experience/rows/{stored(api, run='anew')[0]['trajectory_id']}").json()["columns"]
    assert columns["environment"] == "retry"


def test_the_store_is_listed_counted_and_shown(api: httpx.Client, context: AppContext, job: str) -> None:
    store_run(context, job, [f"right {number}" for number in range(5)])
    put(api, lines(row(1, response_text="wrong")), name="theirs", licence="CC-BY-4.0")

    runs = {each["run"]: each for each in api.get("/v1/experience").json()["items"]}
    counts = api.get("/v1/experience/stats").json()
    shown = api.get(f"/v1/experience/rows/traj_{job}_3").json()

    assert (runs[job]["kind"], runs[job]["trajectories"], runs[job]["complete"]) == ("run", 5, False)
    assert (runs["theirs"]["licence"], runs["theirs"]["complete"]) == ("CC-BY-4.0", True)
    assert (counts["trajectories"], counts["right"], counts["prompts"]) == (6, 5, 2)
    assert counts["sources"] == {"online": 5, "other_run": 1}
    assert (shown["run"], shown["columns"]["response_text"]) == (job, "right 3")
    page = api.get("/v1/experience/rows", params={"run": job, "limit": 2}).json()
    rest = api.get("/v1/experience/rows", params={"run": job, "limit": 10, "cursor": page["next_cursor"]}).json()
    assert len({each["trajectory_id"] for each in page["items"] + rest["items"]}) == 5
    assert len(stored(api, right=False)) == 1
    assert api.get("/v1/experience", params={"run": "nobody"}).status_code == 404
    assert api.get("/v1/experience/rows", params={"cursor": "!"}).status_code == 422


def test_pruning_needs_to_know_what_and_spares_jobs_under_way(api: httpx.Client, context: AppContext, job: str) -> None:
    store_run(context, job, ["right"])
    put(api, lines(row(1)))

    assert api.post("/v1/experience/prune", json={}).status_code == 422
    assert api.post("/v1/experience/prune", json={"run": job}).json()["code"] == "experience_in_use"
    looked = api.post("/v1/experience/prune", json={"run": "theirs", "dry_run": True}).json()
    assert (looked["files"], looked["removed"], len(stored(api))) == (1, False, 2)
    context.redis.set(redis_keys.run_state(job), "succeeded")
    assert api.post("/v1/experience/prune", json={"older_than_days": 1}).json()["files"] == 0
    assert api.post("/v1/experience/prune", json={"task_set": "toy"}).json()["files"] == 2
    assert stored(api) == []


def test_names_of_jobs_and_of_others_are_refused(api: httpx.Client, context: AppContext, job: str) -> None:
    put(api, lines(row(0)))

    assert put(api, lines(row(0)), name="job_MINE").json()["code"] == "name_taken"
    assert api.post("/v1/experience/rejudge", json={"job": job, "name": "theirs"}).json()["code"] == "name_taken"
    assert put(api, lines(row(0)), name="../escape").status_code == 422
    assert put(api, lines(row(0)), job="job_01ARZ3NDEKTSV4RRFFQ69G5FAV").status_code == 404
    assert put(api, lines(row(0)), {"Content-Type": "text/csv"}).status_code == 415


def test_a_job_that_names_experience_nobody_stored_is_refused(api: httpx.Client, document: Document) -> None:
    requested = {**document, "offline": {"experience": [{"run": "nobody"}]}}

    refused = api.post("/v1/jobs", json=requested)

    assert (refused.status_code, refused.json()["code"]) == (422, "unknown_experience")
    assert refused.json()["errors"][0]["pointer"] == "/offline/experience/0/run"
    put(api, lines(row(0)), name="somebody")
    requested["offline"]["experience"][0]["run"] = "somebody"
    assert api.post("/v1/jobs", json=requested).status_code == 202


def spo(folder: Path, url: str, *arguments: str, stdin: str = "") -> subprocess.CompletedProcess[str]:
    return command_line.spo("experience", *arguments, environment={"SPO_API_URL": url}, folder=folder, stdin=stdin)


def test_the_command_line_imports_shows_exports_and_prunes(
    context: AppContext, serve: Callable[[AppContext], str], tmp_path: Path
) -> None:
    url = serve(context)
    (tmp_path / "rows.jsonl").write_bytes(lines(row(0), row(1, response_text="wrong")))
    (tmp_path / "bad.jsonl").write_bytes(lines(row(0, reward=3)))
    (tmp_path / "tasks.json").write_text(json.dumps({"tasks": TASKS.model_dump(mode="json")}))
    given = ("--name", "mine", "--tasks", "tasks.json")

    imported = spo(tmp_path, url, "import", "rows.jsonl", *given, "-o", "json")
    refused = spo(tmp_path, url, "import", "bad.jsonl", *given)
    listed = spo(tmp_path, url, "ls", "-o", "json")
    exported = spo(tmp_path, url, "export", "out.jsonl", "--run", "mine", "--right")
    shown = spo(tmp_path, url, "show", "mine")
    pruned = spo(tmp_path, url, "prune", "--run", "mine", stdin="y\n")

    assert imported.returncode == 0, imported.stderr
    assert json.loads(imported.stdout)[0]["stored"] == 2
    assert refused.returncode == 3
    assert "/rows/1/reward" in refused.stderr
    assert [each["run"] for each in json.loads(listed.stdout)] == ["mine"]
    assert exported.returncode == 0, exported.stderr
    assert len((tmp_path / "out.jsonl").read_text().splitlines()) == 1
    assert "wrong_answer" in shown.stdout
    assert pruned.returncode == 0, pruned.stderr
    assert context.experience.files() == []
