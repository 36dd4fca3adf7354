// The queue, the searches that ended, and the devices.

function searchRow(each, alert) {
  return el("tr", { "data-search": each.id },
    el("td", {}, el("a", { href: `#/search/${each.id}` }, each.name || each.id), el("span", { class: "under" }, ` ${each.id}`)),
    el("td", {}, each.user),
    el("td", {}, state(each.state), each.reason ? el("div", { class: "under" }, each.reason) : null),
    el("td", { class: "number" }, number(each.priority)),
    el("td", { class: "number" }, `${number(each.devices)}${each.device ? ` × ${each.device}` : ""}`),
    el("td", { class: "number" }, number(each.trials)),
    el("td", { class: "number" }, bestOf(each.best)),
    el("td", { class: "whole" }, when(each.created)),
    el("td", {}, actionButton("cancel", each, alert)));
}

const SEARCH_COLUMNS = ["search", "user", "state", "priority", "devices", "trials", "best", "submitted", ""];

function queuePage(page) {
  const alert = el("p", { class: "wrong", role: "alert" });
  const counts = el("p", { class: "lead", role: "status" });
  const open = el("div"), ended = el("div");
  page.append(el("h1", {}, "Queue"), counts, alert, open, el("h2", {}, "Ended"), ended);
  return live(async () => {
    const [queue, all] = await Promise.all([ask("v1/queue"), ask("v1/searches?limit=50")]);
    const busy = queue.devices.map((device) => `${device.busy} of ${device.total} × ${device.name} busy`);
    counts.textContent = `${plural(queue.searches.length, "search", "searches")}; ${busy.join(", ") || "the Ray cluster is not reached"}`;
    clear(open).append(queue.searches.length ? table(SEARCH_COLUMNS, queue.searches.map((each) => searchRow(each, alert)), "Queue") : el("p", {}, "No searches are running or queued. ", session.role === "reader" ? null : el("a", { href: "#/submit" }, "Submit a search")));
    const over = all.searches.filter((each) => !["queued", "running"].includes(each.state));
    clear(ended).append(over.length ? table(SEARCH_COLUMNS, over.map((each) => searchRow(each, alert)), "Ended") : el("p", { class: "under" }, "None yet."));
  });
}

function devicesPage(page) {
  const kinds = el("div"), users = el("div");
  page.append(el("h1", {}, "Devices"), kinds, el("h2", {}, "Use in the last seven days"), users);
  return live(async () => {
    const { devices, usage } = await ask("v1/queue");
    clear(kinds).append(devices.length ? table(["device", "busy", "memory"], devices.map((device) => el("tr", {},
      el("td", {}, device.name), el("td", { class: "number" }, `${device.busy} of ${device.total}`), el("td", { class: "number" }, memory(device.memory_mib)))), "Devices")
      : el("p", {}, "The Ray cluster is not reached; the queue says why."));
    const hours = Object.entries(usage).sort((one, other) => other[1] - one[1]);
    clear(users).append(hours.length ? table(["user", "device-hours"], hours.map(([user, used]) => el("tr", {}, el("td", {}, user), el("td", { class: "number" }, number(used, 3)))), "Use") : el("p", { class: "under" }, "None yet."));
  });
}

// Texts of events. Unknown kinds, of a later server, are shown as JSON.
const WORDS = {
  search: (data) => `is ${data.state}${data.kind ? ` on ${data.kind}` : ""}${data.reason ? `: ${data.reason}` : ""}`,
  pausing: (data) => `pauses: ${data.reason}`,
  restarting: (data) => `starts again: ${data.reason}`,
  stopped: (data) => data.reason,
  plan: (data) => `begins: ${data.name} on ${data.where}${given(data.valid) ? `, ${plural(data.valid, "configuration")}` : ""}`,
  started: (data) => `trial ${data.trial} started`,
  finished: (data) => `trial ${data.trial}: ${data.status}${given(data.throughput) ? `, ${number(data.throughput, 5)} ${data.unit}` : ""}${data.reason ? `, ${data.reason}` : ""}`,
  remeasuring: (data) => `measures the leaders again: ${data.done} of ${data.total}`,
  waiting: (data) => data.what,
  said: (data) => data.message,
  ended: (data) => `ended: ${data.why}`,
  changed: (data) => `is changed: ${Object.entries(data).map(([name, value]) => `${name} ${value}`).join(", ")}`,
  deleted: (data) => `search ${data.search} was deleted`,
};
function happened(event) {
  const words = WORDS[event.kind];
  return words ? words(event.data) : `${event.kind} ${JSON.stringify(event.data).slice(0, 300)}`;
}

function eventsPage(page) {
  const list = el("ol", { class: "events", "aria-live": "off" });
  page.append(el("h1", {}, "Events"), el("p", { class: "lead" }, "New events, the latest first."), list);
  return live(async () => {
    clear(list).append(...happenings.map((each) => el("li", {}, el("time", {}, when(each.time)), el("span", {}, each.search ? el("a", { href: `#/search/${each.search}` }, each.search) : null, ` ${happened(each)}`))));
    if (!happenings.length) list.append(el("li", {}, "No events yet."));
  });
}
