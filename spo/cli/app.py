"""The command `spo`: the platform itself (`up`, `down`, `scale`, `key`, `audit`), its demos, and all other groups of
commands.

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
    agents as cli_agents,
    jobs as cli_jobs,
    judge as cli_judge,
    start as cli_start,
    tasks as cli_tasks,
    training as cli_training,
)
from spo.cli.jobs import LimitOption, OutputOption, api
from spo.console import ExitCode, Output, console, error_console, exit_code_of, print_document, print_error, print_rows
from spo.errors import PreconditionFailed, SpoError

keys = typer.Typer(no_args_is_help=True, help="API keys; needs the scope admin.")

platform = typer.Typer(no_args_is_help=True, help="What the platform is, what it lost, and making lost jobs again.")

app = typer.Typer(
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)


@platform.command("show")
def show_platform(output: OutputOption = Output.TABLE) -> None:
    """Which platform this is, what it lost, and the jobs whose records are gone."""
    with api() as client:
        found = client.platform.describe()
    if output is not Output.TABLE:
        print_document(found, output)
        return
    console.print(found.notice or f"platform {found.epoch}, schema {found.schema_version}: nothing is missing")
    if found.lost_jobs:
        print_rows(found.lost_jobs, ("id", "name", "state", "saved_at", "checkpoints", "weight_versions"), output)


@platform.command("attention")
def show_attention(output: OutputOption = Output.TABLE) -> None:
    """What is wrong now and what to do about it: services, jobs, entries that were given up on; 1 when errors are."""
    with api() as client:
        found = client.platform.attention()
    print_rows(found, ("severity", "subject", "message", "remedy"), output)
    if any(entry.severity == "error" for entry in found):
        raise typer.Exit(ExitCode.FAILURE)


@platform.command("rebuild")
def rebuild(
    job_id: Annotated[list[str] | None, typer.Argument(help="Lost jobs; default: all.")] = None,
    *,
    resume: Annotated[bool, typer.Option("--resume", help="Queue them again; they go on from checkpoints.")] = False,
    output: OutputOption = Output.TABLE,
) -> None:
    """Make the records of lost jobs again from their manifests, and acknowledge the loss; needs the scope admin."""
    with api() as client:
        found = client.platform.rebuild(job_id or None, resume=resume)
    print_rows(found, ("id", "state", "note"), output)


@platform.command("repair-redis")
def repair_redis(
    folder: Annotated[
        Path | None, typer.Option("--folder", help="Of the Redis; default: redis/ in SPO_STATE_PATH.")
    ] = None,
    *,
    cut: Annotated[
        bool, typer.Option("--cut", help="Cut the file at its first damage: what was written after it is lost.")
    ] = False,
    output: OutputOption = Output.TABLE,
) -> None:
    """Check the append-only file of the Redis that `spo up` starts, and with --cut make it loadable, after a backup."""
    from spo.local.launcher import check_append_only_file
    from spo.service.settings import PlatformSettings

    found = check_append_only_file(folder or PlatformSettings().state_path / "redis", repair=cut)
    if output is not Output.TABLE:
        print_document({"whole": found.whole, "words": found.words, "backup": str(found.backup or "")}, output)
        raise typer.Exit(0 if found.whole else ExitCode.FAILURE)
    console.print(found.words, markup=False)
    if found.backup:
        console.print(f"cut; the file as it was is in {found.backup}. `spo up`, then `spo platform show`", markup=False)
    elif not found.whole:
        console.print("it is damaged and Redis cannot load it: --cut keeps what is before the damage")
    if not found.whole:
        raise typer.Exit(ExitCode.FAILURE)


def scale(
    inference: Annotated[int | None, typer.Option("--inference", min=0, help="Replicas to have.")] = None,
    sandbox_judge: Annotated[int | None, typer.Option("--sandbox-judge", min=0, help="Replicas to have.")] = None,
    verifier: Annotated[int | None, typer.Option("--verifier", min=0, help="Replicas to have.")] = None,
    output: OutputOption = Output.TABLE,
) -> None:
    """Show how many replicas each pool has, or ask for other numbers; they join and drain while jobs run."""
    pools = {"inference": inference, "sandbox_judge": sandbox_judge, "verifier": verifier}
    replicas = {pool: count for pool, count in pools.items() if count is not None}
    with api() as client:
        found = client.platform.set_scale(**replicas) if replicas else client.platform.scale()
    if output is not Output.TABLE:
        print_document(found, output)
        return
    rows = [{"pool": pool, **counts.model_dump()} for pool, counts in found.pools.items()]
    print_rows(rows, ("pool", "desired", "live", "draining", "minimum", "maximum"), output)


@keys.command("create")
def create_key(
    name: Annotated[str, typer.Argument(help="Whose it is.")],
    tenant: Annotated[str, typer.Option("--tenant", help="Owns the jobs submitted with it; sees no others.")],
    scope: Annotated[list[str], typer.Option("--scope", help="jobs:read, jobs:write, ...; repeat it.")],
    max_active_jobs: Annotated[int | None, typer.Option("--max-active-jobs", min=1, help="Quota.")] = None,
    days: Annotated[float | None, typer.Option("--days", min=0.001, help="Life; default: until revoked.")] = None,
    output: OutputOption = Output.TABLE,
) -> None:
    """Make a key and print its token, which nobody can see again."""
    seconds = int(days * 86400) if days else None
    with api() as client:
        print_document(client.platform.create_key(name, tenant, scope, max_active_jobs, seconds), output)


@keys.command("ls")
def list_keys(output: OutputOption = Output.TABLE) -> None:
    """Every key, revoked ones too."""
    with api() as client:
        found = client.platform.keys()
    print_rows(found, ("key_id", "name", "tenant", "scopes", "created_at", "revoked_at"), output)


@keys.command("revoke")
def revoke_key(key_id: Annotated[str, typer.Argument()], output: OutputOption = Output.TABLE) -> None:
    """Make a key useless."""
    with api() as client:
        print_document(client.platform.revoke_key(key_id), output)


def audit(limit: LimitOption = 50, output: OutputOption = Output.TABLE) -> None:
    """Who changed what and when, and who was refused; needs the scope admin."""
    with api() as client:
        found = client.platform.audit(limit)
    print_rows(found, ("at", "principal", "tenant", "method", "path", "status"), output)


app.add_typer(cli_jobs.jobs, name="job")
app.add_typer(cli_training.trajectories, name="trajectory")
app.add_typer(cli_training.weights, name="weights")
cli_jobs.jobs.command("checkpoints")(cli_training.list_checkpoints)
cli_jobs.jobs.command("metrics")(cli_training.show_metrics)
app.command("replicas")(cli_training.list_replicas)
app.command("export", hidden=True)(cli_training.export_weights)
app.command("ask")(cli_training.ask_policy)
app.command("eval")(cli_jobs.evaluate)
app.command("cancel-eval")(cli_jobs.cancel_evaluation)
cli_jobs.jobs.command("mirror")(cli_jobs.mirror_job)
app.add_typer(cli_tasks.datasets, name="dataset")
app.add_typer(cli_tasks.tasks, name="tasks")
app.add_typer(cli_training.experience, name="experience")
app.command("init")(cli_start.init)
app.add_typer(cli_start.convert, name="convert")
app.add_typer(cli_start.data, name="data")
app.command()(cli_judge.judge)
app.command()(cli_start.plan)
app.command()(scale)
app.command()(audit)
app.add_typer(keys, name="key")
app.add_typer(cli_judge.verifier, name="verifier")
app.add_typer(platform, name="platform")
app.add_typer(cli_jobs.dead_letters, name="dead-letters")
app.add_typer(cli_training.continual, name="continual")
app.add_typer(cli_agents.agents, name="agents")


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


# Demos and the launcher are imported by the commands that use them and not above: `spo job` starts without them.


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
    from spo.demo.demo import toy_model_in_background
    from spo.local.launcher import run_platform

    if state is not None:
        # All that this process starts, the toy model's build too, reads it there.
        os.environ["SPO_STATE_PATH"] = str(state.absolute())
    with toy_model_in_background():
        run_platform(name, port)


@app.command()
def down(
    name: Annotated[str | None, typer.Option("--name", help="Which one; default: the only one that runs.")] = None,
    *,
    every: Annotated[bool, typer.Option("--all", help="All of them.")] = False,
) -> None:
    """Stop what `spo up` or `spo demo` started."""
    from spo.local.launcher import stop_platforms

    stop_platforms(name, every=every)


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
    """Make pi0 of the toy contest, the `model.path` of its recipes, and print where it is; hard takes a minute."""
    from spo.demo import demo as toy

    difficulty = "hard" if hard else "standard"
    made = toy.copy_toy_model(difficulty, folder) if folder else toy.toy_model(difficulty)
    console.print(str(made), highlight=False, markup=False, soft_wrap=True)


@app.command("real-demo")
def real_demo(
    seed: Annotated[int, typer.Option(min=0, help="Seed of the job: order of the problems, samples.")] = 0,
    recipe: Annotated[
        Path | None,
        typer.Option(help="Another job of the same sums: runs/real-demo-RECIPE-SEED.", dir_okay=False, exists=True),
    ] = None,
) -> None:
    """Teach SmolLM2-135M to add and write runs/real-demo/report.json and report.png; fetches 93 MB the first time."""
    from spo.demo.addition import run_real_demo

    run_real_demo(seed, recipe)


@app.command("agents-demo")
def agents_demo(
    seed: Annotated[int, typer.Option(min=0, help="Seed of the job.")] = 0,
    seeds: Annotated[
        int,
        typer.Option(min=0, help="So many seeds, each beside the built-in game; goes on where it was ended."),
    ] = 0,
    *,
    real: Annotated[bool, typer.Option("--real", help="SmolLM2-135M guesses sums; fetches 93 MB once.")] = False,
    age: Annotated[
        list[int] | None,
        typer.Option(min=0, help="With --seeds: by the oldest episode, in versions, in place of the program."),
    ] = None,
) -> None:
    """A program with the package openai guesses numbers, and a policy learns from it; runs/agents-demo/report.json."""
    from spo.demo.agents import run_agents_demo, run_agents_seeds

    if seeds:
        run_agents_seeds(seeds, real=real, ages=age or ())
    else:
        run_agents_demo(seed, real=real)


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
    from spo.demo.loop import run_demo_loop

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
    kubernetes: Annotated[
        bool, typer.Option("--kubernetes", help="A release of the chart in kubectl's context, instead of this machine.")
    ] = False,
    namespace: Annotated[
        str, typer.Option("--namespace", "-n", help="Of the release; default: that of kubectl's context.")
    ] = "",
    output: cli_jobs.OutputOption = Output.TABLE,
) -> None:
    """Say what this machine, or a cluster, has and lacks for running the platform, and what to do; 1 when it lacks."""
    from spo.doctor import examine
    from spo.kubernetes_doctor import examine_cluster

    well = examine_cluster(namespace, output) if kubernetes else examine(deep=deep, output=output)
    if not well:
        raise typer.Exit(ExitCode.FAILURE)


def main() -> None:
    """Entry point: every SpoError becomes a message with the next step and a stable exit code."""
    try:
        app()
    except SpoError as error:
        print_error(error)
        sys.exit(exit_code_of(error))
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        if package in ("", "spo", "services"):
            raise
        # Clients and images hold what their own commands need.
        message = f"this command needs the package {package}, which is not installed here"
        print_error(PreconditionFailed(message, code="package_missing"))
        sys.exit(ExitCode.CONFLICT)
    except KeyboardInterrupt:
        error_console.print("interrupted")
        sys.exit(ExitCode.INTERRUPTED)
