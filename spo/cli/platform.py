"""`spo scale`, `spo key`, `spo audit`: the platform itself, on the command line."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from spo.cli.jobs import LimitOption, OutputOption, api
from spo.console import ExitCode, Output, console, print_document, print_rows

keys = typer.Typer(no_args_is_help=True, help="API keys; needs the scope admin.")


platform = typer.Typer(no_args_is_help=True, help="What the platform is, what it lost, and making lost jobs again.")


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
    # Like the launcher: needs the extra `embedded`.
    from spo.local.redis_server import check_append_only_file
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
