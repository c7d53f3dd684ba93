// The form of a job spec: line numbers, the way from a fault to its line, one submission per text.
const spec = document.getElementById("spec");
const lines = document.getElementById("lines");
const key = document.querySelector("[name=idempotency_key]");

function typed() {
  const count = spec.value.split("\n").length;
  lines.textContent = Array.from({ length: count }, (_, index) => index + 1).join("\n");
  // A second click on the same text finds the job that the first one made.
  key.value = Array.from(crypto.getRandomValues(new Uint8Array(16)), (byte) => byte.toString(16).padStart(2, "0")).join("");
}

spec.addEventListener("input", typed);
spec.addEventListener("scroll", () => { lines.scrollTop = spec.scrollTop; });
typed();

document.getElementById("verdict").addEventListener("click", (event) => {
  const line = Number(event.target.dataset.line);
  if (!line) return;
  const before = spec.value.split("\n").slice(0, line - 1).join("\n").length;
  const start = line > 1 ? before + 1 : 0;
  spec.focus();
  spec.setSelectionRange(start, start + spec.value.slice(start).split("\n")[0].length);
  spec.scrollTop = (line - 5) * parseFloat(getComputedStyle(spec).lineHeight);
});
