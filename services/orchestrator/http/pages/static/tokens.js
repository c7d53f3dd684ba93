// Tokens of a response: what Q_t and the advantage are where one points, walks by arrow keys, or follows the curve.
import { draw } from "./plots.js";

function readOut(token) {
  const before = document.querySelector(".token.current");
  if (before) before.classList.remove("current");
  token.classList.add("current");
  const { q, advantage, pivotal } = token.dataset;
  const index = [...token.parentElement.children].indexOf(token);
  const turn = pivotal ? ` · pivotal: pi0's success ${pivotal}` : "";
  document.getElementById("token-readout").textContent =
    `token ${index} ${JSON.stringify(token.textContent)} · Q_t ${q} · advantage ${advantage}${turn}`;
}

function prepare(box) {
  const tokens = [...box.children];
  if (!tokens.length) return;
  let current = -1;
  const go = (index) => {
    current = Math.max(0, Math.min(tokens.length - 1, index));
    readOut(tokens[current]);
  };
  box.addEventListener("mouseover", (event) => {
    if (event.target.classList.contains("token")) go(tokens.indexOf(event.target));
  });
  box.addEventListener("focus", () => go(Math.max(0, current)));
  box.addEventListener("keydown", (event) => {
    const moves = { ArrowRight: current + 1, ArrowLeft: current - 1, Home: 0, End: tokens.length - 1 };
    if (!(event.key in moves)) return;
    event.preventDefault();
    go(moves[event.key]);
  });
  const q = tokens.map((token) => Number(token.dataset.q));
  const qhat = tokens.map(() => Number(box.dataset.qhat));
  const lines = [{ label: "Q_t", values: q }, { label: "Q̂₀", values: qhat, dashed: true }];
  const follow = (plot) => { if (plot.cursor.idx !== null && plot.cursor.idx !== undefined && plot.cursor.event) go(plot.cursor.idx); };
  draw("curve-q", tokens.map((_, index) => index), lines, { axis: "token", hooks: { setCursor: [follow] } });
}

document.body.addEventListener("htmx:afterSwap", (event) => {
  if (event.detail.target.id !== "tokens") return;
  event.detail.target.classList.remove("loading");
  const box = event.detail.target.querySelector(".tokens");
  if (box) prepare(box);
});
