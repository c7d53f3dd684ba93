// What every page needs: JSON requests by htmx, what came of them in words, sliders that say their value.

htmx.defineExtension("json", {
  onEvent(name, event) {
    if (name === "htmx:configRequest") event.detail.headers["Content-Type"] = "application/json";
    return true;
  },
  encodeParameters(request, parameters, element) {
    const names = (kind) => (element.dataset[kind] || "").split(" ");
    const [numbers, lists] = [names("numbers"), names("lists")];
    const [before, after] = (element.dataset.renamed || ":").split(":");
    const body = {};
    parameters.forEach((value, given) => {
      const name = given === before ? after : given;
      if (lists.includes(given)) { body[name] = [...(body[name] || []), value]; return; }
      if (!numbers.includes(name)) body[name] = value;
      else if (value !== "") body[name] = Number(value);
    });
    return JSON.stringify(body);
  },
});

// On a telephone the navigation is one row that scrolls.
const here = document.querySelector(".top nav [aria-current]");
here?.parentElement.scrollTo(here.offsetLeft - here.parentElement.offsetLeft, 0);

const toast = document.getElementById("toast");
let fading = 0;

export function say(words, bad = false) {
  toast.textContent = words;
  toast.className = bad ? "shown bad" : "shown";
  clearTimeout(fading);
  fading = setTimeout(() => { toast.className = ""; }, bad ? 12_000 : 5_000);
}

function answerOf(request) {
  try {
    return JSON.parse(request.responseText) || {};
  } catch {
    return {};
  }
}

function complaint(request) {
  if (!request.status) return "The orchestrator does not answer. Is it running?";
  const said = answerOf(request);
  const faults = (said.errors || []).map((fault) => `${fault.pointer}: ${fault.message}`);
  return [said.detail || `HTTP ${request.status}`, ...faults].join(" · ");
}

document.body.addEventListener("htmx:afterRequest", (event) => {
  const { elt, xhr, successful, requestConfig, target } = event.detail;
  const asked = requestConfig.verb !== "get";
  if (!successful && !asked && !("quiet" in elt.dataset)) {
    const note = document.createElement("p");
    note.className = "note bad";
    note.textContent = complaint(xhr);
    target.replaceChildren(note);
  } else if (!successful) {
    say(asked ? complaint(xhr) : `Not up to date. ${complaint(xhr)}`, true);
  } else if (asked && requestConfig.path.startsWith("/v1/")) {
    done(elt, answerOf(xhr), requestConfig);
  }
});

function done(element, said, asked) {
  const { next, nextJob, then, showsToken } = element.dataset;
  if (next) location.assign(next);
  if (nextJob !== undefined && said.id) location.assign(`/jobs/${said.id}`);
  if (showsToken !== undefined) showToken(said);
  if (then) document.body.dispatchEvent(new Event(then));
  document.body.dispatchEvent(new Event("news"));
  if (said.refused) {
    const reasons = said.refused.map((each) => `${each.id}: ${each.message}`);
    say([`${said.deleted.length} deleted`, ...reasons].join(" · "), reasons.length > 0);
    return;
  }
  const verb = asked.path.split("/").pop().replaceAll("_", " ");
  say(said.state ? `${verb}: ${said.state}` : said.version !== undefined ? `${verb}: version ${said.version}` : "Done.");
}

function showToken(said) {
  const place = document.getElementById("token");
  const token = document.createElement("code");
  token.textContent = said.token;
  place.replaceChildren(`The key of ${said.name}, shown this once: `, token);
  place.hidden = false;
}

// Parts that did not change stay, and with them the focus and the selection.
let focused = "";
document.body.addEventListener("htmx:oobBeforeSwap", (event) => {
  const { target, fragment } = event.detail;
  const fresh = fragment.firstElementChild;
  const selected = getSelection();
  const reading = !selected.isCollapsed && target.contains(selected.anchorNode);
  if (reading || (fresh && fresh.innerHTML === target.innerHTML)) event.detail.shouldSwap = false;
  else if (target.contains(document.activeElement)) focused = document.activeElement.id;
});
document.body.addEventListener("htmx:oobAfterSwap", () => {
  if (focused) document.getElementById(focused)?.focus();
  focused = "";
});

// An answer of the API is data, with names and texts that anybody wrote: it is read above and never made into a page.
// The target itself listens: by the time of the answer it may be out of the document, where nothing reaches the body.
function refuseData(event) {
  if (!(event.detail.xhr.getResponseHeader("Content-Type") || "").startsWith("text/html")) event.detail.shouldSwap = false;
}
document.body.addEventListener("htmx:beforeRequest", (event) => {
  event.detail.target.addEventListener("htmx:beforeSwap", refuseData);
  event.detail.elt.addEventListener("htmx:afterRequest", hearFromOutside);
});
// Who pressed a button hears what came of it, also where news has replaced the button meanwhile.
function hearFromOutside(event) {
  if (!event.target.isConnected) document.body.dispatchEvent(new CustomEvent("htmx:afterRequest", { detail: event.detail }));
}

// Rows that are fetched again keep which of them were chosen.
let chosen = [];
document.body.addEventListener("htmx:beforeSwap", (event) => {
  if (!("keepsChoice" in event.detail.target.dataset)) return;
  chosen = [...event.detail.target.querySelectorAll("input:checked")].map((box) => box.id);
});
document.body.addEventListener("htmx:afterSwap", (event) => {
  if (!("keepsChoice" in event.detail.target.dataset)) return;
  chosen.forEach((id) => { const box = document.getElementById(id); if (box) box.checked = true; });
});

document.body.addEventListener("input", (event) => {
  if (event.target.type === "range") event.target.form.querySelector("output").value = event.target.value;
});
