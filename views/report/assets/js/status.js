// The statuses: order, texts, and a shape for each, so that they do not differ by colour alone.

const STATUSES = ["ok", "oom", "timeout", "crash", "wrong", "skipped"];

const STATUS_WORDS = {
  ok: "succeeded",
  oom: "out of memory",
  timeout: "exceeded its deadline and was killed",
  crash: "failed with an exception or a signal",
  wrong: "ran, but its loss is not finite or differs from the reference",
  skipped: "not run: it was known not to fit",
};

const STATES = {
  running: "running", finished: "finished", nothing: "no winner", stopped: "stopped", plan: "by itself",
};

const STATE_WORDS = {
  running: "A process is working on this run; new trials appear as they end.",
  finished: "The search has finished.",
  nothing: "The search has finished without a winner: no trial succeeded.",
  stopped: "No process works on this run, and it has not finished; `redline tune --resume` continues it.",
  plan: "A best.yaml or a plan by itself: one configuration, without the other trials.",
};

// Kinds of marks and their shapes; later ones are drawn on top. Hollow: measured once where others were measured again.
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

// Shown with every such run or trial.
const TAG_WORDS = {
  simulated: "Nothing was run: all numbers are predictions.",
  emulated: "Some ranks ran alone on one device: memory is measured, communication is priced.",
  lossy: "Trades accuracy for speed, such as by weights without an fp32 master copy: it changes the training, not only its speed.",
};

function tag(kind) {
  return el("span", { class: `tag tag-${kind}`, title: TAG_WORDS[kind] }, kind);
}

function tagsOf(run, lossy) {
  return [run.simulated ? tag("simulated") : null, run.emulated ? tag("emulated") : null, lossy ? tag("lossy") : null];
}

// Entries of a legend: the statuses present, with their counts.
function statusKeys(counts) {
  return STATUSES.filter((each) => counts[each]).map((each) => [badge(each), number(counts[each], 15)]);
}

// Shares of a bar by status.
function statusParts(sizes) {
  return STATUSES.map((each) => ({ kind: `fill s-${each}`, size: sizes[each] || 0 }));
}
