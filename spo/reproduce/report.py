"""The report: every claim with our numbers, a table per setting, what it all cost; report.json, report.md and plots."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from spo.demo.report import machine
from spo.reproduce.claims import findings, where_the_loss_earns_its_keep
from spo.reproduce.overview import overview
from spo.reproduce.plan import SETTINGS
from spo.reproduce.plots import draw_plots
from spo.reproduce.results import Result, Results, last, mean, total_rollouts
from spo.reproduce.statistics import Estimate, mean_score

TITLES = {
    "p160": "160 training problems (the paper's Fig. 1 in small)",
    "p32": "32 training problems",
    "hard": "Weaker pi0, no human solutions",
    "contaminated": "Contaminated offline data under a weak reward",
    "2a": "Ablation 2a: terminal losses",
    "2b": "Ablation 2b: reverse-Q targets",
    "2c": "Ablation 2c: Monte-Carlo targets at pivotal tokens",
    "pushes": "Weights pushed every step against every ten",
    "stability": "Long runs",
}
CONTROLLED = ("p160", "p32", "hard", "contaminated")
COLUMNS = (
    "method",
    "seeds",
    "pass@1",
    "pass@10",
    "distinct",
    "hacked",
    "rollouts",
    "CPU s",
    "CPU s with values",
    "training s",
)


def write_report(
    results: Results, memory: Sequence[Mapping[str, Any]], folder: Path, *, quick: bool, wall_seconds: float
) -> dict[str, Any]:
    """Write everything below folder and return the document of report.json."""
    report = report_of(results, memory, quick=quick, wall_seconds=wall_seconds)
    plots = draw_plots(results, folder)
    (folder / "report.json").write_text(json.dumps(report, indent=2) + "\n")
    (folder / "report.md").write_text("\n".join(markdown(report, [path.name for path in plots])) + "\n")
    return report


def report_of(
    results: Results, memory: Sequence[Mapping[str, Any]], *, quick: bool, wall_seconds: float
) -> dict[str, Any]:
    """The document: verdicts, claims, tables, costs, failures, machine."""
    # A QUICK plan leaves rows out on purpose; in a full one a claim without runs is a gap to see.
    claims = [finding.document() for finding in findings(results) if not (quick and finding.estimate is None)]
    return {
        "quick": quick,
        "verdicts": dict(Counter(claim["verdict"] for claim in claims)),
        "claims": claims,
        "earns_its_keep": where_the_loss_earns_its_keep(results, CONTROLLED),
        "tables": {
            setting: [_row(results, setting, method) for method in results.methods(setting)] for setting in SETTINGS
        },
        "memory": list(memory),
        "failed": [
            {"name": run["name"], "state": run["state"], "failure": run["failure"]}
            for run in results.all
            if run["state"] != "succeeded"
        ],
        # From these every interval above can be computed again.
        "last_evaluations": {
            run["name"]: run["evaluations"][-1]["per_problem"] for run in results.all if run["evaluations"]
        },
        "alarms": [{"name": run["name"], "first": first} for run in results.all if (first := _first_alarms(run))],
        "runs": len(results.all),
        "wall_seconds": round(wall_seconds, 1),
        "machine": machine(),
    }


def _row(results: Results, setting: str, method: str) -> dict[str, Any]:
    runs = results.row(setting, method)
    train = mean(run["cpu_seconds"]["train"] for run in runs)
    estimate = mean(map(results.estimate_cpu_seconds, runs))
    return {
        "method": method,
        "seeds": len(runs),
        "pass@1": _score(results, setting, method, 1),
        "pass@10": _score(results, setting, method, 10),
        "before": {str(k): _before(runs, k) for k in (1, 10)},
        "distinct": mean(last(run, "distinct_solutions") for run in runs),
        "entropy": mean(last(run, "entropy") for run in runs),
        "public_only_rate": mean(last(run, "public_only_rate") for run in runs),
        "hard_coded_rate": mean(last(run, "hard_coded_rate") for run in runs),
        "hacked_rate": mean(_hacked(run) for run in runs),
        "rollouts": {name: mean(run["rollouts"][name] for run in runs) for name in ("online", "values", "pivotal")}
        | {"total": mean(map(total_rollouts, runs))},
        "cpu_seconds": {"train": train, "values": estimate, "total": (train or 0) + (estimate or 0)},
        "training_seconds": mean(run["seconds"]["train"] for run in runs),
        "trainer_memory_bytes": mean(run["trainer_memory_bytes"] for run in runs),
        "steps": max((int(run["evaluations"][-1]["step"]) for run in runs if run["evaluations"]), default=0),
    }


def _hacked(run: Result) -> float | None:
    examined = run.get("on_training_problems")
    return float(examined["public_only_rate"]) if examined else None


def _first_alarms(run: Result) -> dict[str, int]:
    """The step at which each alarm of the collapse guard first sounded."""
    sounded = [event["body"] for event in run["happened"] if event["kind"] == "alarm"]
    return {body["alarm"]: int(body["step"]) for body in reversed(sounded)}


def _score(results: Results, setting: str, method: str, k: int) -> dict[str, Any] | None:
    scores = results.scores(setting, method, k)
    return None if scores is None else asdict(mean_score(scores))


def _before(runs: Sequence[Result], k: int) -> float | None:
    return mean(run["evaluations"][0]["pass_at_k"][str(k)]["value"] for run in runs if run["evaluations"])


def markdown(report: Mapping[str, Any], plots: Sequence[str]) -> Iterator[str]:
    """The lines of report.md."""
    yield "# Soft Policy Optimization on the toy contest: what our runs say to the paper's claims"
    yield ""
    at = report["machine"]
    yield (
        f"{report['runs']} runs; {at['processor']}, {at['cores']} cores, Python {at['python']}, {at['at']}. "
        "Intervals are 95 % bootstraps over seeds and held-out problems together."
    )
    if report["quick"]:
        yield ""
        yield (
            "**This is a QUICK report: one seed, few steps, few problems. It shows that everything runs; its numbers "
            "decide nothing.**"
        )
    yield from ("", "## At a glance", "")
    yield from overview(report)
    yield from ("", "## Claims", "", "| claim | setting | ours | verdict | why |", "|---|---|---|---|---|")
    for claim in report["claims"]:
        mark = "" if claim["source"] == "paper" else " (ours)"
        numbers = f"{_interval(claim['estimate'])}, {claim['measured']}" if claim["estimate"] else "-"
        yield f"| {claim['claim']}{mark} | {claim['setting']} | {numbers} | {claim['verdict']} | {claim['reason']} |"
    yield from ("", "## Where the loss earns its keep, and where the data alone would do", "")
    yield from (f"- {sentence}" for sentence in report["earns_its_keep"])
    for setting, rows in report["tables"].items():
        yield from ("", f"## {TITLES[setting]}", "")
        yield from _table(rows)
    yield from ("", "## Trainer memory, SPO against PPO", "", *_memory(report["memory"]), "")
    yield from _notes(report)
    yield from (f"![{name}]({name})" for name in plots)


def _table(rows: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    if not rows:
        yield "No run of this setting has finished yet."
        return
    yield "| " + " | ".join(COLUMNS) + " |"
    yield "|---" * len(COLUMNS) + "|"
    for row in rows:
        cells = [
            row["method"],
            str(row["seeds"]),
            _interval(row["pass@1"]),
            _interval(row["pass@10"]),
            _number(row["distinct"], 1),
            _percent(row["hacked_rate"]),
            _number(row["rollouts"]["total"]),
            _number(row["cpu_seconds"]["train"]),
            _number(row["cpu_seconds"]["total"]),
            _number(row["training_seconds"]),
        ]
        yield "| " + " | ".join(cells) + " |"


def _memory(rows: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    if not rows:
        yield "Not measured."
    for row in rows:
        yield (
            f"- {row['name']}: {row['value']:.3g} {row['unit']} against {row['yardstick_value']:.3g} "
            f"({row['yardstick']}), ratio {row['ratio']:.2f}"
        )


def _notes(report: Mapping[str, Any]) -> Iterator[str]:
    yield "## Notes"
    yield ""
    yield "- Rollouts: sampled online, for values and for pivotal tokens, even where an earlier run had paid for them."
    yield "- CPU: all processes of the platform while the job ran, its evaluations included. `with values`: plus what"
    yield "  the first run with the same tasks and settings spent until its training began."
    yield "- Hacked: share of samples on training problems that pass the public test and fail a hidden one, where the"
    yield "  public one is the reward."
    for run in report["failed"]:
        reason = (run["failure"] or {}).get("message", "")
        yield f"- {run['name']} {run['state']}: {reason}"
    for run in report["alarms"]:
        first = ", ".join(f"{alarm} at step {step}" for alarm, step in run["first"].items())
        yield f"- Collapse guard in {run['name']}: {first}"
    yield ""


def _interval(estimate: Mapping[str, Any] | Estimate | None) -> str:
    if estimate is None:
        return "-"
    facts = asdict(estimate) if isinstance(estimate, Estimate) else estimate
    return f"{facts['mean']:.2f} [{facts['low']:.2f}, {facts['high']:.2f}]"


def _number(value: float | None, digits: int = 0) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{100 * value:.1f} %"
