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
  table: "There is no run.yaml beside the table, so the request, the space, the environment, and whether more trials follow are not known.",
};

// Kinds of marks and their shapes, the later over the earlier. Hollow is what was measured once where others were again.
const MARKS = new Map([
  ["s-skipped", "dot"], ["s-wrong", "diamond"], ["s-crash", "square"], ["s-timeout", "triangle"], ["s-oom", "cross"], ["s-ok once", "dot"], ["s-ok", "dot"],
]);

function markOf(kind, r, y = 0) {
  return [`mark ${kind}`, outline(MARKS.get(kind), 0, y, r)];
}

function badge(status) {
  return el("span", { class: `badge s-${status}`, title: STATUS_WORDS[status] },
    picture(12, 12, markOf(`s-${status}`, 3.5)), status);
}

// Said in plain sight, wherever such a run or trial is shown.
const TAG_WORDS = {
  simulated: "Nothing was run: all numbers are predictions.",
  emulated: "Some ranks ran alone on one device: memory is measured, communication is priced.",
  lossy: "Trades accuracy for speed, such as by weights without an fp32 master copy: another training, not only a faster one.",
};

function tag(kind) {
  return el("span", { class: `tag tag-${kind}`, title: TAG_WORDS[kind] }, kind);
}

function tagsOf(run, lossy) {
  return [run.simulated ? tag("simulated") : null, run.emulated ? tag("emulated") : null, lossy ? tag("lossy") : null];
}

// Entries of a legend: those statuses that are there, with how many of each.
function statusKeys(counts) {
  return STATUSES.filter((each) => counts[each]).map((each) => [badge(each), number(counts[each], 15)]);
}

// One share of a bar each, by status.
function statusParts(sizes) {
  return STATUSES.map((each) => ({ kind: `fill s-${each}`, size: sizes[each] || 0 }));
}
