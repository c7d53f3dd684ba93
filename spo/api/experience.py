"""The cross-run store of experience, and task sets uploaded in parts.

Trajectories, prompts, and the values of tokens.

Logs of programs that many use, as mappings of our columns to paths into their rows (see `spo.experience.imports`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

from pydantic import Field, StrictBool

from spo.api.platform import RUN_PATTERN, Document, JsonObject, Listing, Page, RequestBody
from spo.spec.tasks import TasksSpec

TaskFormat = Literal["jsonl", "code_contests", "taco"]
FileFormat = Literal["jsonl", "parquet"]
DatasetState = Literal["uploading", "validating", "ready", "invalid"]
KnownLog = Literal["openai", "langfuse", "phoenix"]
KNOWN_LOGS: Mapping[KnownLog, Mapping[str, str]] = {
    # A request and its response as the API has them, each under its name or both together.
    "openai": {
        "statement": "request.messages.-1.content|messages.-1.content|prompt",
        "response_text": "response.choices.0.message.content|choices.0.message.content|choices.0.text",
        "trajectory_id": "response.id|id",
        "sampler": "response.model|model",
    },
    # Observations of type GENERATION as Langfuse exports them to JSONL: input and output as they were traced,
    # perhaps as text that is JSON. https://langfuse.com/docs/api-and-data-platform/features/blob-storage-export-fields
    "langfuse": {
        "statement": "input.messages.-1.content|input.-1.content|input.prompt|input",
        "response_text": "output.choices.0.message.content|output.content|output.-1.content|output",
        "trajectory_id": "id",
        "sampler": "provided_model_name|model",
    },
    # LLM spans of Phoenix, `get_spans_dataframe().to_json(orient="records", lines=True)`: OpenInference's attributes.
    # https://github.com/Arize-ai/openinference/blob/main/spec/semantic_conventions.md
    "phoenix": {
        "statement": "attributes.llm.input_messages.-1.message.content|attributes.input.value",
        "response_text": "attributes.llm.output_messages.0.message.content|attributes.output.value",
        "trajectory_id": "context.span_id",
        "sampler": "attributes.llm.model_name",
    },
}


class StoredRun(Document):
    """Everything stored under one name; `complete` is false while a job may still add to it."""

    run: str
    kind: str
    task_sets: list[str]
    reference_hashes: list[str]
    trajectories: int
    files: int
    size_bytes: int
    licence: str
    parents: list[str]
    stored_at: str
    complete: bool


class StoredRuns(Listing[StoredRun]):
    """Stored runs and imports, newest first."""


class ExperienceStatistics(Document):
    """Counts over the chosen part of the store; equal responses to a prompt count once as distinct."""

    trajectories: int
    right: int
    prompts: int
    prompts_with_success: int
    distinct_responses: int
    response_tokens: int
    runs: dict[str, int]
    sources: dict[str, int]
    outcomes: dict[str, int]
    judge_versions: dict[str, int]
    licences: dict[str, int]


class StoredRow(Document):
    """One stored trajectory without its tokens."""

    trajectory_id: str
    run_id: str
    run: str
    source: str
    prompt_id: str
    statement: str
    response_text: str
    reward: float | None
    outcome: str | None
    judge_version: str | None
    policy_version_first: int
    licence: str
    parents: list[str]


class StoredRowPage(Page[StoredRow]):
    """Stored trajectories."""


class StoredRowDetail(Document):
    """One stored trajectory with every column, by the names of the file format."""

    run: str
    file: str
    columns: JsonObject


class RowFault(Document):
    """Why a row was refused; rows count from 1."""

    row: int
    code: str
    pointer: str
    message: str


class ImportReport(Document):
    """What became of the rows of a file."""

    run: str
    rows: int
    stored: int
    refused: int
    judged: int
    duplicates: int
    faults: list[RowFault]
    faults_by_code: dict[str, int]


class StorePart(RequestBody):
    """Part of the store in a request's body."""

    run: str | None = Field(default=None, pattern=RUN_PATTERN)
    task_set: str | None = Field(default=None, max_length=200)


class Export(StorePart):
    """Which stored trajectories become a file."""

    right: StrictBool | None = Field(default=None, description="Only successes, or only failures.")
    format: FileFormat = "jsonl"


class Rejudge(StorePart):
    """Which stored trajectories are judged again, by whose tests, and under which new name."""

    job: str | None = Field(default=None, pattern=r"^job_[0-9A-Z]{26}$", description="Judge by this job's tasks ...")
    tasks: TasksSpec | None = Field(default=None, description="... or by these.")
    name: str | None = Field(default=None, pattern=RUN_PATTERN, description="Of the new lineage; default: a new one.")
    dry_run: StrictBool = False


class Compact(StorePart):
    """Which files are merged; with dry_run the answer only says what would come of it."""

    dry_run: StrictBool = False


class Prune(StorePart):
    """What is removed; with dry_run the answer only says what would be."""

    older_than_days: float | None = Field(default=None, ge=0, le=36500)
    dry_run: StrictBool = False


class ChangedVerdict(Document):
    """A trajectory whose outcome differs under the tests of today."""

    trajectory_id: str
    prompt_id: str
    before: str
    after: str


class RejudgeReport(Document):
    """What other tests, or another judge, say about stored trajectories; `run` names the new lineage, if written."""

    run: str | None
    looked_at: int
    judged: int
    unknown_problems: int
    newly_accepted: int
    newly_rejected: int
    changed: list[ChangedVerdict]


class CompactReport(Document):
    """Files as they were and as they are, or would be."""

    runs: list[str]
    trajectories: int
    files_before: int
    files_after: int
    left_over: int
    compacted: bool


class PruneReport(Document):
    """What was removed, or would be."""

    runs: list[str]
    files: int
    trajectories: int
    size_bytes: int
    removed: bool


class DatasetRequest(RequestBody):
    """What will be uploaded. Addresses are not fetched: send the bytes."""

    name: str = Field(min_length=1, max_length=200)
    task_format: TaskFormat = Field(default="jsonl", description="Whose schema the rows have.")
    file_format: FileFormat = "jsonl"
    size_bytes: int = Field(ge=1, le=1 << 50)
    url: str | None = Field(default=None, max_length=2000, description="Refused: this platform fetches nothing.")


class DatasetRowFault(Document):
    """place: a line or row of the file, counted from 1."""

    place: str
    message: str


class DatasetReport(Document):
    """What the rows hold; left_out are those that no judge here can decide, faults the first thousand."""

    rows: int
    problems: int
    left_out: int = 0
    duplicates: int = 0
    tests: int = 0
    answers: int = 0
    with_solutions: int = 0
    difficulties: dict[str, int] = Field(default={})
    notes: list[str] = Field(default=[], description="What was not looked at, and why.")
    faults_total: int
    faults: list[DatasetRowFault]


class DatasetView(Document):
    """uploaded_bytes is where the next part begins; usable by jobs when `ready`."""

    id: str
    name: str
    task_format: TaskFormat
    file_format: FileFormat
    size_bytes: int
    uploaded_bytes: int
    state: DatasetState
    created_at: str
    digest: str
    report: DatasetReport | None


class DatasetPage(Page[DatasetView]):
    """Reports without their faults."""


class Verdict(Document):
    """What the judge found of one program."""

    outcome: str
    tests_passed: int
    tests_total: int
    cpu_seconds: float
    detail: str
    cached: bool
    isolation: str
    judge_version: str


class Hop(Document):
    """When a service passed a trajectory on."""

    service: str
    at_unix_ms: int


class Trajectory(Document):
    """One response to a prompt; reward and verdict are null until it is judged."""

    trajectory_id: str
    group_id: str
    prompt_id: str
    source: str
    response_text: str
    response_tokens: int
    policy_version_first: int
    policy_version_last: int
    temperature: float
    top_p: float
    finish_reason: str
    created_unix_ms: int
    reward: float | None
    verdict: Verdict | None
    hops: list[Hop]


class TrajectoryPage(Page[Trajectory]):
    """Trajectories of a job."""


class ResponseSegment(Document):
    """A turn of a conversation: an `action` was sampled from the policy, an `observation` written by the environment.

    A `branch` is read like an observation, by what follows and without what stands before it.

    score: of a turn that the environment scored, between 0 and 1. label: which tool it is about.
    """

    kind: str
    label: str
    text: str
    tokens: int
    score: float | None


class TrajectoryDetail(Trajectory):
    """With the tokens and their log-probs, nats; those of a conversation's observations are 0."""

    prompt_token_ids: list[int]
    response_token_ids: list[int]
    # Empty: all of the response was sampled, in one turn.
    segments: list[ResponseSegment] = Field(default=[])
    sampling_logprobs: list[float]
    reference_logprobs: list[float]
    reference_hash: str
    # The weight version whose log-probs the reference's are, where the job's anchor moves with its rollouts.
    anchor_version: int | None = None
    # Training steps whose batches held it, in the order of draws; one page, of times_sampled in all.
    steps: list[int]
    times_sampled: int
    # Further trajectories with the same normalised content, which it stands for.
    copies: int


class BatchView(Document):
    """What the replay buffer drew for a training step."""

    step: int
    trajectory_ids: list[str]


class PromptSuccess(Document):
    """How pi0 did on a training prompt; null until it is known. Rewards are of its samples, text is its beginning."""

    prompt_id: str
    text: str
    difficulty: str = ""
    samples: int | None = None
    successes: int | None = None
    lowest_reward: float | None = None
    highest_reward: float | None = None
    with_solutions: bool = False


class PromptPage(Page[PromptSuccess]):
    """Training prompts in their order."""


class PromptView(Document):
    """A prompt with what is known of it: its value, if estimated, and its latest trajectories."""

    prompt_id: str
    text: str
    samples: int | None
    successes: int | None
    qhat_0: float | None
    qhat_0_low: float | None = None
    qhat_0_high: float | None = None
    trajectories: list[Trajectory]


class TokenValues(Document):
    """The policy as value: Q_t after each response token and its advantage A_t, reward units (Eq. 11, 12)."""

    trajectory_id: str
    policy_version: int
    qhat_0: float
    tokens: list[str]
    q: list[float]
    advantages: list[float]


class CalibrationBin(Document):
    """Predicted against observed success, with the interval of what was observed."""

    predicted: float
    observed: float
    outcomes: int
    low: float
    high: float


class Calibration(Document):
    """Success of pi0 going on from prefixes, as Q_t predicts it and as it came; bins of about equal count."""

    policy_version: int
    bins: list[CalibrationBin]
    expected_calibration_error: float
    brier_score: float
    brier_score_of_qhat_0: float
    prefixes: int
