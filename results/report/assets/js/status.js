// The statuses: order, words, and a mark of its own for each, so that colour is never alone.

const STATUSES = ["ok", "oom", "timeout", "crash", "wrong", "skipped"];

const STATUS_WORDS = {
  ok: "ran to the end",
  oom: "memory ran out",
  timeout: "outlived its deadline and was killed",
  crash: "failed with an exception or a signal",
  wrong: "ran, but its loss is not finite or not the reference's",
  skipped: "never run: known not to fit",
};

const STATES = {
  running: "running", finished: "finished", nothing: "no winner", stopped: "stopped", table: "table only",
};

const STATE_WORDS = {
  running: "A process is working on this run; new trials appear as they end.",
  finished: "The search came to its end.",
  nothing: "The search came to its end without a winner: no trial ran to the end.",
  stopped: "Nobody works on this run, and it did not come to its end; `redline tune --resume` continues it.",
  table: "There is no run.yaml beside the table, so what was asked, the space and the environment are not known, nor whether more is to come.",
};

// Outlines of the marks around 0, 0, about as large as a circle of radius r.
function outline(status, x, y, r) {
  const at = (dx, dy) => `${(x + dx).toFixed(1)} ${(y + dy).toFixed(1)}`;
  switch (status) {
    case "oom": return `M${at(-r, -r)}L${at(r, r)}M${at(-r, r)}L${at(r, -r)}`;
    case "timeout": return `M${at(0, -r * 1.2)}L${at(r * 1.15, r * 0.9)}L${at(-r * 1.15, r * 0.9)}Z`;
    case "crash": return `M${at(-r, -r)}L${at(r, -r)}L${at(r, r)}L${at(-r, r)}Z`;
    case "wrong": return `M${at(0, -r * 1.35)}L${at(r * 1.35, 0)}L${at(0, r * 1.35)}L${at(-r * 1.35, 0)}Z`;
    default: return `M${at(-r, 0)}a${r} ${r} 0 1 0 ${2 * r} 0a${r} ${r} 0 1 0 ${-2 * r} 0Z`;
  }
}

function star(x, y, r) {
  let path = "";
  for (let i = 0; i < 10; i += 1) {
    const size = i % 2 ? r * 0.45 : r;
    const angle = (Math.PI * i) / 5 - Math.PI / 2;
    path += `${i ? "L" : "M"}${(x + size * Math.cos(angle)).toFixed(1)} ${(y + size * Math.sin(angle)).toFixed(1)}`;
  }
  return `${path}Z`;
}

function badge(status) {
  return el("span", { class: `badge s-${status}`, title: STATUS_WORDS[status] },
    svg("svg", { viewBox: "-7 -7 14 14", width: 12, height: 12, "aria-hidden": "true" },
      svg("path", { class: `mark s-${status}`, d: outline(status, 0, 0, 4) })),
    status);
}

// Said in plain sight, wherever such a run or trial is shown.
const TAG_WORDS = {
  simulated: "Nothing was run: all numbers are predictions.",
  lossy: "Trades accuracy for speed, such as by weights without an fp32 master copy: another training, not only a faster one.",
};

function tag(kind) {
  return el("span", { class: `tag tag-${kind}`, title: TAG_WORDS[kind] }, kind);
}

function tagsOf(simulated, lossy) {
  return [simulated ? tag("simulated") : null, lossy ? tag("lossy") : null];
}

// The legend of those statuses that are there, with how many of each.
function legend(counts, extra = []) {
  const shown = STATUSES.filter((each) => counts[each]);
  return el("p", { class: "legend" },
    shown.map((each) => el("span", {}, badge(each), ` ${number(counts[each], 15)}`)),
    extra.map(([shape, text]) => el("span", {},
      svg("svg", { viewBox: "-9 -9 18 18", width: 14, height: 14, "aria-hidden": "true" }, shape), ` ${text}`)));
}
