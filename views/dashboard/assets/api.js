// Requests to the server, and a notice when it does not answer.

const EVERY = 1000;

const connection = document.getElementById("connection");

function connected(error) {
  connection.hidden = !error;
  connection.textContent = error ? "The dashboard's server does not answer; the page shows its last answer. Trying again." : "";
}

class Refused extends Error {
  constructor(message, status) {
    super(message);
    this.status = status;
  }
}

class Unreachable extends Error {}

// The answer as JSON, or null without changes.
async function ask(path, parameters = {}) {
  const query = new URLSearchParams(parameters).toString();
  let answer;
  try {
    answer = await fetch(`${path}${query ? `?${query}` : ""}`, { credentials: "same-origin" });
  } catch (error) {
    connected(error);
    throw new Unreachable(String(error));
  }
  connected(null);
  if (answer.status === 204) return null;
  if (!answer.ok) throw new Refused((await answer.text()).slice(0, 500), answer.status);
  return answer.json();
}

// Calls `work` at once and then every second, never concurrently, until the returned function is called. After a
// refusal by the server it calls `refused` and stops.
function poll(work, refused = complain) {
  let timer = 0;
  let ended = false;
  const round = async () => {
    try {
      await work();
    } catch (error) {
      if (!(error instanceof Unreachable) && !(error instanceof Refused)) throw error;
      if (error instanceof Refused) { ended = true; refused(error); }
    } finally {
      if (!ended) timer = setTimeout(round, EVERY);
    }
  };
  round();
  return () => { ended = true; clearTimeout(timer); };
}

function complain(error, title = "This cannot be shown") {
  hideTip();
  document.querySelectorAll("dialog[open]").forEach((each) => each.close());
  clear(document.getElementById("page")).append(el("div", { class: "problems", role: "alert" }, el("h2", {}, title), el("p", {}, error.message), el("p", {}, el("a", { href: "#/" }, "All runs"))));
}

// An error handler for runs that were on the page: it reports them as removed, not as unknown.
function gone(known) {
  return (error) => {
    if (error.status !== 404 || !known.length) { complain(error); return; }
    const named = known.map((each) => `'${each}'`);
    complain(new Error(known.length > 1 ? `One of ${words(named)} was deleted, moved or renamed while this page was open, so they are no longer shown together.`
      : `${named[0]} was deleted, moved or renamed while this page was open.`), known.length > 1 ? "A run no longer exists" : "This run no longer exists");
  };
}

function runLink(id) {
  return `#/run/${encodeURIComponent(id)}`;
}
