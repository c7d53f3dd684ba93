"""The command `spo`. Imports neither torch nor any service.

Exit codes are stable: `spo.console.EXIT_CODES` says what each means.
"""

from __future__ import annotations

import os
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Annotated

import typer

from spo.cli import (
    continual as cli_continual,
)
from spo.cli import (
    datasets as cli_datasets,
)
from spo.cli import (
    dead_letters as cli_dead_letters,
)
from spo.cli import (
    evaluations as cli_eval,
)
from spo.cli import (
    experience as cli_experience,
)
from spo.cli import (
    export as cli_export,
)
from spo.cli import (
    jobs as cli_jobs,
)
from spo.cli import (
    judge as cli_judge,
)
from spo.cli import (
    mirror as cli_mirror,
)
from spo.cli import (
    plan as cli_plan,
)
from spo.cli import (
    platform as cli_platform,
)
from spo.cli import (
    tasks as cli_tasks,
)
from spo.cli import (
    training as cli_training,
)
from spo.cli import (
    verifier as cli_verifier,
)
from spo.cli.start import convert as cli_convert
from spo.cli.start import init as cli_init
from spo.console import ExitCode, Output, console, error_console, exit_code_of, print_error
from spo.errors import SpoError

app = typer.Typer(
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)
app.add_typer(cli_jobs.jobs, name="job")
app.add_typer(cli_training.trajectories, name="trajectory")
app.add_typer(cli_training.weights, name="weights")
cli_jobs.jobs.command("checkpoints")(cli_training.list_checkpoints)
cli_jobs.jobs.command("metrics")(cli_training.show_metrics)
app.command("replicas")(cli_training.list_replicas)
app.command("export")(cli_export.export_weights)
app.command("ask")(cli_training.ask_policy)
app.command("eval")(cli_eval.evaluate)
app.command("cancel-eval")(cli_eval.cancel)
cli_jobs.jobs.command("mirror")(cli_mirror.mirror_job)
app.add_typer(cli_datasets.datasets, name="dataset")
app.add_typer(cli_tasks.tasks, name="tasks")
app.add_typer(cli_experience.experience, name="experience")
app.command("init")(cli_init.init)
app.add_typer(cli_convert.convert, name="convert")
app.command()(cli_judge.judge)
app.command()(cli_plan.plan)
app.command()(cli_platform.scale)
app.command()(cli_platform.audit)
app.add_typer(cli_platform.keys, name="key")
app.add_typer(cli_verifier.verifier, name="verifier")
app.add_typer(cli_platform.platform, name="platform")
app.add_typer(cli_dead_letters.dead_letters, name="dead-letters")
app.add_typer(cli_continual.continual, name="continual")


def _print_version(asked: object) -> None:
    if asked:
        console.print(f"spo {version('spo-platform')}", highlight=False)
        raise typer.Exit


@app.callback()
def options(
    *,
    _version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Show the version and end.")
    ] = False,
) -> None:
    """Soft Policy Optimization: post-train language models from any experience."""


# The launcher needs the `embedded` extra, so its modules are imported by the commands that use them and not above:
# a client-only install can still submit and watch jobs.


@app.command()
def up(
    name: Annotated[str, typer.Option("--name", help="Folder below runs/ for state and logs.")] = "local",
    state: Annotated[
        Path | None, typer.Option("--state", help="Folder of its Redis, weights and checkpoints; SPO_STATE_PATH.")
    ] = None,
    port: Annotated[
        int | None, typer.Option("--port", min=0, max=65535, help="Of the API and the web page; 0: any.")
    ] = None,
) -> None:
    """Start every service on this machine and stay until Ctrl-C or `spo down`."""
    from spo.demo.toy_model import toy_model_in_background
    from spo.local.commands import run_platform

    if state is not None:
        # All that this process starts, the toy model's build too, reads it there.
        os.environ["SPO_STATE_PATH"] = str(state.absolute())
    with toy_model_in_background():
        run_platform(name, port)


@app.command()
def down(
    name: Annotated[str | None, typer.Option("--name", help="Which one; default: all on this machine.")] = None,
) -> None:
    """Stop what `spo up` or `spo demo` started."""
    from spo.local.commands import stop_platforms

    stop_platforms(name)


@app.command()
def demo() -> None:
    """Run a whole job on the toy contest and write runs/demo/report.json and report.png."""
    from spo.demo.demo import run_demo

    run_demo()


@app.command("toy-model")
def toy_model(
    folder: Annotated[Path | None, typer.Argument(help="Folder to make; default: among the platform's models.")] = None,
    *,
    hard: Annotated[bool, typer.Option("--hard", help="Of the hard contest.")] = False,
) -> None:
    """Make pi0 of the toy contest, the `model.path` of its recipes, and print where it is; a minute of one core."""
    from spo.demo import toy_model as toy

    difficulty = "hard" if hard else "standard"
    made = toy.copy_toy_model(difficulty, folder) if folder else toy.toy_model(difficulty)
    console.print(str(made), highlight=False, markup=False, soft_wrap=True)


@app.command("real-demo")
def real_demo(
    seed: Annotated[int, typer.Option(min=0, help="Seed of the job: order of the problems, samples.")] = 0,
) -> None:
    """Teach SmolLM2-135M to add and write runs/real-demo/report.json and report.png; fetches 93 MB the first time."""
    from spo.demo.real import run_real_demo

    run_real_demo(seed)


@app.command("demo-experience")
def demo_experience() -> None:
    """Run two jobs, the second from the first one's experience, and write runs/demo-experience/report.{json,png,md}."""
    from spo.demo.experience import run_demo_experience

    run_demo_experience()


@app.command("demo-loop")
def demo_loop(
    seed: Annotated[
        int, typer.Option(min=0, help="Seed of jobs, of who asks what, and of whose feedback is wrong.")
    ] = 0,
) -> None:
    """Serve a model, learn from its users' feedback, part of it wrong; writes runs/demo-loop/report.{json,png,md}."""
    from spo.demo.loop.command import run_demo_loop

    run_demo_loop(seed)


@app.command()
def reproduce(
    *,
    quick: Annotated[bool, typer.Option("--quick", help="One seed, few steps: under 15 minutes on two cores.")] = False,
    seeds: Annotated[int | None, typer.Option("--seeds", min=1, help="Seeds per method; default 3, quick 1.")] = None,
    runs: Annotated[str, typer.Option("--runs", help="Only runs whose name matches this regular expression.")] = "",
    only: Annotated[list[str] | None, typer.Option("--only", help="Only this setting, such as stability.")] = None,
) -> None:
    """Run the paper's comparisons on the toy contest and write runs/reproduce/report.{json,md} and plots."""
    from spo.reproduce.command import run_reproduce

    run_reproduce(quick=quick, seeds=seeds, pattern=runs, only=only or [])


@app.command()
def doctor(
    *,
    deep: Annotated[bool, typer.Option("--deep", help="Also import vLLM and DeepSpeed; takes a minute.")] = False,
    output: cli_jobs.OutputOption = Output.TABLE,
) -> None:
    """Say what this machine has and lacks for running the platform, why it matters and what to do; 1 when it lacks."""
    from spo.doctor.doctor import examine

    if not examine(deep=deep, output=output):
        raise typer.Exit(ExitCode.FAILURE)


def main() -> None:
    """Entry point: every SpoError becomes a message with the next step and a stable exit code."""
    try:
        app()
    except SpoError as error:
        print_error(error)
        sys.exit(exit_code_of(error))
    except KeyboardInterrupt:
        error_console.print("interrupted")
        sys.exit(ExitCode.INTERRUPTED)
