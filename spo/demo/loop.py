"""`spo demo-loop`: a model is trained and served, people use it, and rounds learn from what they say; the course,
its crowd, and its report.

People who use a served model: they ask, look whether the answer is right, and say so; some of them wrongly.
They know the platform by two addresses alone: OpenAI's API, through the unmodified `openai` package, and the judge,
which stands for their own look at an answer.

The course of the demo: a model is trained a little and served; people use it; rounds learn from what they say.
phase 1   feedback of which a tenth is wrong: a round, the gate, a new version is served
phase 2   one crowd sends 30 % of the traffic and says the opposite of the truth: the gate holds, its round names it
end       one call rolls back; the weights are those of before, to the bit
"""

from __future__ import annotations

import json
import random
import re
import secrets
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import redis
from blake3 import blake3

from spo.api.platform import JsonObject, ReadJson
from spo.client import Client
from spo.client.models import ContinualDetail, ContinualRound, Job
from spo.console import ExitCode, console
from spo.demo.demo import WITH_PEOPLE, Demo, fresh_demo, machine, model_of
from spo.errors import NotReady
from spo.experience.store import ExperienceStore
from spo.messaging.redis_client import open_server
from spo.observability import configure_logs
from spo.rpc.client import RpcClient
from spo.spec.job_spec import TasksSpec
from spo.spec.section import read_spec
from spo.tasks.load import load_tasks
from spo.tasks.problem import Problem, program_of
from spo.tasks.verifier import SANDBOX_JUDGE
from spo.v1.judge_service_pb2 import PRIORITY_TRAINING, JudgeRequest, JudgeResponse, UploadTestsRequest
from spo.v1.judge_service_pb2_grpc import JudgeServiceStub
from spo.v1.trajectory_pb2 import Trajectory
from spo.v1.verdict_pb2 import OUTCOME_ACCEPTED

if TYPE_CHECKING:
    import openai
    from matplotlib.axes import Axes


READ_BYTES = 1 << 20

ASKING_AT_ONCE = 8
ASK_SECONDS = 120.0
# An engine that starts again for another model's version takes minutes on a busy machine.
RETRIES = 12
JUDGE_SECONDS = 120.0
UPLOADED_AT_ONCE = 64
CONSENT = "terms of the demo"

SERVED = "helper"
CONTINUAL = "from-traffic"
TRAFFIC = "traffic"
POLL_SECONDS = 1.0
ENDED = ("served", "kept", "failed")
LOOKED_AT = 8

# A poisoned round may cost so much pass@1 where the gate lets it through.
MOST_LOST = 0.02

NAME = "demo-loop"


def places_of(texts: Sequence[str], redis_url: str, state_path: Path, logs_path: Path) -> list[str]:
    """Redis keys, stored experience and files that hold one of the texts; [] is what one hopes for.

    Files are read as they are, the experience store row by row, since Parquet packs what it holds.
    """
    wanted = re.compile(b"|".join(re.escape(text.encode()) for text in texts))
    longest = max(map(len, texts))
    # Not the platform's own view of Redis: all that is there counts, whoever wrote it.
    with open_server(redis_url) as client:
        found = [f"redis key {key.decode()}" for key in client.scan_iter() if _holds(client, key, wanted)]
    store = ExperienceStore(str(state_path / "experience"))
    for file in store.files():
        rows = (row for batch in store.batches(file) for row in batch)
        said = (message for row in rows for message in (row.trajectory, row.prompt))
        if any(wanted.search(message.SerializeToString()) for message in said):
            found.append(f"stored experience {file.path}")
    folders = (state_path, logs_path)
    files = (path for folder in folders for path in sorted(folder.rglob("*")) if path.is_file())
    return found + [f"file {path}" for path in files if any(map(wanted.search, _parts(path, longest)))]


def _holds(client: redis.Redis, key: bytes, wanted: re.Pattern[bytes]) -> bool:
    readers: dict[object, Callable[[], object]] = {
        b"string": lambda: client.get(key),
        b"hash": lambda: client.hgetall(key),
        b"list": lambda: client.lrange(key, 0, -1),
        b"set": lambda: client.smembers(key),
        b"zset": lambda: client.zrange(key, 0, -1),
        b"stream": lambda: client.xrange(key),
    }
    return bool(wanted.search(key)) or _says(readers[client.type(key)](), wanted)


def _says(value: object, wanted: re.Pattern[bytes]) -> bool:
    if isinstance(value, bytes):
        return bool(wanted.search(value))
    if isinstance(value, dict):
        return any(_says(part, wanted) for pair in value.items() for part in pair)
    return isinstance(value, list | tuple | set) and any(_says(part, wanted) for part in value)


def _parts(path: Path, length: int) -> Iterator[bytes]:
    """The file in parts that overlap by the length, so that nothing is cut in two."""
    before = b""
    try:
        with path.open("rb") as file:
            while part := file.read(READ_BYTES):
                yield before + part
                before = part[-length:]
    except FileNotFoundError:
        # Gone since it was listed, as files of a running platform may be.
        return


@dataclass(frozen=True)
class Crowd:
    """Some of the people who ask: a share of all requests, tagged with their name.

    wrong: the share of their feedback that says the opposite of the truth.
    """

    name: str
    share: float
    wrong: float


@dataclass
class CrowdCount:
    """What a crowd has asked and said."""

    answers: int = 0
    right: int = 0
    wrong_feedback: int = 0


@dataclass
class TrafficCount:
    """What a phase of traffic came to, by crowd."""

    by_crowd: dict[str, CrowdCount] = field(default_factory=dict)

    @property
    def answers(self) -> int:
        return sum(said.answers for said in self.by_crowd.values())

    @property
    def right(self) -> int:
        return sum(said.right for said in self.by_crowd.values())

    @property
    def wrong_feedback(self) -> int:
        return sum(said.wrong_feedback for said in self.by_crowd.values())


@dataclass(frozen=True)
class Answered:
    """The samples of one request, each with whether it is right."""

    completion_id: str
    texts: Sequence[str]
    right: Sequence[bool]


@dataclass(frozen=True)
class GreedyAnswer:
    """An answer without chance, and the log-prob of each of its tokens."""

    text: str
    logprobs: tuple[float, ...]


class People:
    """Clients of one served name. Use as a context manager; `ask` may be called by several threads."""

    def __init__(self, url: str, judge_address: str, model: str, problems: Sequence[Problem]) -> None:
        # Whoever asks has it; the platform itself does not need it.
        import openai

        self.model = model
        self.problems = problems
        self.openai: openai.OpenAI = openai.OpenAI(
            base_url=f"{url}/v1", api_key="none", timeout=ASK_SECONDS, max_retries=RETRIES
        )
        self.spo = Client(url, retry_seconds=ASK_SECONDS)
        self._judge = RpcClient(SANDBOX_JUDGE, judge_address, JudgeServiceStub)

    def __enter__(self) -> People:
        for start in range(0, len(self.problems), UPLOADED_AT_ONCE):
            chunk = [problem.tests for problem in self.problems[start : start + UPLOADED_AT_ONCE]]
            self._judge.call("UploadTests", UploadTestsRequest(test_sets=chunk))
        return self

    def __exit__(self, *_: object) -> None:
        self._judge.close()
        self.spo.close()
        self.openai.close()

    def use(self, crowds: Sequence[Crowd], samples: int, seed: int, told: Callable[[int, int], None]) -> TrafficCount:
        """Every problem is asked once, by one of the crowds, who say of each answer whether it is right.

        told: how many of the problems were asked. Equal seeds give equal crowds, prompts and flips.
        """
        rng = random.Random(seed)
        who = [_drawn(rng, crowds) for _ in self.problems]
        lies = [[rng.random() < crowd.wrong for _ in range(samples)] for crowd in who]
        count = TrafficCount({crowd.name: CrowdCount() for crowd in crowds})

        def one(number: int) -> Answered:
            found = self.ask(self.problems[number], who[number].name, samples, seed + number)
            for index, (right, lie) in enumerate(zip(found.right, lies[number], strict=True)):
                self.spo.serving.feedback(found.completion_id, index, thumbs="up" if right != lie else "down")
            return found

        with ThreadPoolExecutor(ASKING_AT_ONCE, thread_name_prefix="people") as pool:
            for number, found in enumerate(pool.map(one, range(len(self.problems)))):
                said = count.by_crowd[who[number].name]
                said.answers += len(found.texts)
                said.right += sum(found.right)
                said.wrong_feedback += sum(lies[number])
                told(number + 1, len(self.problems))
        return count

    def ask(self, problem: Problem, source: str, samples: int, seed: int) -> Answered:
        """Ask with consent to capture, and look at the answers. Raises what `openai` does, SpoError."""
        reply = self.openai.chat.completions.create(
            model=self.model,
            messages=[{"role": "user", "content": problem.statement}],
            n=samples,
            temperature=0.8,
            top_p=0.95,
            seed=seed,
            store=True,
            metadata={"source": source},
            extra_headers={"X-SPO-Consent": CONSENT},
        )
        texts = [choice.message.content or "" for choice in reply.choices]
        return Answered(reply.id, texts, self.judged(problem, texts))

    def ask_anything(self, text: str) -> None:
        """Ask something beyond the problems, which may be kept."""
        said: Any = [{"role": "user", "content": text}]
        self.openai.chat.completions.create(model=self.model, messages=said, max_tokens=8, store=True)

    def say_in_private(self, text: str) -> None:
        """Ask the same model something that nobody may keep."""
        self.openai.chat.completions.create(
            model=self.model,
            messages=[{"role": "user", "content": text}],
            max_tokens=8,
            metadata={"who": text},
            user=text,
        )

    def greedy(self, problems: Sequence[Problem]) -> list[GreedyAnswer]:
        """The likeliest answer to each, uncaptured: equal weights give equal answers and equal log-probs."""
        return [self._greedy(problem) for problem in problems]

    def _greedy(self, problem: Problem) -> GreedyAnswer:
        reply = self.openai.chat.completions.create(
            model=self.model,
            messages=[{"role": "user", "content": problem.statement}],
            temperature=0,
            logprobs=True,
        )
        choice = reply.choices[0]
        said = choice.logprobs.content if choice.logprobs else None
        return GreedyAnswer(choice.message.content or "", tuple(token.logprob for token in said or ()))

    def judged(self, problem: Problem, texts: Sequence[str]) -> list[bool]:
        """Whether each answer passes the problem's tests."""
        programs = [program_of(Trajectory(response_text=text), problem.response_format) for text in texts]
        request = JudgeRequest(
            programs=programs,
            language=problem.language,
            tests_digest=problem.tests_digest,
            priority=PRIORITY_TRAINING,
        )
        reply: JudgeResponse = self._judge.call("Judge", request, JUDGE_SECONDS)
        return [verdict.outcome == OUTCOME_ACCEPTED for verdict in reply.verdicts]


def _drawn(rng: random.Random, crowds: Sequence[Crowd]) -> Crowd:
    return rng.choices(crowds, [crowd.share for crowd in crowds])[0]


@dataclass(frozen=True)
class Course:
    """How much of everything; seconds are limits."""

    seed: int = 0
    train_problems: int = 160
    evaluation_problems: int = 80
    first_steps: int = 30
    round_steps: int = 120
    batch_size: int = 64
    value_samples: int = 16
    answers: int = 8
    gate_samples: int = 20
    canaries: int = 10
    round_seconds: float = 900.0
    # Below 0 something is served although little is trained.
    min_gain: float = 0.0
    phases: Mapping[str, Sequence[Crowd]] = field(default_factory=lambda: PHASES)


PHASES: Mapping[str, Sequence[Crowd]] = {
    "a tenth of the feedback is wrong": tuple(Crowd(name, 0.25, 0.1) for name in ("north", "east", "south", "west")),
    "one crowd, 30 % of the traffic, says the opposite": (
        *(Crowd(name, 0.7 / 3, 0.0) for name in ("north", "east", "south")),
        Crowd("west", 0.3, 1.0),
    ),
}


@dataclass(frozen=True)
class Phase:
    """Traffic, and the round that learned from it."""

    name: str
    traffic: TrafficCount
    round: ContinualRound
    seconds: float


@dataclass
class CourseOutcome:
    """What the demo saw."""

    course: Course
    first_job: Job
    phases: list[Phase] = field(default_factory=list)
    canaries: int = 0
    canary_places: list[str] = field(default_factory=list)
    captured_canary_is_found: bool = False
    rolled_back: JsonObject = field(default_factory=dict)
    first_digest: str = ""


def first_job(course: Course) -> JsonObject:
    """A little of the demo's job: what it leaves to be learned is what traffic is to teach."""
    document = read_spec(WITH_PEOPLE)
    return {
        **document,
        "name": "what is served first",
        "seed": course.seed,
        "tasks": {
            **document["tasks"],
            "train_problems": course.train_problems,
            "evaluation_problems": course.evaluation_problems,
        },
        "value": {**document["value"], "samples": course.value_samples},
        "trainer": {
            **document["trainer"],
            "steps": course.first_steps,
            "batch_size": course.batch_size,
            "update_interval": course.first_steps,
            "checkpoint_interval": course.first_steps,
        },
        "evaluation": {**document["evaluation"], "samples": 4, "interval_steps": 10_000, "ks": [1]},
    }


def continual_spec(course: Course) -> JsonObject:
    """Rounds of offline training from traffic alone: nothing is sampled but what people asked for, and the values."""
    return {
        "serves": SERVED,
        "traffic": {"name": TRAFFIC},
        "schedule": {"min_new_trajectories": course.train_problems * course.answers},
        "gate": {"samples": course.gate_samples, "min_gain": course.min_gain},
        "overrides": {
            # The demo's own terms learn from the policy's samples and from people's programs, and from nothing else.
            "algorithm": {"losses": [{"objective": "terminal_squared"}]},
            "offline": {
                "human_solutions": False,
                "keep_reference_samples": False,
                "experience": [{"run": TRAFFIC, "per_prompt": 64}],
            },
            "replay": {"mix": [{"source": "other_run", "share": 1.0}], "offline_per_prompt": 64},
            "trainer": {
                "steps": course.round_steps,
                "learning_rate": 8.0e-4,
                "update_interval": course.round_steps,
                "checkpoint_interval": course.round_steps,
            },
        },
    }


class Loop:
    """Carries a platform through the course."""

    def __init__(self, demo: Demo, course: Course) -> None:
        self.demo = demo
        self.course = course

    def run(self) -> CourseOutcome:
        """All phases. Raises SpoError, NotReady where a round does not end in time."""
        first = self.demo.run(first_job(self.course)).job
        if first.state != "succeeded":
            raise NotReady(f"job {first.id} is {first.state}", code="job_did_not_succeed")
        outcome = CourseOutcome(self.course, first)
        platform = self.demo.platform
        tasks = load_tasks(TasksSpec.model_validate(first.spec["tasks"]))
        with People(platform.http_url, platform.addresses["sandbox-judge"], SERVED, tasks.train) as people:
            people.spo.serving.publish(SERVED, first.id, first.progress.weight_version, "where the demo begins")
            at_first = people.greedy(tasks.train[:LOOKED_AT])
            outcome.first_digest = weights_digest(people.spo, first.id, first.progress.weight_version)
            for number, (name, crowds) in enumerate(self.course.phases.items(), 1):
                outcome.phases.append(self._phase(people, name, crowds, number))
            self._look_for_canaries(people, outcome)
            self._roll_back(people, outcome, at_first)
        return outcome

    def _phase(self, people: People, name: str, crowds: Sequence[Crowd], number: int) -> Phase:
        began, course = time.monotonic(), self.course
        self.demo.say(f"phase {number}: {name}")
        traffic = people.use(
            crowds,
            course.answers,
            course.seed + 1000 * number,
            lambda done, of: self.demo.show(stage=f"phase {number}: {done} of {of} problems asked"),
        )
        self.demo.say(
            f"phase {number}: {traffic.answers} answers, {traffic.right / max(1, traffic.answers):.0%} of them right; "
            f"{traffic.wrong_feedback} were judged wrongly by the people"
        )
        if number == 1:
            people.spo.continual.put(CONTINUAL, continual_spec(course))
        ended = self._await_round(people, number)
        self.demo.say(f"round {number}: {ended.state}: {ended.reason}")
        return Phase(name, traffic, ended, time.monotonic() - began)

    def _await_round(self, people: People, number: int) -> ContinualRound:
        deadline = time.monotonic() + self.course.round_seconds
        while time.monotonic() < deadline:
            found = people.spo.continual.get(CONTINUAL)
            newest = next((each for each in found.history if each.number == number), None)
            if newest and newest.state in ENDED:
                return newest
            self._show(people, found, newest)
            time.sleep(POLL_SECONDS)
        raise NotReady(f"round {number} took longer than {self.course.round_seconds:g} s", code="demo_timeout")

    def _show(self, people: People, found: ContinualDetail, newest: ContinualRound | None) -> None:
        if newest is None:
            self.demo.show(stage=f"{found.new_trajectories} new trajectories are stored")
            return
        job = people.spo.get(newest.job_id) if newest.job_id else None
        self.demo.show(stage=f"round {newest.number}: {newest.state}", job=job, evaluations=())

    def _look_for_canaries(self, people: People, outcome: CourseOutcome) -> None:
        """Ask what nobody may keep, and once what may be kept: that one must be found, or the search finds nothing."""
        platform, texts = self.demo.platform, [f"canary-{secrets.token_hex(8)}" for _ in range(self.course.canaries)]
        self.demo.say(f"{len(texts)} requests without consent; looking for their texts in Redis, store and files")
        for text in texts:
            people.say_in_private(text)
        agreed = f"agreed-{secrets.token_hex(8)}"
        people.ask_anything(agreed)
        folders = (platform.redis_url, platform.state_path, platform.folder / "logs")
        outcome.canaries = len(texts)
        outcome.canary_places = places_of(texts, *folders)
        outcome.captured_canary_is_found = bool(places_of([agreed], *folders))

    def _roll_back(self, people: People, outcome: CourseOutcome, at_first: Sequence[GreedyAnswer]) -> None:
        """Take the newest version back by one call, and look whether what is served then is what was, to the bit."""
        spo = people.spo
        history = spo.serving.history(SERVED)
        if len(history) < 2:
            return
        began = time.monotonic()
        after = spo.serving.roll_back(SERVED, note="the demo takes it back")
        seconds = time.monotonic() - began
        newest, before = history[0], history[1]
        outcome.rolled_back = {
            "from": [newest.job_id, newest.version],
            "to": [after.job_id, after.version],
            "is_what_was_served_before": (after.job_id, after.version) == (before.job_id, before.version),
            "call_seconds": round(seconds, 3),
        }
        if (after.job_id, after.version) == (outcome.first_job.id, outcome.first_job.progress.weight_version):
            # Without chance, equal weights give equal answers.
            answers = people.greedy(people.problems[:LOOKED_AT])
            outcome.rolled_back |= {
                "weights_as_at_first": weights_digest(people.spo, after.job_id, after.version) == outcome.first_digest,
                "answers_as_at_first": [each.text for each in answers] == [each.text for each in at_first],
                "logprobs_as_at_first": [each.logprobs for each in answers] == [each.logprobs for each in at_first],
            }
        self.demo.say(f"rolled back in {seconds:.2f} s")


def weights_digest(spo: Client, job_id: str, version: int | None) -> str:
    """Of the bytes of a version's files."""
    (found,) = (each for each in spo.weights(job_id) if each.version == version)
    hashed = blake3()
    for path in sorted(Path(found.uri).rglob("*")):
        if path.is_file():
            hashed.update(path.name.encode()).update(path.read_bytes())
    return hashed.hexdigest()


def report_of(outcome: CourseOutcome, used: Mapping[str, object]) -> JsonObject:
    """The report document; used: seconds, CPU seconds and memory of the whole."""
    return {
        "seed": outcome.course.seed,
        "claims": claims(outcome),
        "phases": [_facts(phase) for phase in outcome.phases],
        "canaries": {
            "sent": outcome.canaries,
            "found_in": outcome.canary_places,
            "one_that_was_captured_is_found": outcome.captured_canary_is_found,
        },
        "rolled_back": outcome.rolled_back,
        "first_job": outcome.first_job.id,
        "course": asdict(outcome.course),
        **used,
        "machine": machine(),
    }


def claims(outcome: CourseOutcome) -> dict[str, bool]:
    """What the demo is to show, each with whether it did."""
    learned, poisoned = outcome.phases[0], outcome.phases[-1]
    lost = -(poisoned.round.comparison.gain if poisoned.round.comparison else 0.0)
    back = outcome.rolled_back
    return {
        "a version that learned from feedback, a tenth of it wrong, was served": learned.round.state == "served",
        "poisoned feedback cost less than 2 points of what is served": poisoned.round.state == "kept"
        or (poisoned.round.state == "served" and lost < MOST_LOST),
        "the bad source is named, and no other": suspects(learned) == []
        and suspects(poisoned) == bad_sources(poisoned),
        "what nobody agreed to is kept nowhere": not outcome.canary_places and outcome.captured_canary_is_found,
        "one call rolled back, to the bit": bool(back.get("is_what_was_served_before"))
        and all(held for name, held in back.items() if name.endswith("_as_at_first")),
    }


def suspects(phase: Phase) -> list[str]:
    """Sources that the round named."""
    return sorted(each.source for each in phase.round.sources if each.suspect)


def bad_sources(phase: Phase) -> list[str]:
    """Those most of whose feedback was in truth wrong."""
    counts = phase.traffic.by_crowd.items()
    return sorted(name for name, count in counts if count.wrong_feedback > count.answers / 2)


def write_report(outcome: CourseOutcome, used: Mapping[str, object], folder: Path) -> JsonObject:
    """Write all three into the folder and return the document."""
    document = report_of(outcome, used)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "report.json").write_text(json.dumps(document, indent=2) + "\n")
    (folder / "report.md").write_text(markdown(document))
    draw(outcome, folder / "report.png")
    return document


def markdown(report: ReadJson) -> str:
    """The claims, a row for each round and a row for each source of feedback."""
    lines = [f"# A served model that learns from its users (seed {report['seed']})", ""]
    lines += [f"- {'yes' if held else 'NO'}: {claim}" for claim, held in report["claims"].items()]
    lines += ["", "![report](report.png)", ""]
    lines += ["| round | feedback | wrong | held-out pass@1, served | new version | gain, 95 % interval | ended |"]
    lines += ["|---|---|---|---|---|---|---|"]
    for phase in report["phases"]:
        found, wrong = phase["round"]["comparison"], phase["wrong_feedback"] / max(1, phase["answers"])
        said = " | | "
        if found:
            interval = f"{found['low']:+.3f} to {found['high']:+.3f}"
            said = f"{found['served']:.3f} | {found['candidate']:.3f} | {found['gain']:+.3f} ({interval})"
        about = f"{phase['round']['number']}: {phase['name']}"
        lines.append(f"| {about} | {phase['answers']} | {wrong:.0%} | {said} | {phase['round']['state']} |")
    lines += ["", "| round | source | answers | wrong feedback | mean abs(Q - r) | beside the others | named |"]
    lines += ["|---|---|---|---|---|---|---|"]
    for phase in report["phases"]:
        for each in phase["round"]["sources"]:
            count = phase["by_crowd"].get(each["source"], {"answers": 0, "wrong_feedback": 0})
            said = f"{count['answers']} | {count['wrong_feedback']} | {each['residual']:.3f} | {each['excess']:+.3f}"
            named = "yes" if each["suspect"] else ""
            lines.append(f"| {phase['round']['number']} | {each['source']} | {said} | {named} |")
    canaries, back = report["canaries"], report["rolled_back"]
    lines += ["", f"{canaries['sent']} requests without consent: found in {len(canaries['found_in'])} places."]
    if back:
        lines.append(f"Rolled back in {back['call_seconds']} s to version {back['to'][1]} of {back['to'][0]}.")
    lines.append(f"{report['seconds']:.0f} s in all, {sum(report['cpu_seconds'].values()):.0f} CPU seconds.")
    return "\n".join([*lines, ""])


def draw(outcome: CourseOutcome, path: Path) -> None:
    """Held-out pass@1 of what was served and of what was tried, and how far each source is from the rest."""
    # Only drawing needs matplotlib, which the light roles do without.
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, 2, figsize=(11, 4.5), constrained_layout=True)
    _draw_rounds(axes[0], outcome)
    _draw_sources(axes[1], outcome)
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def _draw_rounds(axis: Axes, outcome: CourseOutcome) -> None:
    for phase in outcome.phases:
        found, number = phase.round.comparison, phase.round.number
        if found is None:
            continue
        served = phase.round.state == "served"
        axis.plot([number - 1, number], [found.served, found.candidate], linestyle="-" if served else ":", color="C0")
        errors = [[found.gain - found.low], [found.high - found.gain]]
        axis.errorbar([number], [found.candidate], errors, marker="o" if served else "x", color="C0", capsize=4)
        axis.annotate(phase.round.state, (number, found.candidate), xytext=(6, 6), textcoords="offset points")
    rounds = range(len(outcome.phases) + 1)
    axis.set(title="held-out pass@1, gain with 95 % interval", ylim=(0, 1), xlim=(-0.3, len(outcome.phases) + 0.6))
    axis.set_xticks(list(rounds), ["start", *(f"round {number}" for number in rounds[1:])])
    axis.grid(alpha=0.3)


def _draw_sources(axis: Axes, outcome: CourseOutcome) -> None:
    names = sorted({each.source for phase in outcome.phases for each in phase.round.sources})
    width = 0.8 / max(1, len(outcome.phases))
    for place, phase in enumerate(outcome.phases):
        known = {each.source: each.residual for each in phase.round.sources}
        at = [index + width * place for index in range(len(names))]
        axis.bar(at, [known.get(name, 0.0) for name in names], width, label=f"round {phase.round.number}")
    axis.set_xticks([index + 0.4 - width / 2 for index in range(len(names))], names)
    axis.set(title="mean |Q - r| of each source's feedback")
    axis.grid(alpha=0.3)
    if names:
        axis.legend()


def _facts(phase: Phase) -> JsonObject:
    return {
        "name": phase.name,
        "answers": phase.traffic.answers,
        "right": phase.traffic.right,
        "wrong_feedback": phase.traffic.wrong_feedback,
        "by_crowd": {name: asdict(count) for name, count in phase.traffic.by_crowd.items()},
        "round": phase.round.model_dump(mode="json"),
        "seconds": round(phase.seconds, 1),
    }


def run_demo_loop(seed: int = 0) -> None:
    """Run the course and write the report; exits with a status that says whether all claims held. Raises SpoError."""
    configure_logs("launcher", level="error", log_format="console")
    with fresh_demo(NAME, model_of(read_spec(WITH_PEOPLE))) as demo:
        outcome = Loop(demo, Course(seed=seed)).run()
        cpu = {name: round(seconds, 1) for name, seconds in demo.platform.cpu_seconds().items()}
        seconds = round(time.monotonic() - demo.view.began, 1)
        used = {"seconds": seconds, "cpu_seconds": cpu, "peak_memory_bytes": demo.peak_memory_bytes}
        report = write_report(outcome, used, demo.platform.folder)
    console.print(markdown(report), markup=False, highlight=False, soft_wrap=True)
    if not all(report["claims"].values()):
        raise SystemExit(ExitCode.JOB_DID_NOT_SUCCEED)
