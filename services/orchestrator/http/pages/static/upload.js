// Uploads a dataset in parts, each with its digest, as `spo dataset upload` does.
import { say } from "./page.js";

const PART_BYTES = 4 << 20;
const form = document.getElementById("upload");
const bar = document.getElementById("uploaded");

async function checked(answer) {
  if (answer.ok) return answer.json();
  const said = await answer.json().catch(() => ({}));
  throw new Error([said.detail || `HTTP ${answer.status}`, ...(said.errors || []).map((fault) => fault.message)].join(" · "));
}

async function digestOf(bytes) {
  const digest = new Uint8Array(await crypto.subtle.digest("SHA-256", bytes));
  return `sha-256=:${btoa(String.fromCharCode(...digest))}:`;
}

async function send(file, name, taskFormat) {
  const about = { name: name || file.name, task_format: taskFormat, file_format: file.name.endsWith(".parquet") ? "parquet" : "jsonl", size_bytes: file.size };
  const made = await checked(await fetch("/v1/datasets", { method: "POST", headers: { "Content-Type": "application/json" }, body: JSON.stringify(about) }));
  for (let at = 0; at < file.size; at += PART_BYTES) {
    const part = await file.slice(at, at + PART_BYTES).arrayBuffer();
    const headers = { "Content-Type": "application/offset+octet-stream", "Upload-Offset": String(at), "Content-Digest": await digestOf(part) };
    await checked(await fetch(`/v1/datasets/${made.id}`, { method: "PATCH", headers, body: part }));
    bar.value = Math.min(1, (at + PART_BYTES) / file.size);
  }
  return made;
}

form?.addEventListener("submit", async (event) => {
  event.preventDefault();
  const given = new FormData(form);
  if (!crypto.subtle) {
    say("Browsers make digests only over https or on this machine itself: use `spo dataset upload`.", true);
    return;
  }
  bar.hidden = false;
  try {
    const made = await send(given.get("file"), given.get("name"), given.get("task_format"));
    location.assign(`/datasets/${made.id}`);
  } catch (failure) {
    say(failure.message, true);
  }
});
