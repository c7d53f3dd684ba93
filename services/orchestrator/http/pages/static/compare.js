// Curves of several runs over each other: one figure per quantity, one line per run, on the union of their steps.
import { ask, colour, draw } from "./plots.js";

const rows = [...document.querySelectorAll("#compare tr[data-job]")];
const runs = rows.map((row, index) => ({ id: row.dataset.job, label: `${row.dataset.name.slice(0, 40)} ${row.dataset.job.slice(-6)}`, colour: colour(index) }));
const figures = (kind) => [...document.querySelectorAll(`figure[data-${kind}]`)];

// points: per run a map from step to value.
function overlay(figure, points, dots) {
  const steps = [...new Set(points.flatMap((known) => [...known.keys()]))].sort((one, other) => one - other);
  if (!steps.length) return;
  const lines = runs.map((run, index) => ({ label: run.label, colour: run.colour, dots, values: steps.map((step) => points[index].get(step) ?? null) }));
  draw(figure.id, steps, lines);
}

async function drawAll() {
  const evaluations = await Promise.all(runs.map((run) => ask(`/v1/jobs/${run.id}/evaluations`)));
  figures("k").forEach((figure) => {
    overlay(figure, evaluations.map(({ items }) => new Map(items.map((result) => [result.step, result.pass_at_k[figure.dataset.k]?.value]))), true);
  });
  const metrics = await Promise.all(runs.map((run) => ask(`/v1/jobs/${run.id}/metrics?max_points=400`)));
  figures("column").forEach((figure) => {
    const column = figure.dataset.column;
    overlay(figure, metrics.map(({ steps, series }) => new Map(steps.map((step, index) => [step, series[column]?.[index]]))), false);
  });
}

const ended = () => rows.every((row) => row.querySelector(".succeeded, .failed, .cancelled"));
if (runs.length) drawAll();
if (runs.length && !ended()) setInterval(() => { if (!document.hidden) drawAll(); }, 10_000);
