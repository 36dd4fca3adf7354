// Asking the server, and saying so when it is gone.

const EVERY = 1000;

const connection = document.getElementById("connection");

function connected(error) {
  connection.hidden = !error;
  connection.textContent = error ? "The dashboard's server does not answer; what is shown is what was known. Trying again." : "";
}

class Refused extends Error {}

class Unreachable extends Error {}

// The answer as JSON, or null where nothing is new.
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
  if (!answer.ok) throw new Refused((await answer.text()).slice(0, 500));
  return answer.json();
}

// Calls `work` now and then every second until the returned function is called; never twice at once.
function poll(work) {
  let timer = 0;
  let ended = false;
  const round = async () => {
    try {
      await work();
    } catch (error) {
      if (!(error instanceof Unreachable) && !(error instanceof Refused)) throw error;
      if (error instanceof Refused) { ended = true; complain(error.message); }
    } finally {
      if (!ended) timer = setTimeout(round, EVERY);
    }
  };
  round();
  return () => { ended = true; clearTimeout(timer); };
}

function complain(message) {
  clear(document.getElementById("page")).append(el("p", {}, el("a", { href: "#/" }, "All runs")), el("div", { class: "problems" }, el("h2", {}, "This cannot be shown"), el("p", {}, message)));
}

function runLink(id) {
  return `#/run/${encodeURIComponent(id)}`;
}
