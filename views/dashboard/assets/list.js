// The list of runs, with their states, and the choice of runs to overlay.

const chosenRuns = new Set();

function sparkline(values) {
  const known = values.filter(given);
  const pen = drawing(120, 28, "spark", { role: "img", "aria-label": "best throughput so far" });
  if (!known.length) return pen.root;
  const [low, high] = [Math.min(...known), Math.max(...known)];
  const pairs = values.map((each, at) => [each, at]).filter(([each]) => given(each))
    .map(([each, at]) => [values.length > 1 ? 3 + (at / (values.length - 1)) * 110 : 60, high > low ? 24 - ((each - low) / (high - low)) * 20 : 14]);
  pen.path("best", steps(pairs, 113));
  pen.dot("spark-end", 113, pairs.at(-1)[1], 3);
  return pen.root;
}

function ago(unix) {
  const seconds = Math.max(0, Date.now() / 1000 - unix);
  if (seconds < 60) return "just now";
  for (const [size, name] of [[86400, "day"], [3600, "hour"], [60, "minute"]]) {
    if (seconds >= size) return `${plural(Math.floor(seconds / size), name)} ago`;
  }
  return "";
}

const LIST_ORDERS = {
  "last changed": (a, b) => (b.state === "running") - (a.state === "running") || b.changed - a.changed,
  begun: (a, b) => !a.began - !b.began || compareCells(b.began, a.began),
  name: (a, b) => compareCells(a.name, b.name) || compareCells(a.run, b.run),
  throughput: (a, b) => compareCells(b.best ?? -1, a.best ?? -1),
  "ratio to default": (a, b) => compareCells(b.gain ?? -1, a.gain ?? -1),
  trials: (a, b) => b.trials - a.trials,
};

// The gain over the default configuration, with its interval.
function ratioOf({ gain, gain_half_width: half, gain_shown: shown }) {
  if (!given(gain)) return "no ratio";
  const ratio = `${gain.toFixed(2)}×${given(half) ? ` ±${NBSP}${number(half, 2)}` : ""}`;
  return shown || !given(half) ? `${ratio} the default` : `no gain shown (${ratio})`;
}

function bestOf(each) {
  const under = (text) => el("span", { class: "under" }, text);
  if (given(each.best)) return [el("strong", {}, figureOf(rate(each.best, each.unit))), under(`${each.simulated ? "predicted, " : ""}${ratioOf(each)}`)];
  if (!each.trials) return [under("no trials yet")];
  const ended = STATUSES.filter((status) => each.counts[status]).map((status) => `${number(each.counts[status], 9)} ${status}`);
  return [el("strong", {}, MISSING), under(words(ended))];
}

function runLine(each, root, chose) {
  const box = el("input", { type: "checkbox", "aria-label": `Overlay ${each.run}`, "data-choose": each.run });
  box.checked = chosenRuns.has(each.run);
  box.addEventListener("change", () => { if (box.checked) chosenRuns.add(each.run); else chosenRuns.delete(each.run); chose(); });
  return el("li", { class: "run-line", "data-run": each.run },
    box,
    el("a", { class: "run-name", href: runLink(each.run) }, el("span", {}, el("strong", {}, each.name), ...tagsOf(each, each.lossy)), el("span", { class: "under" }, each.run === "." ? root : each.run), each.devices ? el("span", { class: "under" }, each.devices) : null),
    el("span", { class: "run-state" }, el("span", { class: `state state-${each.state}`, title: STATE_WORDS[each.state] }, STATES[each.state]),
      each.problems ? el("span", { class: "warned", title: "Some files could not be read; see its page." }, "⚠ unreadable files") : null),
    sparkline(each.spark),
    el("span", { class: "run-best" }, bestOf(each)),
    el("span", { class: "run-trials" }, plural(each.trials, "trial"), shareBar(statusParts(each.counts), "trials by status")),
    el("span", { class: "under run-when" }, el("span", { title: "last changed" }, ago(each.changed)), each.began ? el("span", { title: `begun ${each.began}` }, `begun ${each.began.slice(0, 16)}`) : null));
}

function listPage(page) {
  let known = "";
  let answer = null;
  const search = el("input", { type: "search", placeholder: "Filter runs by name, folder, state or devices", "aria-label": "Filter runs", spellcheck: "false" });
  const order = el("select", { "aria-label": "Order" }, Object.keys(LIST_ORDERS).map((each) => el("option", { value: each }, `by ${each}`)));
  const overlay = el("button", { type: "button", class: "primary", id: "overlay" }, "Overlay");
  const summary = el("p", { class: "under", role: "status" });
  const list = el("ul", { class: "runs" });
  overlay.addEventListener("click", () => { location.hash = `#/overlay/${[...chosenRuns].map(encodeURIComponent).join("/")}`; });
  const chose = () => {
    overlay.disabled = chosenRuns.size < 2;
    overlay.textContent = chosenRuns.size < 2 ? "Select two or more to overlay" : `Overlay ${chosenRuns.size} runs`;
  };
  const draw = () => {
    if (!answer) return;
    const wanted = search.value.toLowerCase().split(/\s+/).filter(Boolean);
    const shown = answer.runs.filter((each) => wanted.every((word) => `${each.name} ${each.run} ${STATES[each.state]} ${each.state} ${each.devices} ${each.simulated ? "simulated" : ""} ${each.lossy ? "lossy" : ""}`.toLowerCase().includes(word)));
    shown.sort(LIST_ORDERS[order.value]);
    for (const each of [...chosenRuns]) if (!answer.runs.some((run) => run.run === each)) chosenRuns.delete(each);
    const running = answer.runs.filter((each) => each.state === "running").length;
    summary.textContent = `${shown.length === answer.runs.length ? plural(shown.length, "run") : `${shown.length} of ${plural(answer.runs.length, "run")}`}${running ? `, ${running} running` : ""} in ${answer.root}`;
    clear(list).append(...shown.map((each) => runLine(each, answer.root, chose)));
    chose();
  };
  search.addEventListener("input", draw);
  order.addEventListener("change", draw);
  page.append(el("header", { class: "title" }, el("h1", {}, "Runs"), summary), el("div", { class: "row filters" }, search, order, overlay), list);
  chose();
  document.title = "redline dashboard";
  return poll(async () => {
    const found = await ask("api/runs");
    const text = JSON.stringify(found);
    if (text === known) return;
    known = text;
    answer = found;
    draw();
  });
}
