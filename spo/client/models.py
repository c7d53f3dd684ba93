"""Documents of the REST API as the SDK returns them (`spo.api`), and what its calls take as keyword arguments.

Answers of the API as columns, pandas frames and figures: pandas and matplotlib are used where they are installed.
"""

from __future__ import annotations

import io
import shutil
import tarfile
import tempfile
from collections.abc import Mapping, Sequence
from importlib import import_module
from pathlib import Path
from types import ModuleType, TracebackType
from typing import TYPE_CHECKING, BinaryIO, Literal, Self, TypedDict, TypeVar

import httpx
from pydantic import BaseModel, ValidationError

from spo import errors
from spo.api import *
from spo.api import LogLevel, MetricSeries, StepEvaluation
from spo.errors import PreconditionFailed
from spo.spec.job_spec import SourceName
from spo.spec.section import JobState

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from pandas import DataFrame


Source = SourceName

Answer = TypeVar("Answer", bound=BaseModel)

_BY_STATUS: dict[int, type[errors.SpoError]] = {
    404: errors.NotFound,
    409: errors.Conflict,
    412: errors.PreconditionFailed,
    413: errors.ResourceExhausted,
    429: errors.ResourceExhausted,
    502: errors.NotReady,
    503: errors.NotReady,
    504: errors.NotReady,
}


class JobFilters(TypedDict, total=False):
    """Which jobs: in this state, with labels ("team" or "team:red"), created within these times (RFC 3339)."""

    status: JobState | None
    label: Sequence[str] | None
    created_from: str | None
    created_to: str | None


class ForkKeywords(TypedDict, total=False):
    """Where a fork starts and what differs in its JobSpec; without both numbers: from the newest version."""

    version: int | None
    checkpoint_step: int | None
    as_reference: bool
    overrides: Mapping[str, object]


class LogFilters(TypedDict, total=False):
    """Which log lines: of this service, of this level or above."""

    service: str | None
    level: LogLevel | None


class TrajectoryFilters(TypedDict, total=False):
    """Which trajectories of a job."""

    prompt_id: str | None
    source: Source | None
    verdict: str | None
    policy_version: int | None


class CalibrationKeywords(TypedDict, total=False):
    """Which prefixes are continued, how often, and into how many bins they fall."""

    policy_version: int | None
    trajectories: int
    positions: int
    continuations: int
    bins: int


class CompletionKeywords(TypedDict, total=False):
    """How a policy is asked; version 0 is the reference, None the newest."""

    version: int | None
    samples: int
    temperature: float
    top_p: float
    max_tokens: int | None
    seed: int | None


class EvaluationKeywords(TypedDict, total=False):
    """Which policy is evaluated, on which problems, and how; by default the newest version on the job's own."""

    version: int | None
    checkpoint_step: int | None
    tasks: Mapping[str, object] | None
    samples: int
    temperature: float
    top_p: float
    ks: Sequence[int]


class StoreFilters(TypedDict, total=False):
    """Which part of the experience store."""

    run: str | None
    task_set: str | None


class RowFilters(StoreFilters, total=False):
    """Which stored trajectories; right: only successes, or only failures."""

    prompt_id: str | None
    source: Source | None
    right: bool | None


class ImportOptions(TypedDict, total=False):
    """How rows are stored: whose problems they answer (job, or tasks as JSON), their terms, which are judged here.

    reward = reward_scale * given + reward_shift; reward_best: the best reward there is in them, which becomes 0, in
    place of a shift. log: whose rows these are; fields: JSON, our columns to paths into the rows of another log, or
    what is otherwise than in the named one. keep_good stores the good rows although others are bad.
    """

    job: str | None
    tasks: str | None
    licence: str
    reward_scale: float
    reward_shift: float
    reward_best: float | None
    fields: str
    log: Literal["openai", "langfuse", "phoenix"] | None
    judging: Literal["missing", "all", "never"]
    keep_good: bool


class ExportKeywords(StoreFilters, total=False):
    """Which stored trajectories are exported; right: only successes, or only failures."""

    right: bool | None


class RejudgeKeywords(StoreFilters, total=False):
    """Which stored trajectories are judged again, by whose tests (job or tasks), under which new name."""

    job: str | None
    tasks: Mapping[str, object] | None
    name: str | None
    dry_run: bool


class CompactKeywords(StoreFilters, total=False):
    """Which files are merged; dry_run only says what would come of it."""

    dry_run: bool


class PruneKeywords(StoreFilters, total=False):
    """What is removed; dry_run only says what would be."""

    older_than_days: float | None
    dry_run: bool


class FeedbackKeywords(TypedDict, total=False):
    """Feedback on an answer."""

    score: float
    thumbs: Literal["up", "down"]
    test: Literal["passed", "failed"]
    edited: str
    comment: str


Columns = dict[str, list[object]]
PLOTTED = ("reward", "loss", "kl_to_reference")


def columns(answers: MetricSeries | Sequence[BaseModel]) -> Columns:
    """Columns of equal length by name, "a.b" for what lies in another document; what an answer lacks is None.

    Of a series the first column is its axis; a mapping becomes a column for each of its names, a list stays one value.
    """
    if isinstance(answers, MetricSeries):
        return {answers.axis: list(answers.steps), **{name: list(each) for name, each in answers.series.items()}}
    rows = [_flat(answer.model_dump(mode="json"), "") for answer in answers]
    names = dict.fromkeys(name for row in rows for name in row)
    return {name: [row.get(name) for row in rows] for name in names}


def frame(answers: MetricSeries | Sequence[BaseModel]) -> DataFrame:
    """The same as a pandas frame; of a series and of evaluations the step is its index.

    Raises PreconditionFailed (code "package_missing") where pandas is not installed.
    """
    made = _package("pandas").DataFrame(columns(answers))
    index = next((name for name in ("step", "unix_ms") if name in made.columns), None)
    indexed: DataFrame = made.set_index(index) if index and isinstance(answers, MetricSeries) else made
    if answers and not isinstance(answers, MetricSeries) and isinstance(answers[0], StepEvaluation):
        indexed = made.set_index("step")
    return indexed


def plot(metrics: MetricSeries, evaluations: Sequence[StepEvaluation] = (), names: Sequence[str] = PLOTTED) -> Figure:
    """A figure with pass@k and its intervals, and one panel for each named curve that there is.

    Raises PreconditionFailed (code "package_missing") where matplotlib is not installed.
    """
    shown = [name for name in names if metrics.series.get(name)]
    count = len(shown) + bool(evaluations)
    figure = _notebook_figure(5 * max(1, count), 3.5)
    panels = figure.subplots(1, max(1, count), squeeze=False)[0]
    if evaluations:
        steps = [evaluation.step for evaluation in evaluations]
        for k in evaluations[0].pass_at_k:
            scores = [evaluation.pass_at_k[k] for evaluation in evaluations]
            (line,) = panels[0].plot(steps, [score.value for score in scores], marker="o", label=f"pass@{k}")
            low, high = [score.low for score in scores], [score.high for score in scores]
            panels[0].fill_between(steps, low, high, color=line.get_color(), alpha=0.2)
        panels[0].set(xlabel="step", title="held-out problems")
        panels[0].legend()
    for panel, name in zip(panels[bool(evaluations) :], shown, strict=False):
        panel.plot(metrics.steps, [float("nan") if each is None else each for each in metrics.series[name]])
        panel.set(xlabel=metrics.axis, title=name)
    return figure


def _notebook_figure(width: float, height: float) -> Figure:
    """A figure of so many inches, shown as a picture wherever it is a notebook cell's value, whatever pyplot has."""
    _package("matplotlib.figure")
    from matplotlib.figure import Figure

    class NotebookFigure(Figure):
        def _repr_png_(self) -> bytes:
            picture = io.BytesIO()
            self.savefig(picture, format="png", dpi=72)
            return picture.getvalue()

    return NotebookFigure(figsize=(width, height), layout="constrained")


def _flat(node: Mapping[str, object], prefix: str) -> dict[str, object]:
    found: dict[str, object] = {}
    for name, value in node.items():
        if isinstance(value, Mapping):
            found |= _flat(value, f"{prefix}{name}.")
        else:
            found[f"{prefix}{name}"] = value
    return found


def _package(name: str) -> ModuleType:
    try:
        return import_module(name)
    except ImportError:
        package = name.partition(".")[0]
        message = f"{package} is not installed here: `pip install {package}`; spo.client.models.columns does without"
        raise PreconditionFailed(message, code="package_missing") from None


class RequestOptions(TypedDict, total=False):
    """What httpx takes beside method and path; parameters that are None are left out, timeout is in seconds."""

    json: object
    content: bytes
    params: Mapping[str, object]
    headers: Mapping[str, str]
    timeout: float | httpx.Timeout


def error_of(response: httpx.Response) -> errors.SpoError:
    """The SpoError that a problem+json answer (RFC 9457) stands for."""
    try:
        problem = response.json()
    except ValueError:
        problem = {}
    if not isinstance(problem, dict):
        problem = {}
    server_fault = errors.InternalError if response.status_code >= 500 else errors.InvalidInput
    kind = _BY_STATUS.get(response.status_code, server_fault)
    violations = tuple(
        errors.FieldViolation(str(fault.get("pointer", "")), str(fault.get("message", "")))
        for fault in problem.get("errors") or ()
    )
    message = problem.get("detail") or problem.get("title") or f"HTTP {response.status_code}"
    return kind(str(message), code=problem.get("code"), violations=violations)


def parsed(answer: type[Answer], content: object) -> Answer:
    """The content as a model. Raises InternalError (code "unexpected_answer") naming the first field that is wrong."""
    try:
        return answer.model_validate(content, extra="ignore")
    except ValidationError as error:
        first = error.errors()[0]
        place = "/" + "/".join(map(str, first["loc"]))
        message = f"the API's answer is no {answer.__name__}: {place}: {first['msg']}"
        raise errors.InternalError(message, code="unexpected_answer") from None


def content_of(response: httpx.Response) -> object:
    """What a successful answer says: decoded JSON, else its text, None when it is empty.

    Raises InternalError (code "unexpected_answer") for what calls itself JSON and is not.
    """
    if not response.content:
        return None
    if "json" not in response.headers.get("Content-Type", ""):
        return response.text
    try:
        found: object = response.json()
    except ValueError as error:
        raise errors.InternalError(f"the API's answer is not JSON: {error}", code="unexpected_answer") from None
    return found


def pause_asked(response: httpx.Response) -> float:
    """Seconds that the API asks to wait before the next try (Retry-After), 0 when it does not say."""
    said = response.headers.get("Retry-After", "")
    return float(said) if said.isdigit() else 0.0


class ReceivedFolder:
    """Takes an archive of plain files in pieces of any size; use as a context manager.

    Raises InvalidInput (code "unwritable_file") when the folder is there already or cannot be written, Unreachable
    (code "api_unreachable") when the archive broke off, and IntegrityError when it is none.
    """

    def __init__(self, target: Path) -> None:
        self.target = target.absolute()
        self._waiting = bytearray()
        self._file: BinaryIO | None = None
        self._left = self._padding = 0
        self._ended = False

    def __enter__(self) -> Self:
        if self.target.exists():
            raise errors.InvalidInput(f"{self.target} is there already; name a folder to make", code="unwritable_file")
        try:
            self.target.parent.mkdir(parents=True, exist_ok=True)
            self._writing = Path(tempfile.mkdtemp(prefix=f".{self.target.name}-", dir=self.target.parent))
        except OSError as error:
            raise self._unwritable(error) from None
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        try:
            if self._file:
                self._file.close()
            if kind is None:
                self._finish()
        except OSError as failure:
            raise self._unwritable(failure) from None
        finally:
            shutil.rmtree(self._writing, ignore_errors=True)

    def take(self, piece: bytes) -> None:
        """Write what of the archive has come."""
        self._waiting += piece
        try:
            while self._step():
                pass
        except OSError as error:
            raise self._unwritable(error) from None

    def _step(self) -> bool:
        """Use up some of what waits; False when more must come first."""
        if self._ended:
            self._waiting.clear()
            return False
        if self._file:
            written = self._file.write(self._waiting[: self._left])
            del self._waiting[:written]
            self._left -= written
            if self._left:
                return False
            self._file.close()
            self._file = None
        if len(self._waiting) < self._padding + tarfile.BLOCKSIZE:
            return False
        head = bytes(self._waiting[self._padding : self._padding + tarfile.BLOCKSIZE])
        del self._waiting[: self._padding + tarfile.BLOCKSIZE]
        self._begin(head)
        return True

    def _begin(self, head: bytes) -> None:
        try:
            member = tarfile.TarInfo.frombuf(head, "utf-8", "strict")
        except tarfile.EOFHeaderError:  # type: ignore[attr-defined]
            self._ended = True
            return
        except tarfile.TarError as error:
            raise errors.IntegrityError(f"what arrives is no tar archive: {error}") from None
        if not member.isreg() or member.name != Path(member.name).name or member.name.startswith("."):
            raise errors.IntegrityError(f"{member.name[:100]!r} in the archive is no plain file")
        self._file = (self._writing / member.name).open("xb")
        self._left, self._padding = member.size, -member.size % tarfile.BLOCKSIZE

    def _finish(self) -> None:
        if not self._ended:
            raise errors.Unreachable("the download broke off before its end; try again", code="api_unreachable")
        self._writing.chmod(0o755)
        self._writing.rename(self.target)

    def _unwritable(self, error: OSError) -> errors.InvalidInput:
        return errors.InvalidInput(f"cannot write {self.target}: {error.strerror}", code="unwritable_file")
