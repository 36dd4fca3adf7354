// Shared parts of the figures of trials on both pages: axes, marks and legends.

function throughputAxis(unit, speeds) {
  const [low, high] = extent(speeds) || [0, 1];
  return { label: `Throughput${unit ? `, ${unit}` : ""}`, scale: (from, to, count) => linear(Math.min(0, low), high * 1.03, from, to, count) };
}

function memoryAxis(mib) {
  const unit = memoryUnit(mib);
  return { by: unit.by, label: `Peak memory of a rank, ${unit.name}`, scale: fromZero(mib / unit.by) };
}

// Device seconds used up to the end of each trial, by trial.
function spentBy(run) {
  const ended = run.rows.filter((row) => given(row.seconds_total));
  if (ended.every((row) => given(row.started))) ended.sort((a, b) => a.started + a.seconds_total - b.started - b.seconds_total);
  const spent = new Map();
  let sum = 0;
  for (const row of ended) {
    sum += row.seconds_total * (row.devices || 1);
    spent.set(row.trial, sum);
  }
  return spent;
}

// The axes of progress: the number of trials and, if known, device time. `place(run, row)` is the position of a trial,
// if it has one.
function courses(runs) {
  const [, trials] = extent(runs.flatMap((run) => run.rows.map((row) => row.trial))) || [0, 0];
  const out = [{ name: "trials", label: "Trial", scale: counting(trials), place: (run, row) => row.trial }];
  const spent = new Map(runs.map((run) => [run, spentBy(run)]));
  const [, total] = extent([...spent.values()].flatMap((each) => [...each.values()])) || [0, 0];
  if (total > 0) {
    const { by, name } = timeUnit(total);
    out.push({ name: "device time", label: `Device time spent, ${name}`, scale: fromZero(total / by), place: (run, row) => spent.get(run).get(row.trial) / by });
  }
  return out;
}

// The trials that raised the best so far, in order, up to the winner: faster ones were not confirmed.
function climb(run, { place }) {
  const top = run.winner ? run.winner.throughput : Infinity;
  const placed = run.rows.map((row) => [place(run, row), row]).filter(([at, row]) => row.status === "ok" && given(at)).sort(([a], [b]) => a - b);
  let best = -Infinity;
  return placed.map(([, row]) => row).filter((row) => {
    const higher = row.throughput > best && row.throughput <= top;
    if (higher) best = row.throughput;
    return higher;
  });
}

// A trial as a mark; `first` is the height of its first measurement.
function point(run, row, x, y, first = null) {
  return { x, y, first, kind: `s-${row.status}${row.once ? " once" : ""}`, lines: () => trialLines(run, row), pick: run.pick ? () => run.pick(row) : null };
}

// Marks, and thin lines from the first measurement of a trial to its final value.
function trialMarks(frame, points, how = {}) {
  frame.path("revised", points.filter((each) => given(each.first) && each.kind === "s-ok")
    .map(({ x, y, first }) => `M${x.toFixed(1)} ${y.toFixed(1)}V${first.toFixed(1)}m-3 0h6`).join(""));
  marks(frame, points, MARKS, how);
}

function winnerMark(pen, x, y) {
  pen.path("star", outline("star", x, y, 9));
}

function winnerKey() {
  return [picture(14, 14, ["star", outline("star", 0, 0, 6.5)]), "winner"];
}

// The legend of trials that were measured again and of the others.
function againKeys(run) {
  const keys = [];
  if (run.rows.some((row) => row.status === "ok" && given(row.first))) keys.push([picture(14, 14, ["revised", "M-3 -6h6M0 -6V6"], markOf("s-ok", 2.5, 4.5)), `${run.seen} again, from its first value`]);
  if (run.rows.some((row) => row.once)) keys.push([picture(14, 14, markOf("s-ok once", 3.2)), `${run.seen} once`]);
  return keys;
}

// A line in a legend.
function lineKey(kind, words) {
  return [picture(28, 10, [kind, "M-14 0H14"]), words];
}
