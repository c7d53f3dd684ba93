// Keeps a job's page live: its events come as server-sent events; curves and parts are fetched when they tell of news.
import { ask, colour, draw } from "./plots.js";

const page = document.getElementById("job");
const api = `/v1/jobs/${page.dataset.job}`;
const FINAL = ["succeeded", "failed", "cancelled"];
const light = document.getElementById("stream-state");

async function drawEvaluations() {
  const { items } = await ask(`${api}/evaluations`);
  if (!items.length) return;
  const lines = [];
  const bands = [];
  Object.keys(items[0].pass_at_k).forEach((k, index) => {
    const column = (name) => items.map((result) => result.pass_at_k[k]?.[name]);
    lines.push({ label: `pass@${k}`, values: column("value"), colour: colour(index), dots: true });
    lines.push({ label: `pass@${k} low`, values: column("low"), colour: colour(index), thin: true });
    lines.push({ label: `pass@${k} high`, values: column("high"), colour: colour(index), thin: true });
    bands.push({ series: [3 * index + 3, 3 * index + 2], of: colour(index) });
  });
  draw("curve-pass", items.map((result) => result.step), lines, { bands });
}

const TRAINING = {
  "curve-reward": (name) => name.startsWith("reward"),
  "curve-score": (name) => name === "score" || name.startsWith("score/"),
  "curve-loss": (name) => name === "loss" || name.startsWith("loss_") || name === "value_loss",
  "curve-margin": (name) => name === "preference_margin",
  "curve-accuracy": (name) => name === "preference_accuracy",
  "curve-kl": (name) => name.startsWith("kl"),
  "curve-residual": (name) => name.startsWith("residual"),
  "curve-share": (name) => name === "effective_sample_share" || name === "truncated/online",
  "curve-entropy": (name) => name === "entropy" || name === "token_nll/online" || name === "log_ratio_per_token",
  "curve-staleness": (name) => name === "staleness",
  "curve-seconds": (name) => name === "wait_seconds" || name === "step_seconds",
};
const PLATFORM = {
  "curve-queues": (name) => ["estimates", "pivotal", "prompts", "rollouts", "verifier_rollouts", "verdicts"].includes(name),
  "curve-idle": (name) => name.startsWith("idle_"),
};
const plain = (name) => name.replace("idle_", "").replace("reward/", "").replace("score/", "").replaceAll("_", " ");

async function drawColumns(query, curves, options) {
  const { steps, series } = await ask(`${api}/metrics?max_points=600${query}`);
  if (!steps.length) return;
  const axis = options.time ? steps.map((at) => at / 1000) : steps;
  Object.entries(curves).forEach(([place, wanted]) => {
    const lines = Object.keys(series).filter(wanted).map((name) => ({ label: plain(name), values: series[name] }));
    if (lines.length) draw(place, axis, lines, options);
  });
}

let wanted = true;
let busy = false;
async function refresh() {
  if (!wanted || busy || document.hidden) return;
  wanted = false;
  busy = true;
  document.body.dispatchEvent(new Event("news"));
  try {
    await Promise.all([
      drawEvaluations(),
      drawColumns("", TRAINING, {}),
      drawColumns("&kind=platform", PLATFORM, { time: true }),
    ]);
  } catch (failure) {
    wanted = true;
    light.textContent = `not up to date: ${failure.message}`;
  } finally {
    busy = false;
  }
}

function words({ kind, body }) {
  switch (kind) {
    case "state": return `${body.from || "new"} → ${body.to}: ${body.reason}`;
    case "alarm": return `alarm at step ${body.step}: ${body.reason}`;
    case "progress": return `${body.stage}: ${body.done} of ${body.total}`;
    case "weights": return `weights ${body.version} ${body.action.replace("_", " ")}, step ${body.step}`;
    case "trainer_died": return `trainer died, ${body.deaths} of at most ${body.most} times: ${body.message}`;
    case "stalled": return `nothing moved for ${body.seconds} s: ${body.waits.join("; ")}`;
    default: return `${kind.replaceAll("_", " ")} ${Object.entries(body).map(([name, value]) => `${name.replaceAll("_", " ")} ${typeof value === "object" ? JSON.stringify(value) : value}`).join(", ")}`;
  }
}

const LONG = 300;
function folded(text) {
  if (text.length <= LONG && !text.includes("\n")) return ` ${text}`;
  const details = document.createElement("details");
  details.className = "folded";
  const summary = document.createElement("summary");
  summary.textContent = `${text.split("\n", 1)[0].slice(0, LONG)} …`;
  const whole = document.createElement("pre");
  whole.textContent = text;
  details.append(summary, whole);
  return details;
}

function tell(event) {
  const line = document.createElement("li");
  // A kind that is also the name of a badge would look like one.
  line.className = event.kind === "state" ? "moved" : event.kind;
  const at = document.createElement("time");
  at.dateTime = event.at;
  at.textContent = event.at.slice(11, 19);
  line.append(at, folded(words(event)));
  const list = document.getElementById("events");
  const last = list.firstChild;
  // Of reports of progress in a row the last one says it all.
  if (event.kind === "progress" && last?.dataset.stage === String(event.body.stage)) {
    line.dataset.reports = Number(last.dataset.reports) + 1;
    line.append(` (${line.dataset.reports} reports)`);
    last.remove();
  } else if (event.kind === "progress") line.dataset.reports = 1;
  if (event.kind === "progress") line.dataset.stage = event.body.stage;
  list.prepend(line);
  while (list.children.length > 200) list.lastChild.remove();
}

const stream = new EventSource(`${api}/events`);
let seen = 0;
stream.onopen = () => { light.textContent = "live"; };
stream.onerror = () => { light.textContent = "reconnecting"; };
stream.onmessage = (message) => {
  const event = JSON.parse(message.data);
  if (event.seq <= seen) return;
  seen = event.seq;
  wanted = true;
  tell(event);
  if (event.kind !== "state") return;
  page.dataset.state = event.body.to;
  if (!FINAL.includes(event.body.to)) return;
  stream.close();
  light.textContent = "ended";
};

setInterval(refresh, 1000);
setInterval(() => { if (!FINAL.includes(page.dataset.state)) wanted = true; }, 3000);
refresh();
