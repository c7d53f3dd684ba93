"""`spo agents-demo`: a program with the package openai and no line of ours is played by a policy that learns from it.

    pi0 (made here, 20 s) -> a job with a harness -> spo agents run --harness guess=... -> runs/agents-demo/report.json

With `--real` it is SmolLM2-135M, and the number is a sum of two others, with three guesses and a hint after each.

Success is that of games against the first and the last weights, played by the same program in sessions of its own and
never trained on; where the intervals overlap the report says that no learning is shown.

With several seeds each is run twice, once played by the program and once by the environment `text_game` in the same
words, or with `--age` once for each age that episodes may have; runs that have a report are not run again.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import combinations_with_replacement
from pathlib import Path
from typing import Literal, get_args

from spo.api.platform import JsonObject, ReadJson
from spo.client import Client
from spo.client.models import Job, SessionCall
from spo.console import ExitCode, console
from spo.demo import guess
from spo.demo.addition import MODEL as SMOLLM2, question
from spo.demo.demo import LONGEST_DEMO_SECONDS, MODEL_SECONDS, PLAIN_EVERY_SECONDS
from spo.errors import NotReady, PreconditionFailed
from spo.local.launcher import LauncherSettings, LocalPlatform, signals_interrupt
from spo.observability import configure_logs
from spo.service.settings import PlatformSettings

NAME, SEEDS = "agents-demo", "agents-demo-seeds"
HARNESS = "guess"
GAMES = 64
# Steps of the job, and games against each of two versions of the weights.
STEPS, TRIALS = 64, 200
AT_ONCE = 4
# Of the sessions that were trained on: so many are looked at for breaks.
TRACED = 100
# The runner ends its games by then, each of which calls a few times.
RUNNER_END_SECONDS = 60.0
JOB: JsonObject = {
    "name": NAME,
    "model": {"dtype": "float32", "max_prompt_tokens": 8, "max_response_tokens": 24},
    "tasks": {
        "kind": "jsonl",
        "evaluation_problems": 0,
        "harness": {"name": HARNESS, "max_calls": guess.GUESSES, "max_seconds": 300},
    },
    "value": None,
    "algorithm": {"beta": 0.2, "losses": [{"objective": "group_centred_squared"}]},
    "rollout": {"samples_per_prompt": 8, "temperature": 1.0, "top_p": 1.0},
    "offline": {"human_solutions": False, "keep_reference_samples": False},
    "replay": {
        "mix": [{"source": "online", "share": 1.0}],
        "unit": "group",
        # An episode costs two seconds of a processor, most of them the import of the package.
        "samples_per_insert": 8.0,
        "min_online": 64,
        "error_buffer": 64,
    },
    "trainer": {
        "steps": STEPS,
        "batch_size": 64,
        "micro_batch_size": 64,
        # At 5e-4, and without a fall, two runs of three lost half of what they had learnt within four steps, and more
        # than once; the last weights may then be of such a dip.
        "learning_rate": 2e-4,
        "learning_rate_schedule": "linear",
        "learning_rate_floor": 0.1,
        "adam_betas": [0.9, 0.98],
        "weight_decay": 0.0,
        "warmup_steps": 5,
        "max_grad_norm": 1.0,
        "update_interval": 4,
        "checkpoint_interval": STEPS,
    },
}


# What a job of SmolLM2 has otherwise.
REAL_STEPS = 24
# Sums of two digits: pi0 is right with two in five at once, and with three in four where it takes what is likeliest.
EXAMPLE = (7, 5)
HELD_OUT_SUMS = 24
REAL_JOB: JsonObject = {
    "model": {
        "dtype": "bfloat16",
        "max_prompt_tokens": 32,
        "max_response_tokens": 36,
        "chat": {"system": f"{question(*EXAMPLE)} {sum(EXAMPLE)}\n"},
        "stop": ["\n"],
    },
    "replay": {"samples_per_insert": 3.0},
    "trainer": {
        **{"batch_size": 32, "micro_batch_size": 16, "learning_rate": 3e-5, "warmup_steps": 2, "update_interval": 2},
        "activation_checkpointing": False,
    },
    # Of 135 million parameters: some hundred is usual here, and clipped.
    "collapse_guard": {"grad_norm": 10000.0},
}
# Of jobs that are compared by the age of their episodes, which are many: the environment plays them, at little cost.
AGED_SAMPLES_PER_INSERT = 2.0
# So small a model rambles in its chat format. After an example in lines it answers in a line, whose end it samples.
LINES = "{% for message in messages %}{{ message['content'] }}{% endfor %}"


PlayedBy = Literal["program", "environment"]


@dataclass(frozen=True)
class AgentsRun:
    """One job of the demo, and what plays it. trials: games against each of two versions of the weights."""

    seed: int = 0
    steps: int = STEPS
    trials: int = TRIALS
    played_by: PlayedBy = "program"
    real: bool = False
    # Of the oldest episode that is trained on, in versions of the weights, of which each step makes one.
    age: int | None = None

    @property
    def side(self) -> str:
        """What it is compared by with others of its seed."""
        return self.played_by if self.age is None else f"age-{self.age}"

    def changes(self) -> Mapping[str, JsonObject]:
        """What its job has otherwise than `JOB`, by section."""
        if self.age is None:
            return REAL_JOB if self.real else {}
        # Drawn with equal chances from a window of so many steps: each as often, at ages from none to the oldest.
        fresh = {"samples_per_insert": AGED_SAMPLES_PER_INSERT, "error_buffer": JOB["trainer"]["batch_size"]}
        window = max(1, self.age) * JOB["trainer"]["batch_size"] / AGED_SAMPLES_PER_INSERT
        replay = {"online_capacity": round(window), "min_online": JOB["trainer"]["batch_size"]}
        mix = [{**JOB["replay"]["mix"][0], "max_age_versions": self.age}]
        return {"replay": {**fresh, **replay, "mix": mix}, "trainer": {"update_interval": 1}}

    def games(self) -> list[str]:
        """What is played and trained on, as the program's statements."""
        if not self.real:
            return [f"game {game} of {self.seed}: {1 + game % 8}" for game in range(GAMES)]
        trained_on = _sums()[HELD_OUT_SUMS:]
        return random.Random(self.seed).sample(trained_on, len(trained_on))

    def trial_games(self) -> list[str]:
        """What is played and never trained on: each number as often, or sums that no job trains on."""
        held_out = _sums()[:HELD_OUT_SUMS] if self.real else [f"trial: {number}" for number in range(1, 9)]
        return [held_out[game % len(held_out)] for game in range(self.trials)]

    def done(self, folder: Path) -> JsonObject:
        """Run it on a platform of its own and write report.json into the folder. Raises SpoError."""
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        began = time.monotonic()
        with LocalPlatform(NAME, folder / "state", LauncherSettings()) as platform:
            build_model(folder / "pi0", real=self.real)
            platform.wait_until_ready()
            with Client(platform.http_url, retry_seconds=60) as client:
                job = client.submit(job_document(folder, self))
                with runner(platform.http_url, folder) if self.played_by == "program" else contextlib.nullcontext():
                    job = follow(client, job)
                report = self.report(client, job) | {"seconds": round(time.monotonic() - began)}
                if not self.real:
                    report["chances"] = chances(folder / "pi0", folder / "state" / "weights" / job.id)
            report["cpu_seconds"] = round(sum(platform.cpu_seconds().values()))
        (folder / "report.json").write_text(json.dumps(report, indent=2) + "\n")
        return report

    def stored(self, folder: Path) -> JsonObject | None:
        """The report of this run, where it has been done before."""
        file = folder / "report.json"
        report: JsonObject = json.loads(file.read_text()) if file.exists() else {}
        return report if report.get("run") == vars(self) and report["state"] == "succeeded" else None

    def report(self, client: Client, job: Job) -> JsonObject:
        """What was learnt, and how exactly: breaks and trained tokens of the sessions that were trained on."""
        kept = client.trajectories(job.id, limit=100_000)
        calls: list[list[SessionCall]] = []
        for session in client.agents.all(job.id):
            if session.closed == "finished" and session.problem_id and len(calls) < TRACED:
                calls.append(client.agents.tree(session.id).calls)
        # Their sessions are the newest ones.
        newest = max(version.version for version in client.weights(job.id))
        series = client.metrics(job.id).series
        before, after = (trial(client, job.id, version, self.trial_games()) for version in (0, newest))
        return {
            "run": vars(self),
            "job_id": job.id,
            "state": job.state,
            "episodes": len(kept),
            "rewards": series.get("reward"),
            "staleness": series.get("staleness"),
            "before": before,
            "after": after,
            "learning_is_shown": after["interval"][0] > before["interval"][1],
            "calls_looked_at": sum(map(len, calls)),
            "breaks": sum(bool(call.reason) for tree in calls for call in tree),
            "trained_of_sampled": trained(client, job, calls),
        }


def _sums() -> list[str]:
    """All sums but the example, each in one order of its terms, in an order of chance; the same every time."""
    pairs = [pair for pair in combinations_with_replacement(range(1, 10), 2) if pair != tuple(sorted(EXAMPLE))]
    order = random.Random(0)
    return [question(*order.sample(pair, 2)) for pair in order.sample(pairs, len(pairs))]


def run_agents_demo(seed: int = 0, *, real: bool = False) -> None:
    """Run the demo in the foreground; exits with a status that says whether the job succeeded. Raises SpoError."""
    configure_logs("launcher", level="error", log_format="console")
    require_package()
    with signals_interrupt():
        run = AgentsRun(seed, REAL_STEPS if real else STEPS, real=real)
        report = run.done((LauncherSettings().runs_path / folder_name(NAME, real=real)).absolute())
    console.print(summary(report), markup=False, highlight=False, soft_wrap=True)
    if report["state"] != "succeeded":
        raise SystemExit(ExitCode.JOB_DID_NOT_SUCCEED)


def folder_name(name: str, *, real: bool) -> str:
    """Of a demo's folder; that of the real model is another's."""
    return f"{name}-real" if real else name


def run_agents_seeds(seeds: int, *, real: bool = False, ages: Sequence[int] = ()) -> None:
    """Run each seed by the program and by the environment, or once for each age, where there is no report of it yet.

    Raises SpoError.
    """
    configure_logs("launcher", level="error", log_format="console")
    require_package()
    folder = (LauncherSettings().runs_path / folder_name(SEEDS, real=real)).absolute()
    steps = REAL_STEPS if real else STEPS
    reports: dict[str, list[JsonObject]] = {}
    for seed in range(seeds):
        runs = [AgentsRun(seed, steps, played_by="environment", real=real, age=age) for age in ages]
        for run in runs or [AgentsRun(seed, steps, played_by=by, real=real) for by in get_args(PlayedBy)]:
            own = folder / f"{run.side}-{seed}"
            with signals_interrupt():
                report = run.stored(own) or run.done(own)
            if report["state"] == "succeeded":
                # Gigabytes of weights and checkpoints that no other run reads; of one that failed they may say why.
                for weights in ("state", "pi0"):
                    shutil.rmtree(own / weights, ignore_errors=True)
            console.print(f"{run.side}, seed {seed}: {summary(report)}", markup=False, highlight=False, soft_wrap=True)
            reports.setdefault(run.side, []).append(report)
            # Of what there is so far: the next run may be ended.
            document = {side: together(done) for side, done in reports.items()}
            name = "ages" if ages else "report"
            (folder / f"{name}.json").write_text(json.dumps(document, indent=2) + "\n")
            draw(reports, folder / f"{name}.png")
    console.print_json(data=document)


def together(reports: Sequence[JsonObject]) -> JsonObject:
    """The games of all seeds, with their intervals; those of one seed are not independent of each other."""
    sides: JsonObject = {}
    for name in ("before", "after"):
        games = sum(report[name]["games"] for report in reports)
        wins = round(sum(report[name]["won"] * report[name]["games"] for report in reports))
        by_seed = [report[name]["won"] for report in reports]
        sides[name] = {"games": games, "won": wins / games, "interval": wilson(wins, games), "by_seed": by_seed}
    told = ("episodes", "chances", "staleness")
    return sides | {name: [report[name] for report in reports] for name in told if name in reports[0]}


def draw(reports: Mapping[str, Sequence[JsonObject]], path: Path) -> None:
    """A line for each run, in its side's colour: the chance to win, or what was won in training, over the steps."""
    # Only drawing needs matplotlib, which the light roles do without.
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(6, 4), constrained_layout=True)
    for number, (side, done) in enumerate(reports.items()):
        for seed, report in enumerate(done):
            steps, won = curve(report)
            axes.plot(steps, won, color=f"C{number}", alpha=0.8, label=None if seed else side)
    axes.set(xlabel="step", ylabel="games won", ylim=(0, 1))
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path, dpi=90)
    pyplot.close(figure)


def curve(report: ReadJson) -> tuple[list[float], list[float]]:
    """Steps, and the share of games won there: the chance of each version, or the mean of batches, four at a time."""
    steps = report["run"]["steps"]
    if "chances" in report:
        last = max(int(version) for version in report["chances"])
        return [int(version) * steps / last for version in report["chances"]], [*report["chances"].values()]
    means = [[1 + reward for reward in report["rewards"][at : at + 4]] for at in range(0, steps, 4)]
    return [4.0 * at + 2 for at in range(len(means))], [sum(each) / len(each) for each in means]


def trained(client: Client, job: Job, trees: Sequence[Sequence[SessionCall]]) -> float | None:
    """Of what the sessions have sampled, the share that stands in the job's trajectories; None where it had none."""
    sampled: Counter[tuple[int, ...]] = Counter(
        tuple(token for call in tree for token in call.sampled) for tree in trees if tree
    )
    if not sampled:
        return None
    for kept in client.trajectories(job.id, limit=100_000):
        whole = client.trajectory(job.id, kept.trajectory_id)
        at = 0
        actions: list[int] = []
        for part in whole.segments:
            actions += whole.response_token_ids[at : at + part.tokens] if part.kind == "action" else []
            at += part.tokens
        sampled[tuple(actions if whole.segments else whole.response_token_ids)] -= 1
    missing = sum(len(tokens) * count for tokens, count in sampled.items() if count > 0)
    return 1 - missing / sum(len(call.sampled) for tree in trees for call in tree)


def require_package() -> None:
    """Raises PreconditionFailed (code "package_missing") where the program that plays cannot start."""
    try:
        import openai  # noqa: F401
    except ImportError:
        raise PreconditionFailed(
            "the demo's program needs the package openai: `pip install openai`", code="package_missing"
        ) from None


def build_model(folder: Path, *, real: bool = False) -> None:
    """Make pi0, in a process of its own, or copy SmolLM2 with a template of lines. Raises NotReady."""
    cache = PlatformSettings().state_path.absolute() / "cache" / "models"
    makes = ["spo.demo.reference_model", str(cache), SMOLLM2] if real else ["spo.demo.guess_model", str(folder)]
    command = [sys.executable, "-m", *makes]
    made = subprocess.run(command, capture_output=True, text=True, timeout=MODEL_SECONDS, check=False)
    if made.returncode != 0:
        raise NotReady(f"pi0 was not made: {made.stderr[-2000:]}")
    if real:
        shutil.copytree(json.loads(made.stdout.splitlines()[-1])["folder"], folder)
        (folder / "chat_template.jinja").write_text(LINES)


def chances(pi0: Path, versions: Path) -> JsonObject:
    """The chance to win of each version of the weights, reckoned and not played. Raises NotReady."""
    command = [sys.executable, "-m", "spo.demo.guess_model", str(pi0), str(versions)]
    found = subprocess.run(command, capture_output=True, text=True, timeout=MODEL_SECONDS, check=False)
    if found.returncode != 0:
        raise NotReady(f"no chances were reckoned: {found.stderr[-2000:]}")
    reckoned: JsonObject = json.loads(found.stdout)
    return reckoned


def job_document(folder: Path, run: AgentsRun) -> JsonObject:
    """The job, with its games and its model where they are."""
    games = [guess.game_of(statement) for statement in run.games()]
    changed = {name: {**JOB.get(name, {}), **part} for name, part in run.changes().items()}
    document: JsonObject = {**JOB, **changed, "seed": run.seed}
    tasks: JsonObject = {**JOB["tasks"], "path": str(folder / "games.jsonl")}
    if run.played_by == "environment":
        del tasks["harness"]
        tasks["environment"] = environment(real=run.real)
    statements = run.games() if run.played_by == "program" else [game.asked for game in games]
    rows = [
        {"statement": statement, "answer": {"expected": [str(game.number)]}, "arguments": {"number": game.number}}
        for statement, game in zip(statements, games, strict=True)
    ]
    (folder / "games.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    model = {**document["model"], "path": str(folder / "pi0")}
    trainer = {**document["trainer"], "steps": run.steps, "checkpoint_interval": run.steps}
    return {**document, "model": model, "tasks": tasks, "trainer": trainer}


def environment(*, real: bool) -> JsonObject:
    """The program's game in its own words; before its first guess the policy is shown the statement alone."""
    game = guess.Game("", 0, "higher: {statement}", "lower: {statement}") if real else guess.Game(guess.ASKED, 0)
    arguments = {"low": 1, "high": 8, "guesses": guess.GUESSES, "rules": ""}
    words = {"higher": game.higher, "lower": game.lower, "no_number": game.higher}
    return {"name": "text_game", "max_turns": guess.GUESSES, "arguments": {**arguments, **words}}


@contextlib.contextmanager
def runner(url: str, folder: Path) -> Iterator[None]:
    """`spo agents run` as a person starts it, ended by SIGTERM."""
    play = f"{sys.executable} {guess.__file__}"
    command = [sys.executable, "-m", "spo.cli", "agents", "run", "--harness", f"{HARNESS}={play}"]
    with (folder / "runner.log").open("wb") as log:
        process = subprocess.Popen(
            [*command, "--score", f"{play} score", "--most", str(AT_ONCE)],
            env=os.environ | {"SPO_API_URL": url},
            stdout=log,
            stderr=log,
        )
    try:
        yield
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(RUNNER_END_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def follow(client: Client, job: Job) -> Job:
    """The job once it has ended; says how far it is. Raises NotReady (code "wait_timeout")."""
    told = -math.inf

    def tell(now: Job) -> None:
        nonlocal told
        if time.monotonic() - told >= PLAIN_EVERY_SECONDS:
            told = time.monotonic()
            reward = client.metrics(now.id, max_points=1).latest("reward")
            shown = "" if reward is None else f", {1 + reward:.2f} of the last batch won"
            console.print(f"{now.state}: step {now.progress.step} of {now.progress.steps}{shown}", highlight=False)

    return client.wait(job.id, LONGEST_DEMO_SECONDS, tell)


def trial(client: Client, job_id: str, version: int, games: Sequence[str]) -> JsonObject:
    """Games against one version of the weights, with a Wilson interval of 95 %."""
    import openai

    def won(statement: str) -> bool:
        game = guess.game_of(statement)
        grant = client.agents.open(job_id, version=version, max_calls=guess.GUESSES)
        with openai.OpenAI(base_url=grant.base_url, api_key=grant.key, max_retries=5) as agent:
            right = guess.is_right(guess.play(agent, game), game.number)
        client.agents.finish(grant.id, {"token": grant.token, "status": "finished", "reward": float(right)})
        return right

    with ThreadPoolExecutor(AT_ONCE) as threads:
        wins = sum(threads.map(won, games))
    shares = {"won": wins / len(games), "interval": wilson(wins, len(games))}
    return {"version": version, "games": len(games), **shares}


def wilson(wins: int, games: int) -> list[float]:
    """The 95 % interval of a share."""
    z, share = 1.96, wins / games
    middle, scale = share + z * z / (2 * games), 1 + z * z / games
    half = z * math.sqrt(share * (1 - share) / games + z * z / (4 * games * games))
    return [round((middle - half) / scale, 4), round((middle + half) / scale, 4)]


def summary(report: ReadJson) -> str:
    """What it came to, in a line."""
    shown = " -> ".join(
        f"{side['won']:.3f} [{side['interval'][0]:.2f}, {side['interval'][1]:.2f}]"
        for side in (report["before"], report["after"])
    )
    learnt = "" if report["learning_is_shown"] else "; no learning shown"
    breaks = f"{report['breaks']} breaks in {report['calls_looked_at']} calls"
    return f"games won in three guesses: {shown}{learnt}; {report['episodes']} episodes, {breaks}"
