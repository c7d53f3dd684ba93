// Curves by uPlot, in the colours of the page; drawn again when these change.

const plots = new Map();
const probe = document.createElement("span");
probe.hidden = true;
document.body.append(probe);

function resolved(variable) {
  probe.style.color = `var(${variable})`;
  return getComputedStyle(probe).color;
}

// Steps and tokens are whole.
const WHOLE = [1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10_000, 20_000, 50_000, 100_000];
export const colour = (index) => `--c${(index % 6) + 1}`;
const number = (value) => (value === null || value === undefined ? "–" : Math.abs(value) >= 1000 ? value.toFixed(0) : Number(value.toPrecision(3)).toString());

// lines: {label, values, colour?: a variable, thin?, dots?, dashed?, unsaid?}; bands: {series: [upper, lower], of: a variable}
export function draw(id, axis, lines, options = {}) {
  const figure = document.getElementById(id);
  if (!figure) return;
  const columns = [axis, ...lines.map((line) => line.values)];
  const shape = JSON.stringify(lines.map((line) => line.label));
  const known = plots.get(id);
  tell(figure, lines);
  if (known && known.shape === shape) {
    plots.set(id, { ...known, redraw: () => draw(id, axis, lines, options) });
    known.plot.setData(columns);
    return known.plot;
  }
  if (known) known.plot.destroy();
  figure.classList.add("drawn");
  const plot = new uPlot(settings(figure, lines, options), columns, figure);
  plot.root.setAttribute("aria-hidden", "true");
  // The edges of an interval need no line of their own in the legend.
  const rows = figure.querySelectorAll(".u-series");
  lines.forEach((line, index) => { rows[index + 1].hidden = Boolean(line.thin); });
  plots.set(id, { shape, plot, redraw: () => draw(id, axis, lines, options) });
  return plot;
}

// A curve that stays at one value is drawn in the middle of a range of its own size: uPlot's would go from 0 to 100 around 0.
function aroundValues(plot, least, most) {
  if (least === null || most === null) return [0, 1];
  if (least === most) return [least - (Math.abs(least) || 1) / 10, most + (Math.abs(most) || 1) / 10];
  return uPlot.rangeNum(least, most, 0.1, true);
}

function settings(figure, lines, options) {
  const ink = resolved("--faint");
  const grid = { stroke: resolved("--line"), width: 1 };
  const font = "12px system-ui, sans-serif";
  const series = lines.map((line, index) => ({
    label: line.label,
    stroke: resolved(line.colour || colour(index)),
    width: line.thin ? 0.5 : 2,
    dash: line.dashed ? [4, 4] : undefined,
    points: { show: Boolean(line.dots), size: 6 },
    spanGaps: true,
    value: (plot, value) => number(value),
  }));
  const bands = (options.bands || []).map((band) => ({ series: band.series, fill: resolved(band.of).replace("rgb(", "rgba(").replace(")", ", 0.18)") }));
  const clock = (plot, splits) => splits.map((at) => new Date(at * 1000).toISOString().slice(11, 19));
  const axes = [{ stroke: ink, grid, ticks: grid, font, space: options.time ? 70 : 50, ...(options.time ? { values: clock } : options.range ? {} : { incrs: WHOLE }) }, { stroke: ink, grid, ticks: grid, font, size: 58 }];
  const scales = { x: { time: Boolean(options.time), range: options.range }, y: { range: options.range || aroundValues } };
  const first = { label: options.time ? "time" : options.axis || "step" };
  const size = { width: Math.max(240, figure.clientWidth - 24), height: options.height || 190 };
  return { ...size, series: [first, ...series], axes, scales, bands, hooks: options.hooks || {}, legend: { live: true } };
}

// The newest value of each line in words: canvases say nothing to who cannot see them.
function tell(figure, lines) {
  const said = lines.filter((line) => !line.thin && !line.unsaid).map((line) => {
    const known = line.values.filter((value) => value !== null && value !== undefined);
    return lines.length === 1 ? number(known.at(-1)) : `${line.label} ${number(known.at(-1))}`;
  });
  const place = figure.querySelector("figcaption output");
  if (place) place.textContent = said.join(" · ");
}

export async function ask(path) {
  const answer = await fetch(path, { headers: { Accept: "application/json" } });
  if (answer.ok) return answer.json();
  const said = await answer.json().catch(() => ({}));
  throw new Error(said.detail || `HTTP ${answer.status}`);
}

function redrawAll() {
  for (const [id, { plot, redraw }] of [...plots]) {
    plot.destroy();
    plots.delete(id);
    redraw();
  }
}

matchMedia("(prefers-color-scheme: dark)").addEventListener("change", redrawAll);
let resizing = 0;
addEventListener("resize", () => { clearTimeout(resizing); resizing = setTimeout(redrawAll, 200); });
