// Keeps a job's page live: its events come as server-sent events; curves and tables are fetched when they tell of news.
"use strict";
(() => {
  const page = document.getElementById("job");
  const id = page.dataset.job;
  const api = `/v1/jobs/${id}`;
  const final = ["succeeded", "failed", "cancelled"];
  const palette = ["#2f7ed8", "#e8871e", "#2ca25f", "#c0504d", "#8064a2", "#17a2b8"];
  const plots = new Map();

  const probe = document.createElement("span");
  const resolved = (variable) => {
    probe.style.color = `var(${variable})`;
    document.body.append(probe);
    const found = getComputedStyle(probe).color;
    probe.remove();
    return found;
  };

  function draw(place, axis, lines, bands) {
    const figure = document.getElementById(place);
    const columns = [axis, ...lines.map((line) => line.values)];
    const shape = JSON.stringify(lines.map((line) => line.label));
    const known = plots.get(place);
    if (known && known.shape === shape) {
      known.plot.setData(columns);
      return;
    }
    if (known) known.plot.destroy();
    const ink = resolved("--ink");
    const grid = { stroke: resolved("--line"), width: 1 };
    const series = lines.map((line, index) => ({
      label: line.label,
      stroke: line.colour || palette[index % palette.length],
      width: line.thin ? 0.5 : 2,
      points: { show: Boolean(line.dots), size: 5 },
      spanGaps: true,
    }));
    const axes = [{ stroke: ink, grid, ticks: grid }, { stroke: ink, grid, ticks: grid, size: 56 }];
    const scales = { x: { time: place === "curve-queues" } };
    const width = Math.max(260, figure.clientWidth - 16);
    const options = { width, height: 190, series: [{ label: scales.x.time ? "time" : "step" }, ...series], axes, scales, bands };
    plots.set(place, { shape, plot: new uPlot(options, columns, figure) });
    // The edges of an interval need no line of their own in the legend.
    const rows = figure.querySelectorAll(".u-series");
    lines.forEach((line, index) => { rows[index + 1].hidden = Boolean(line.thin); });
  }

  async function ask(path) {
    const answer = await fetch(path, { headers: { Accept: "application/json" } });
    if (!answer.ok) throw new Error(`${path}: ${answer.status}`);
    return answer.json();
  }

  async function drawEvaluations() {
    const { items } = await ask(`${api}/evaluations`);
    if (!items.length) return;
    const lines = [];
    const bands = [];
    Object.keys(items[0].pass_at_k).forEach((k, index) => {
      const stroke = palette[index % palette.length];
      const column = (name) => items.map((each) => each.pass_at_k[k][name]);
      lines.push({ label: `pass@${k}`, values: column("value"), colour: stroke, dots: true });
      lines.push({ label: `pass@${k} low`, values: column("low"), colour: stroke, thin: true });
      lines.push({ label: `pass@${k} high`, values: column("high"), colour: stroke, thin: true });
      bands.push({ series: [3 * index + 3, 3 * index + 2], fill: stroke + "26" });
    });
    draw("curve-pass", items.map((each) => each.step), lines, bands);
  }

  async function drawTraining() {
    const { steps, series } = await ask(`${api}/metrics?max_points=600`);
    if (!steps.length) return;
    const named = (wanted) => wanted.filter((name) => series[name])
      .map((name) => ({ label: name.replaceAll("_", " "), values: series[name] }));
    const reward = Object.keys(series).filter((name) => name.startsWith("reward"));
    const loss = Object.keys(series).filter((name) => name === "loss" || name.startsWith("loss_"));
    const kl = Object.keys(series).filter((name) => name.includes("kl"));
    const curves = [["curve-reward", reward], ["curve-loss", loss], ["curve-kl", kl], ["curve-entropy", ["entropy"]]];
    curves.forEach(([place, names]) => {
      const lines = named(names);
      if (lines.length) draw(place, steps, lines);
    });
  }

  async function drawQueues() {
    const { steps, series } = await ask(`${api}/metrics?kind=platform&max_points=600`);
    if (!steps.length) return;
    const streams = ["estimates", "prompts", "rollouts", "verdicts"].filter((name) => series[name]);
    const lines = streams.map((name) => ({ label: name, values: series[name] }));
    draw("curve-queues", steps.map((at) => at / 1000), lines);
  }

  async function refreshTables() {
    const answer = await fetch(`/jobs/${id}/live`);
    if (!answer.ok) throw new Error(`the page: ${answer.status}`);
    // Rendered and escaped by the server.
    const fresh = document.createElement("template");
    fresh.innerHTML = await answer.text();
    fresh.content.querySelectorAll("[data-part]").forEach((part) => {
      document.getElementById(part.dataset.part).replaceChildren(...part.childNodes);
    });
  }

  let wanted = true;
  let busy = false;
  async function refresh() {
    if (!wanted || busy || document.hidden) return;
    wanted = false;
    busy = true;
    try {
      await Promise.all([drawEvaluations(), drawTraining(), drawQueues(), refreshTables()]);
    } catch (failure) {
      wanted = true;
      document.getElementById("stream-state").textContent = `not up to date: ${failure.message}`;
    } finally {
      busy = false;
    }
  }

  function tell(event) {
    const line = document.createElement("li");
    const at = document.createElement("time");
    at.dateTime = event.at;
    at.textContent = event.at.slice(11, 19);
    const words = event.kind === "state"
      ? `${event.body.from || "new"} → ${event.body.to}: ${event.body.reason}`
      : event.kind === "alarm"
        ? `alarm at step ${event.body.step}: ${event.body.reason}`
        : `${event.kind} ${JSON.stringify(event.body)}`;
    line.append(at, ` ${words}`);
    const list = document.getElementById("events");
    list.prepend(line);
    while (list.children.length > 200) list.lastChild.remove();
  }

  const stream = new EventSource(`${api}/events`);
  const light = document.getElementById("stream-state");
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
    if (final.includes(event.body.to)) {
      stream.close();
      light.textContent = "ended";
    }
    showVerbs(event.body.to);
  };

  function showVerbs(state) {
    const legal = {
      queued: ["cancel"], validating: ["cancel"], estimating: ["cancel"], running: ["cancel", "pause"],
      pausing: ["cancel", "resume"], paused: ["cancel", "resume"],
    }[state] || [];
    const controls = document.querySelector(".controls");
    controls.querySelectorAll("button").forEach((button) => button.remove());
    legal.forEach((verb) => {
      const button = document.createElement("button");
      button.type = "button";
      button.dataset.verb = verb;
      button.textContent = verb;
      controls.prepend(button);
    });
  }

  document.querySelector(".controls").addEventListener("click", async (click) => {
    const verb = click.target.dataset.verb;
    if (!verb) return;
    const answer = await fetch(`${api}/${verb}`, { method: "POST" });
    const said = await answer.json();
    document.getElementById("answer").textContent = answer.ok ? `${verb}: ${said.state}` : said.detail;
  });

  setInterval(refresh, 1000);
  setInterval(() => { if (!final.includes(page.dataset.state)) wanted = true; }, 3000);
  refresh();
})();
