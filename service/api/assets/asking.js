// Requests to the server, with the session's cookie.

const connection = document.getElementById("connection");
let session = null;

function connected(fine) {
  connection.hidden = fine;
  connection.textContent = fine ? "" : "The server does not answer. This page shows the last known state; reconnecting.";
}

class Refused extends Error {
  constructor(detail, status) {
    super(detail.message);
    this.status = status;
    this.field = detail.field;
  }
}

class Unreachable extends Error {}

async function ask(path, body, headers = {}, method = body === undefined ? "GET" : "POST") {
  const options = { credentials: "same-origin", headers: { ...headers }, method };
  if (body !== undefined) {
    options.headers["content-type"] = "application/json";
    options.body = JSON.stringify(body);
  }
  let answer;
  try {
    answer = await fetch(path, options);
  } catch (error) {
    connected(false);
    throw new Unreachable(String(error));
  }
  connected(answer.status !== 503);
  if (answer.status === 401) location.href = "login";
  const found = await answer.json().catch(() => null);
  if (!answer.ok) throw new Refused(found && found.error ? found.error : { message: `The server answered ${answer.status}.` }, answer.status);
  return found;
}

// Calls `draw` now, at every event, and every few seconds, until the returned function is called; never
// twice at once, and not more often than a few times a second.
const listeners = new Set();
function live(draw, everyMs = 5000) {
  let ended = false, busy = false, again = false, timer = 0;
  const round = async () => {
    if (ended) return;
    if (busy) { again = true; return; }
    busy = true;
    clearTimeout(timer);
    try {
      await draw();
    } catch (error) {
      if (!(error instanceof Unreachable) && !(error instanceof Refused)) throw error;
      if (!ended && error instanceof Refused && error.status !== 503 && error.status !== 429) { ended = true; complain(error); }
    } finally {
      busy = false;
      if (!ended) timer = setTimeout(round, again ? 300 : everyMs);
      again = false;
    }
  };
  listeners.add(round);
  round();
  return () => { ended = true; clearTimeout(timer); listeners.delete(round); };
}

function complain(error) {
  clear(document.getElementById("page")).append(el("div", { class: "problems", role: "alert" }, el("h2", {}, "This page cannot be shown"), el("p", {}, error.message), el("p", {}, el("a", { href: "#/" }, "The queue"))));
}

// One stream for the whole page. A browser that loses it reconnects with the id of the last event it received.
const happenings = [];
const MOST_HAPPENINGS = 200;
const KINDS = ["search", "pausing", "restarting", "stopped", "plan", "started", "finished", "remeasuring", "waiting", "said", "ended", "changed", "deleted"];
function listen() {
  const source = new EventSource("v1/events");
  source.addEventListener("open", () => { connected(true); listeners.forEach((each) => each()); });
  source.addEventListener("error", () => connected(false));
  const received = (event) => {
    happenings.unshift(JSON.parse(event.data));
    happenings.length = Math.min(happenings.length, MOST_HAPPENINGS);
    listeners.forEach((each) => each());
  };
  KINDS.forEach((kind) => source.addEventListener(kind, received));
}

function when(unix) {
  return given(unix) ? new Date(unix * 1000).toLocaleString() : MISSING;
}

function state(name) {
  return el("span", { class: `state state-${name}` }, name);
}

// On narrow screens each cell shows its column's name instead of a table header.
function table(names, rows, label) {
  for (const row of rows) [...row.children].forEach((cell, at) => { cell.dataset.label = names[at]; });
  return el("table", { class: "service-table", "aria-label": label }, el("thead", {}, el("tr", {}, names.map((each, at) => el("th", { scope: "col", class: rows.length && rows[0].children[at].classList.contains("number") ? "number" : null }, each)))), el("tbody", {}, rows));
}

function bestOf(best) {
  return best ? `${number(best.throughput, 5)} ${best.unit || ""}` : MISSING;
}

// Actions of the owner of a search, or an admin, by the search's state.
const isOpen = (search) => ["queued", "running"].includes(search.state);
const ACTIONS = {
  cancel: { label: "Cancel", fits: isOpen },
  retry: { label: "Retry", fits: (search) => ["failed", "cancelled"].includes(search.state) },
  delete: { label: "Delete", fits: (search) => !isOpen(search), method: "DELETE", asks: "Delete it for good?" },
};

function mayChange(search) {
  return session.role === "admin" || (session.role !== "reader" && session.name === search.user);
}

// A button, or null if the action is not available. Actions with `asks` need a second click within five seconds.
function actionButton(name, search, alert, done = () => listeners.forEach((each) => each())) {
  const { label, fits, method, asks } = ACTIONS[name];
  if (!fits(search) || !mayChange(search)) return null;
  const button = el("button", { type: "button", [`data-${name}`]: search.id }, label);
  let asked = 0;
  button.addEventListener("click", async () => {
    if (asks && Date.now() - asked > 5000) {
      asked = Date.now();
      button.textContent = asks;
      setTimeout(() => { button.textContent = label; }, 5000);
      return;
    }
    button.disabled = true;
    alert.textContent = "";
    try {
      await (method ? ask(`v1/searches/${search.id}`, undefined, {}, method) : ask(`v1/searches/${search.id}/${name}`, {}));
      done();
    } catch (error) {
      if (!(error instanceof Refused) && !(error instanceof Unreachable)) throw error;
      alert.textContent = error instanceof Refused ? error.message : "The server does not answer; try again.";
      button.disabled = false;
    }
  });
  return button;
}
