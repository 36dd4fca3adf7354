// The table of trials, with sorting and filters. For speed only the visible rows are in the page.

const ROW = 30;
const PRINTED = 200;

const TABLE_COLUMNS = [
  ["trial", "Trial", (row) => String(row.trial), "number"],
  ["status", "Status", (row) => badge(row.status), "text"],
  ["throughput", "", (row) => number(row.throughput, 5), "number"],
  ["step_ms", "Step, ms", (row) => number(row.step_ms, 4), "number"],
  ["peak_memory_mib", "Peak, MiB", (row) => number(row.peak_memory_mib, 5), "number"],
  ["first", "First", (row) => number(row.first, 5), "number"],
  ["mfu", "MFU", (row) => (given(row.mfu) ? utilisation(row, row.knobs).replace(/ peak$/, "") : MISSING), "number"],
  ["seconds_total", "Time, s", (row) => number(row.seconds_total, 3), "number"],
  ["sampler", "Chosen by", (row) => row.sampler || MISSING, "text"],
];

function compareCells(a, b) {
  if (a === b) return 0;
  if (a === null || a === undefined || a === "") return 1;
  if (b === null || b === undefined || b === "") return -1;
  return typeof a === typeof b ? (a < b ? -1 : 1) : String(a) < String(b) ? -1 : 1;
}

// `open(row)` is called for a row that is clicked. `update(run)` of the table shows new rows.
function trialTable(first, open) {
  let run = first;
  let shown = [];
  // Before a column is chosen the winner is first, then the other trials that were measured again: only those can win.
  let sort = { name: "", down: true };
  const sortedBy = () => sort.name || (run.measuredAgain ? "" : "throughput");
  const standing = (row) => (run.winner && row.trial === run.winner.trial ? 0 : given(row.first) && row.status === "ok" ? 1 : 2);
  const byStanding = (a, b) => standing(a) - standing(b) || (b.throughput ?? -1) - (a.throughput ?? -1) || a.trial - b.trial;
  const off = new Set();
  let columns = [];
  const search = el("input", { type: "search", placeholder: "Filter: micro_batch=8 throughput>5000 sdpa", "aria-label": "Filter trials", spellcheck: "false", autocapitalize: "off" });
  const chips = el("div", { class: "chips", role: "group", "aria-label": "Statuses" });
  const found = el("p", { class: "under", role: "status" });
  const about = el("p", { class: "lead" });
  const head = el("tr", {});
  const body = el("tbody", {});
  const pane = el("div", { class: "table-pane", tabindex: 0 }, el("table", { class: "trials" }, el("thead", {}, head), body));

  const sortBy = (name) => {
    sort = { name, down: sortedBy() === name ? !sort.down : name === "throughput" || name === "mfu" };
    refresh();
  };

  function header() {
    const present = new Set(run.columns);
    const by = sortedBy();
    columns = [
      ...TABLE_COLUMNS.filter(([name]) => present.has(name)).map(([name, title, text, kind]) => ({ name, title: title || run.unit || "Throughput", text, kind, get: (row) => row[name] })),
      ...run.knobNames.map((name) => ({
        name: `knob.${name}`, title: name, text: (row) => knobOf(run, name, row.knobs[name]), get: (row) => row.knobs[name],
        kind: run.rows.every((row) => row.knobs[name] === null || typeof row.knobs[name] === "number") ? "number" : "text",
      })),
      ...(present.has("reason") && run.rows.some((row) => row.reason) ? [{ name: "reason", title: "Reason", text: (row) => row.reason || "", kind: "text long", get: (row) => row.reason }] : []),
    ];
    clear(head).append(...columns.map((each) => el("th", { class: each.kind, scope: "col", "aria-sort": by === each.name ? (sort.down ? "descending" : "ascending") : "none" },
      el("button", { type: "button", "data-sort": each.name, onclick: () => sortBy(each.name) }, each.title, el("span", { class: "arrow", "aria-hidden": "true" }, by === each.name ? (sort.down ? " ▼" : " ▲") : "")))));
    // The filter by status.
    clear(chips).append(...STATUSES.filter((status) => run.headline.counts[status]).map((status) => el("button", {
      type: "button", "data-status": status, "aria-pressed": String(!off.has(status)),
      onclick: () => { if (off.has(status)) off.delete(status); else off.add(status); refresh(); },
    }, badge(status), ` ${run.headline.counts[status]}`)));
  }

  function draw() {
    const height = pane.clientHeight || 480;
    const begin = Math.max(0, Math.min(Math.floor(pane.scrollTop / ROW) - 8, shown.length));
    const end = Math.min(shown.length, begin + Math.ceil(height / ROW) + 18);
    const spacer = (rows) => {
      if (!rows) return [];
      const cell = el("td", { colspan: columns.length });
      cell.style.height = `${rows * ROW}px`;
      return [el("tr", { class: "spacer", "aria-hidden": "true" }, cell)];
    };
    clear(body).append(...spacer(begin), ...shown.slice(begin, end).map(line), ...spacer(shown.length - end));
  }

  function line(row) {
    const winner = run.winner && row.trial === run.winner.trial;
    return el("tr", { class: winner ? "is-winner" : null, "data-trial": row.trial, onclick: () => open(row) },
      columns.map((each, at) => el("td", { class: each.kind, title: each.kind.includes("long") ? row.reason : null },
        at ? each.text(row) : el("button", { type: "button", class: "link", "aria-label": `Trial ${row.trial}` }, each.text(row), winner ? " ★" : ""))));
  }

  function refresh() {
    const wanted = makeFilter(search.value, run);
    header();
    const by = sortedBy();
    const { get } = columns.find((each) => each.name === by) || columns[0];
    shown = run.rows.filter((row) => !off.has(row.status) && wanted.test(row));
    const sign = sort.down ? -1 : 1;
    shown.sort(!by ? byStanding : (a, b) => {
      const [x, y] = [get(a), get(b)];
      const empty = (each) => each === null || each === undefined || each === "";
      if (empty(x) !== empty(y)) return empty(x) ? 1 : -1;
      return sign * compareCells(x, y) || a.trial - b.trial;
    });
    about.textContent = [run.simulated ? "Nothing was run: these numbers are predictions." : run.emulated ? "Some ranks ran alone on one device: communication is priced." : "",
      run.measuredAgain ? `The winner is first, followed by the other trials that were ${run.seen} again; “First” is their first throughput.` : "", whyAbove(run)].filter(Boolean).join(" ");
    about.hidden = !about.textContent;
    found.textContent = wanted.unknown.length
      ? `There is no column ${wanted.unknown.join(", ")}. Columns: ${[...run.knobNames, ...run.columns.filter((each) => !each.startsWith("knob."))].join(", ")}`
      : shown.length === run.rows.length ? plural(shown.length, "trial") : `${number(shown.length, 9)} of ${plural(run.rows.length, "trial")}`;
    draw();
  }

  let waiting = false;
  pane.addEventListener("scroll", () => {
    if (waiting) return;
    waiting = true;
    requestAnimationFrame(() => { waiting = false; draw(); });
  });
  // For print: the first rows, and the number of those left out.
  const left = el("p", { class: "under", hidden: true });
  addEventListener("beforeprint", () => {
    clear(body).append(...shown.slice(0, PRINTED).map(line));
    left.textContent = `${number(shown.length - PRINTED, 9)} more are in trials.csv.`;
    left.hidden = shown.length <= PRINTED;
  });
  addEventListener("afterprint", () => { left.hidden = true; draw(); });
  search.addEventListener("input", () => { pane.scrollTop = 0; refresh(); });
  const element = section("trials", "All trials", null, about,
    el("div", { class: "row filters" }, search, chips), found, pane, left);
  new ResizeObserver(draw).observe(pane);
  refresh();
  return { element, update(next) { run = next; refresh(); }, get shown() { return shown; } };
}
