"""`spo agents`: a runner that leases episodes of jobs and plays each with a command, and the trace of a session.

The command is somebody's own program, unchanged: it gets the address and key of its episode's session as the clients of
OpenAI and Anthropic expect them, the problem in files, and an empty folder of its own. It runs as whoever starts the
runner, without the runner's own environment, or in a container of an image that `--image` names.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Protocol

import typer

from spo.cli.containers import ContainerLimits, Containers, Remover
from spo.cli.jobs import OutputOption, api
from spo.client import Client
from spo.client.models import EpisodeLease
from spo.console import ExitCode, Output, console, error_console, print_document, print_rows
from spo.errors import InvalidInput, NotFound, PreconditionFailed, SpoError
from spo.local.die_with_parent import KILL_SECONDS, kept_by_this_process
from spo.observability import RUNNER_EPISODES, RUNNER_PLAYING, get_logger

agents = typer.Typer(no_args_is_help=True, help="Agents in their own programs: runners of episodes, and traces.")

WAIT_SECONDS = 10.0
RENEW_SECONDS = 15.0
PAUSE_SECONDS = 2.0
# Of what a command has printed, its end: the answer where a verifier decides, the reason where it failed.
MOST_ANSWER_CHARACTERS = 65_536
# So long may a command go on that was asked to end.
END_SECONDS = 5.0
SCORE_SECONDS = 600.0
# So long the end of an episode is told again while the platform is away.
TELL_SECONDS = 300.0
# So many agents in a row that end without a call, before one has made any: the command is at fault, not the episodes.
MOST_SILENT = 3
# Of runners' work, in the folder for what is temporary; and whether a runner is at work there.
FOLDERS, LOCK = "spo-episodes-", ".lock"
INHERITED = ("PATH", "LANG", "LC_ALL", "TZ", "SSL_CERT_FILE", "SSL_CERT_DIR", "NO_PROXY", "no_proxy")
# Harbor asks the engine by Docker's own programs.
OF_DOCKER = ("DOCKER_HOST", "DOCKER_CONTEXT", "DOCKER_CERT_PATH", "DOCKER_TLS_VERIFY")
# So long may Harbor take to remove an episode's containers: an engine gives each ten seconds to end.
HARBOR_END_SECONDS = 60.0
# Ends of a trial that are the job's own limits, and are scored; any other error is none of the policy's.
HARBOR_LIMITS = frozenset(
    ("AgentTimeoutError", "ContextLengthExceededError", "ContextWindowExceededError", "OutputLengthExceededError",
     "OutputTokenExceededError")
)  # fmt: skip
# A shell that starts a runner behind itself has it ignore interrupts, and so would all that it starts.
_INTERRUPTIBLE = (
    "import os, signal, sys; signal.signal(signal.SIGINT, signal.SIG_DFL); os.execvp(sys.argv[1], sys.argv[1:])"
)

log = get_logger("agents")


class Running(Protocol):
    """A command that has been started. `stop` ends what it has started, `end` lets go of what it printed too."""

    def wait(self, seconds: float) -> int | None: ...

    def stop(self) -> None: ...

    def printed(self, most: int) -> str: ...

    def end(self) -> None: ...


class CommandHere:
    """A command of this machine, in a folder, with a keeper that ends it and all that it has started.

    When this process dies the keeper does so too, and the folder goes.
    """

    def __init__(self, command: Sequence[str], folder: Path, environment: Mapping[str, str]) -> None:
        if shutil.which(command[0], path=environment.get("PATH")) is None:
            raise FileNotFoundError(f"there is no program {command[0]}")
        # Not in the folder, which is the command's.
        self._output = tempfile.TemporaryFile()  # noqa: SIM115 - closed in end()
        try:
            self._process = subprocess.Popen(
                kept_by_this_process([*command], folder, END_SECONDS), cwd=folder, env=dict(environment),
                stdin=subprocess.DEVNULL, stdout=self._output, stderr=subprocess.STDOUT, start_new_session=True,
            )  # fmt: skip
        except OSError:
            self._output.close()
            raise

    def wait(self, seconds: float) -> int | None:
        """Its exit status; None while it runs, after so many seconds."""
        with suppress(subprocess.TimeoutExpired):
            return self._process.wait(seconds)
        return None

    def stop(self) -> None:
        """End it and all that it has started; it has END_SECONDS to do so itself."""
        self._process.terminate()
        try:
            self._process.wait(END_SECONDS + KILL_SECONDS + END_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def printed(self, most: int) -> str:
        """The end of what it has printed, in characters."""
        self._output.seek(max(0, self._output.seek(0, os.SEEK_END) - 4 * most))
        return self._output.read().decode(errors="replace").strip()[-most:]

    def end(self) -> None:
        """Let go of what it has printed."""
        self._output.close()


@dataclass(frozen=True)
class Played:
    """How a command ended: its status as an outcome has it, what it printed, and the reward that scoring found.

    status "stopped": the runner ends, which is no fault of the episode.
    """

    status: str
    printed: str
    reward: float | None = None


class EpisodeRunner:
    """Plays leased episodes with commands, at most so many at once.

    commands: by the harness's name. score: run in the episode's folder once the agent has ended; the last line that it
    prints is the reward. None: the job's verifier decides about what the agent has printed. containers: where the
    commands run; None: here, where the score always does.

    Raises InvalidInput for a command here whose program or script is not there.
    """

    # Words before each command here, such as a program that confines it.
    before: tuple[str, ...] = ()
    # What is played when the runner is to stop goes on for so long.
    patience_seconds = 0.0
    # An agent is ended so long after its session, which is when it is refused everything.
    late_seconds = 0.0
    # Why no episode can be leased now; "" while the platform answers.
    obstacle = ""
    # Whether playing an episode finds its reward, without a score.
    rewards = False

    def __init__(
        self,
        client: Client,
        pool: str,
        commands: Mapping[str, str],
        score: str | None = None,
        most: int = 1,
        containers: Containers | None = None,
    ) -> None:
        self.client = client
        self.pool = pool
        self.commands = {name: shlex.split(command) for name, command in commands.items()}
        self.score = shlex.split(score) if score else None
        self.most = most
        self.containers = containers
        self.ended = 0
        for command in [*([] if containers else self.commands.values()), *([self.score] if self.score else [])]:
            require_program(command)
        self._lock = threading.Lock()
        self._folder: Path | None = None
        self._stop_at: float | None = None
        # Agents that have ended without a call since this began, while none has made one; then None.
        self._silent: int | None = 0
        self._fault: SpoError | None = None

    def run(self, stop: threading.Event, episodes: int | None = None) -> None:
        """Lease and play until stop, or until so many episodes have begun; while the API is away, wait.

        What is played `patience_seconds` after stop is set, or when the call is interrupted, is given back. Raises
        PreconditionFailed (code "harness_is_silent") where the agents end without having called anything.
        """
        # Threads that start commands live as long as these do: with a thread the kernel ends what it has started.
        with work_folder() as self._folder, ThreadPoolExecutor(self.most, thread_name_prefix="episode") as threads:
            try:
                self._lease_and_play(threads, stop, episodes)
            except BaseException:
                # The pool waits for its threads, and an episode may take hours.
                self.patience_seconds = 0.0
                stop.set()
                raise
        if self._fault is not None:
            raise self._fault

    def _lease_and_play(self, threads: ThreadPoolExecutor, stop: threading.Event, episodes: int | None) -> None:
        begun = 0
        running: set[Future[None]] = set()
        while not stop.is_set() and self._fault is None and (episodes is None or begun < episodes):
            room = self.most - len(running)
            if episodes is not None:
                room = min(room, episodes - begun)
            if room > 0:
                leased = self._lease(room, stop)
                begun += len(leased)
                running |= {threads.submit(self.play, lease, stop) for lease in leased}
            if running:
                running -= wait(running, PAUSE_SECONDS, "FIRST_COMPLETED").done

    def _lease(self, most: int, stop: threading.Event) -> list[EpisodeLease]:
        try:
            leased = self.client.agents.lease(self.pool, most, WAIT_SECONDS)
            self.obstacle = ""
            return leased
        except SpoError as error:
            if not error.retryable:
                raise
            self.obstacle = error.message
            log.warning("no episodes can be leased now", reason=error.message)
            stop.wait(PAUSE_SECONDS)
            return []

    def play(self, lease: EpisodeLease, stop: threading.Event) -> None:
        """Play one episode and post its outcome; of a lost lease nothing is posted."""
        try:
            with (
                RUNNER_PLAYING.track_inprogress(),
                tempfile.TemporaryDirectory(prefix="episode-", dir=self._folder) as folder,
            ):
                try:
                    # One that was leased while the runner was asked to stop does not begin.
                    begins = not stop.is_set() and self._can_end(lease)
                    played = self._played(lease, Path(folder), stop) if begins else Played("stopped", "")
                except PreconditionFailed:
                    raise
                except (SpoError, OSError) as error:
                    log.error("an episode could not be played", session=lease.lease_id, reason=str(error)[:500])
                    # The runner is at fault; another one may have what this one lacks, and this one tries no faster.
                    stop.wait(PAUSE_SECONDS)
                    played = Played("stopped", "")
            self._post(lease, played)
        except PreconditionFailed as error:
            log.warning("an episode was lost", session=lease.lease_id, reason=error.message)
        except (SpoError, OSError) as error:
            log.error("an episode's end could not be posted", session=lease.lease_id, reason=str(error)[:500])

    def _can_end(self, lease: EpisodeLease) -> bool:
        """Whether the episode's end can be told: where a job wants the runner's reward, none without one is taken."""
        if self.rewards or self.score is not None or lease.reward == "verifier":
            return True
        words = f"episodes of {lease.harness} are given back: their job wants the runner's reward"
        self._fault = InvalidInput(f"{words}, and this runner has no score; start it with --score", code="no_score")
        return False

    def _post(self, lease: EpisodeLease, played: Played) -> None:
        RUNNER_EPISODES.labels(status=played.status).inc()
        if played.status == "stopped" or (played.status == "failed" and self._is_at_fault(lease, played)):
            self.client.agents.give_back(lease.lease_id, lease.session.token)
            printed = played.printed[-500:]
            log.warning("an episode is given back", session=lease.lease_id, status=played.status, printed=printed)
            return
        outcome: dict[str, object] = {
            "token": lease.session.token,
            "status": played.status,
            "reward": played.reward,
            "answer": "" if played.status == "failed" else played.printed,
        }
        self._end(lease, outcome)
        self.ended += 1
        said = {"printed": played.printed[-500:]} if played.status == "failed" else {}
        log.info("an episode has ended", session=lease.lease_id, status=played.status, reward=played.reward, **said)

    def _end(self, lease: EpisodeLease, outcome: dict[str, object]) -> None:
        """Tell an episode's end, again while the platform is away: it may have been hours of work."""
        until = time.monotonic() + TELL_SECONDS
        while True:
            try:
                self.client.agents.end(lease.lease_id, outcome)
                return
            except SpoError as error:
                if not error.retryable or time.monotonic() > until:
                    raise
                log.warning("an episode's end is told again", session=lease.lease_id, reason=error.message)
                time.sleep(PAUSE_SECONDS)

    def _is_at_fault(self, lease: EpisodeLease, played: Played) -> bool:
        """Whether a failure is the command's and no episode's, which is given back then.

        Of MOST_SILENT agents that end without a call the last one's episode has failed: should it be that problem
        after all, other runners are not stopped by it for ever.
        """
        called = self._silent is None or self.client.agents.renew(lease.lease_id, lease.session.token).calls > 0
        with self._lock:
            if called or self._silent is None:
                self._silent = None
                return False
            self._silent += 1
            if self._silent < MOST_SILENT:
                return True
            words = f"{self._silent} agents in a row have ended without a call, and none has made one yet"
            self._fault = PreconditionFailed(f"{words}: {played.printed[-500:]}", code="harness_is_silent")
            return False

    def _played(self, lease: EpisodeLease, folder: Path, stop: threading.Event) -> Played:
        command = self.commands.get(lease.harness)
        if command is None:
            return Played("failed", f"this runner has no harness {lease.harness}")
        write_problem(lease, folder)
        until = lease.session.deadline_unix_ms / 1000 + self.late_seconds
        status, printed = self._attended(lease, self.begin(command, folder, lease), stop, until)
        return self.scored(lease, folder, Played(status, printed), stop)

    def scored(self, lease: EpisodeLease, folder: Path, played: Played, stop: threading.Event) -> Played:
        """How an episode ended, with its reward: what `--score` prints; None where the verifier decides."""
        status, printed = played.status, played.printed
        if status in ("finished", "cut"):
            self._silent = None
        if status in ("failed", "stopped") or self.score is None:
            return played
        environment = environment_of(lease, folder)
        (folder / "answer.txt").write_text(printed)
        # The agent has ended: what scores it was never within its reach.
        for name in ("OPENAI_API_KEY", "ANTHROPIC_API_KEY"):
            environment.pop(name)
        until = time.time() + SCORE_SECONDS
        scoring, scored = self._attended(lease, CommandHere(self.score, folder, environment), stop, until)
        reward = reward_in(scored) if scoring == "finished" else None
        if reward is None:
            return Played("stopped" if scoring == "stopped" else "failed", scored)
        return Played(status, printed, reward)

    def begin(self, command: list[str], folder: Path, lease: EpisodeLease) -> Running:
        """Start an agent in its episode's folder."""
        if self.containers is None:
            return CommandHere([*self.before, *command], folder, environment_of(lease, folder))
        return self.containers.start(command, folder, keys_of(lease), lease.session.base_url)

    def _attended(self, lease: EpisodeLease, running: Running, stop: threading.Event, until: float) -> tuple[str, str]:
        """Wait for a command's end, until stop or a unix time, renewing the lease meanwhile.

        Returns how it ended, and its output. Raises PreconditionFailed where the lease is lost.
        """
        try:
            status = self._waited(lease, running, stop, until)
            running.stop()
            return status, running.printed(MOST_ANSWER_CHARACTERS)
        finally:
            running.stop()
            running.end()

    def _waited(self, lease: EpisodeLease, running: Running, stop: threading.Event, until: float) -> str:
        renew_at = time.monotonic() + RENEW_SECONDS
        while True:
            if (status := running.wait(0.2)) is not None:
                return "finished" if status == 0 else "failed"
            if time.time() > until:
                return "cut"
            if stop.is_set() and self._is_out_of_patience():
                return "stopped"
            if time.monotonic() >= renew_at:
                self._renew(lease)
                renew_at = time.monotonic() + RENEW_SECONDS

    def _renew(self, lease: EpisodeLease) -> None:
        """Raises PreconditionFailed where the lease is lost; while the platform is away it says neither."""
        try:
            self.client.agents.renew(lease.lease_id, lease.session.token)
        except SpoError as error:
            if not error.retryable:
                raise
            log.warning("a lease could not be renewed", session=lease.lease_id, reason=error.message)

    def _is_out_of_patience(self) -> bool:
        now = time.monotonic()
        if self._stop_at is None:
            self._stop_at = now + self.patience_seconds
        return now >= min(self._stop_at, now + self.patience_seconds)


class HarborTrial(CommandHere):
    """A trial that is interrupted first, as it has containers to remove."""

    def stop(self) -> None:
        """Interrupt Harbor, and end what is left of it after HARBOR_END_SECONDS."""
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGINT)
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(HARBOR_END_SECONDS)
        super().stop()


class HarborRunner(EpisodeRunner):
    """Plays leased episodes as trials of Harbor: its agents, its backends, and the reward of its verifier.

    folder: of tasks, or a task; an episode's is the one whose instruction is its statement. agents: by the harness's
    name, words of `harbor trial start`, of which the first is the agent. Harbor is a program of its own on the path.

    Raises InvalidInput, and PreconditionFailed (code "package_missing") and NotReady (code "no_containers").
    """

    late_seconds = SCORE_SECONDS
    rewards = True

    def __init__(self, client: Client, pool: str, agents: Mapping[str, str], folder: Path, most: int = 1) -> None:
        if shutil.which("harbor") is None:
            message = "there is no program harbor: `pip install harbor` into an environment of its own (Python 3.12)"
            raise PreconditionFailed(message, code="package_missing")
        self.tasks = harbor_tasks(folder)
        programs = [sys.executable, "-c", _INTERRUPTIBLE, "harbor", "trial", "start"]
        before = shlex.join(programs)
        super().__init__(client, pool, {name: f"{before} --agent {words}" for name, words in agents.items()}, most=most)
        # Of the names of all its trials, by which an engine knows what belongs to them.
        self._mark = f"spo{os.getpid()}-{time.time_ns()}"
        named = {word.partition("=")[0] for words in agents.values() for word in shlex.split(words)}
        self._remover = None if named & {"-e", "--env"} else Remover(self._mark)

    def close(self) -> None:
        """Remove what trials have left."""
        if self._remover is not None:
            self._remover.close()

    def begin(self, command: list[str], folder: Path, lease: EpisodeLease) -> Running:
        """Start a trial, whose agent may take what is left of the session's time. Raises NotFound."""
        task = self.tasks.get(_same(lease.statement))
        if task is None:
            raise NotFound(f"no task of Harbor has the instruction of problem {lease.problem_id}", code="no_task")
        left = max(1.0, lease.session.deadline_unix_ms / 1000 - time.time())
        trial = {
            "task": {"path": str(task)},
            "trial_name": f"{self._mark}-{lease.session.id.lower()}",
            "trials_dir": str(folder / "trials"),
            "agent": {"model_name": f"openai/{lease.session.model}", "max_timeout_sec": left},
        }
        (folder / "trial.json").write_text(json.dumps(trial))
        config = os.environ.get("DOCKER_CONFIG") or str(Path.home() / ".docker")
        here = {name: os.environ[name] for name in OF_DOCKER if name in os.environ} | {"DOCKER_CONFIG": config}
        # An agent's import path is looked up where the runner was started, as Python's own are.
        here |= {"HARBOR_TELEMETRY": "0", "PYTHONPATH": os.getcwd()}
        environment = {**environment_of(lease, folder), **here}
        return HarborTrial([*command, "--config", str(folder / "trial.json")], folder, environment)

    def scored(self, lease: EpisodeLease, folder: Path, played: Played, stop: threading.Event) -> Played:
        """How a trial ended, with its verifier's reward; an error that is no limit of the job's has none."""
        found = next(iter(folder.glob("trials/*/result.json")), None)
        if played.status != "finished" or found is None:
            return played if played.status == "stopped" else Played("failed", played.printed)
        result = json.loads(found.read_text())
        failure = result.get("exception_info")
        rewards = (result.get("verifier_result") or {}).get("rewards") or {}
        reward = rewards.get("reward", next(iter(rewards.values())) if len(rewards) == 1 else None)
        if failure is not None and failure["exception_type"] not in HARBOR_LIMITS:
            return Played("failed", f"{failure['exception_type']}: {failure['exception_message']}")
        if not isinstance(reward, int | float) or not 0 <= reward <= 1:
            return Played("failed", f"Harbor's rewards {json.dumps(rewards)} have none from 0 to 1")
        self._silent = None
        return Played("finished" if failure is None else "cut", played.printed, float(reward))


def harbor_tasks(folder: Path) -> dict[str, Path]:
    """The tasks of Harbor in a folder, or the one that it is, by their instruction. Raises InvalidInput."""
    found: dict[str, Path] = {}
    for each in sorted(folder.glob("task.toml")) or sorted(folder.glob("*/task.toml")):
        task = each.parent.resolve()
        try:
            instruction = _same((task / "instruction.md").read_text())
        except (OSError, UnicodeDecodeError) as error:
            raise InvalidInput(f"the task {task.name} has no instruction: {error}", code="bad_task") from None
        if instruction in found:
            raise InvalidInput(f"{found[instruction].name} and {task.name} have the same instruction", code="bad_task")
        found[instruction] = task
    if not found:
        raise InvalidInput(f"there is no task of Harbor, a folder with a task.toml, in {folder}", code="bad_task")
    return found


def _same(text: str) -> str:
    """The text without what a file of problems may change about it."""
    return " ".join(text.split())


def require_program(command: Sequence[str]) -> None:
    """Raises InvalidInput where a command's program, or the script that it is given by its whole path, is not there."""
    if not command or shutil.which(command[0]) is None:
        raise InvalidInput(f"there is no program {command[0] if command else 'in an empty command'}", code="no_program")
    if len(command) > 1 and command[1].startswith("/") and Path(command[1]).suffix and not Path(command[1]).exists():
        raise InvalidInput(f"{command[0]} is to run {command[1]}, which is not there", code="no_program")


def write_problem(lease: EpisodeLease, folder: Path) -> None:
    """Put the problem where the command looks for it: its statement, and all that is known as JSON."""
    known = {
        "statement": lease.statement,
        "arguments": lease.arguments,
        "problem_id": lease.problem_id,
        "seed": lease.seed,
        "session": lease.session.id,
    }
    (folder / "statement.txt").write_text(lease.statement)
    (folder / "problem.json").write_text(json.dumps(known))


def environment_of(lease: EpisodeLease, folder: Path) -> dict[str, str]:
    """What a command sees here: its session's address and key in the words of OpenAI's and Anthropic's clients."""
    base_url = lease.session.base_url
    return {
        **{name: os.environ[name] for name in INHERITED if name in os.environ},
        **keys_of(lease),
        "HOME": str(folder),
        "OPENAI_BASE_URL": base_url,
        "OPENAI_API_BASE": base_url,
        "ANTHROPIC_BASE_URL": base_url.removesuffix("/v1"),
        "SPO_PROBLEM": str(folder / "problem.json"),
    }


def keys_of(lease: EpisodeLease) -> dict[str, str]:
    """What a command sees wherever it runs."""
    return {
        "OPENAI_API_KEY": lease.session.key,
        "ANTHROPIC_API_KEY": lease.session.key,
        "CLAUDE_CODE_ATTRIBUTION_HEADER": "0",
        "SPO_MODEL": lease.session.model,
    }


def reward_in(printed: str) -> float | None:
    """The number from 0 to 1 in the last line; None where there is none."""
    lines = printed.strip().splitlines()
    try:
        reward = float(lines[-1]) if lines else None
    except ValueError:
        return None
    return reward if reward is not None and 0 <= reward <= 1 else None


@contextlib.contextmanager
def work_folder() -> Iterator[Path]:
    """A folder for the episodes of one runner; those that runners which have died left behind are removed."""
    base = Path(tempfile.gettempdir())
    for left in base.glob(f"{FOLDERS}*"):
        # Whose runner lives is locked; one that is being made has no lock yet.
        with suppress(OSError):
            if left.lstat().st_uid == os.getuid():
                with (left / LOCK).open() as lock:
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    shutil.rmtree(left)
    with tempfile.TemporaryDirectory(prefix=FOLDERS, ignore_cleanup_errors=True) as name:
        folder = Path(name)
        with (folder / f"{LOCK}.new").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            Path(lock.name).rename(folder / LOCK)
            yield folder


@agents.command("run")
def run_episodes(
    harness: Annotated[list[str], typer.Option("--harness", help="NAME=COMMAND, as tasks.harness.name has it.")],
    pool: Annotated[str, typer.Option("--pool", help="tasks.harness.runner_pool of the jobs.")] = "default",
    score: Annotated[
        str | None, typer.Option("--score", help="Command whose last line is the reward; default: the job's verifier.")
    ] = None,
    most: Annotated[int, typer.Option("--most", min=1, max=64, help="Episodes at once.")] = 1,
    image: Annotated[
        str | None, typer.Option("--image", help="IMAGE[,memory_mib=2048][,processors=1]: play in containers of it.")
    ] = None,
    episodes: Annotated[
        int | None, typer.Option("--episodes", min=1, help="End after so many; default: never.")
    ] = None,
) -> None:
    """Play episodes of jobs with your own commands; needs the scope agents:run."""
    named = _named(harness)
    with api() as client, contextlib.ExitStack() as stack:
        containers = None
        if image is not None:
            containers = stack.enter_context(contextlib.closing(Containers(ContainerLimits.parse(image))))
        _run(EpisodeRunner(client, pool, named, score, most, containers), episodes)


@agents.command("harbor")
def run_trials(
    folder: Annotated[Path, typer.Argument(help="Tasks of Harbor, or one; each is known by its instruction.")],
    harness: Annotated[
        list[str], typer.Option("--harness", help="NAME=AGENT, with more of `harbor trial start` behind it.")
    ],
    pool: Annotated[str, typer.Option("--pool", help="tasks.harness.runner_pool of the jobs.")] = "default",
    most: Annotated[int, typer.Option("--most", min=1, max=64, help="Episodes at once.")] = 1,
    episodes: Annotated[
        int | None, typer.Option("--episodes", min=1, help="End after so many; default: never.")
    ] = None,
) -> None:
    """Play episodes of jobs as trials of Harbor, whose verifiers reward them; needs the scope agents:run."""
    with api() as client, contextlib.closing(HarborRunner(client, pool, _named(harness), folder, most)) as runner:
        _run(runner, episodes)


@agents.command("harbor-problems")
def print_problems(folder: Annotated[Path, typer.Argument(help="Tasks of Harbor, or one.")]) -> None:
    """The instructions of Harbor's tasks as rows of a job's tasks.path (JSONL)."""
    for task in harbor_tasks(folder).values():
        # No answer is compared: the tests of the task decide.
        row = {"statement": (task / "instruction.md").read_text().strip(), "answer": {"expected": [task.name]}}
        typer.echo(json.dumps(row))


def _named(harness: Sequence[str]) -> dict[str, str]:
    """What each harness is, by its name; ends the command where one is not said."""
    named = dict(each.partition("=")[::2] for each in harness)
    if not all(name and command for name, command in named.items()):
        error_console.print("--harness is NAME=COMMAND")
        raise typer.Exit(ExitCode.INVALID_INPUT)
    return named


def _run(runner: EpisodeRunner, episodes: int | None) -> None:
    """Play until SIGTERM, an interrupt, or so many episodes."""
    stop = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: stop.set())
    with suppress(KeyboardInterrupt):
        runner.run(stop, episodes)
    console.print(f"{runner.ended} episodes have ended")


@agents.command("trace")
def show_trace(session_id: Annotated[str, typer.Argument(help="ses_...")], output: OutputOption = Output.TABLE) -> None:
    """The calls of a session: what each goes on from, and where history was broken and why."""
    with api() as client:
        found = client.agents.tree(session_id)
    if output is Output.TABLE:
        columns = ("number", "parent", "reason", "finish_reason", "version_last", "text")
        print_rows(found.calls, columns, output)
    else:
        print_document(found, output)
