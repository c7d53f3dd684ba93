"""What the demo's course came to: report.json, report.md and the picture report.png."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from spo.demo.loop.course import CourseOutcome, Phase
from spo.demo.report import machine

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# A poisoned round may cost so much pass@1 where the gate lets it through.
MOST_LOST = 0.02


def report_of(outcome: CourseOutcome, used: Mapping[str, object]) -> dict[str, Any]:
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


def write_report(outcome: CourseOutcome, used: Mapping[str, object], folder: Path) -> dict[str, Any]:
    """Write all three into the folder and return the document."""
    document = report_of(outcome, used)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "report.json").write_text(json.dumps(document, indent=2) + "\n")
    (folder / "report.md").write_text(markdown(document))
    draw(outcome, folder / "report.png")
    return document


def markdown(report: Mapping[str, Any]) -> str:
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


def _facts(phase: Phase) -> dict[str, Any]:
    return {
        "name": phase.name,
        "answers": phase.traffic.answers,
        "right": phase.traffic.right,
        "wrong_feedback": phase.traffic.wrong_feedback,
        "by_crowd": {name: asdict(count) for name, count in phase.traffic.by_crowd.items()},
        "round": phase.round.model_dump(mode="json"),
        "seconds": round(phase.seconds, 1),
    }
