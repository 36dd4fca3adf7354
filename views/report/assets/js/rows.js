// The trials of a run, prepared for the charts and the table.

function makeRun(data) {
  const columns = data.rows;
  const names = Object.keys(columns);
  const count = (columns.trial || []).length;
  const rows = [];
  const measuredAgain = Object.keys(data.again).length > 0;
  for (let at = 0; at < count; at += 1) {
    const row = { knobs: {} };
    for (const name of names) {
      const value = columns[name][at];
      if (name.startsWith("knob.")) row.knobs[name.slice(5)] = value;
      else row[name] = value;
    }
    const again = data.again[String(row.trial)];
    row.first = again ? again.first : null;
    // Where the fastest trials were measured again, the others have one measurement only and cannot win.
    row.once = measuredAgain && !again && row.status === "ok";
    rows.push(row);
  }
  const knobNames = names.filter((each) => each.startsWith("knob.")).map((each) => each.slice(5));
  const derived = new Set(data.space.knobs.filter((each) => each.derived).map((each) => each.name));
  return {
    ...data, rows, columns: measuredAgain ? [...names, "first"] : names, knobNames, derived, measuredAgain,
    seen: data.simulated ? "simulated" : "measured",
    byTrial: new Map(rows.map((each) => [each.trial, each])),
    unit: data.headline.unit,
    winner: data.headline.winner,
    base: data.headline.default,
    varying: knobNames.filter((name) => new Set(rows.map((row) => row.knobs[name])).size > 1),
    pick: null,
    ui: data.ui || {},
  };
}

function configText(knobs) {
  return Object.entries(knobs).filter(([, value]) => value !== null && value !== undefined)
    .map(([name, value]) => `${name}=${knob(value)}`).join("  ");
}

function isLossy(run, name, value) {
  return (run.lossy[name] || []).includes(value);
}

// Value of a knob as text or element, marked if it trades accuracy for speed.
function knobText(run, name, value) {
  return `${knob(value)}${isLossy(run, name, value) ? " (lossy)" : ""}`;
}

function knobOf(run, name, value) {
  return [knob(value), isLossy(run, name, value) ? [" ", tag("lossy")] : null];
}

// Explains the choice of the winner if other trials have a higher throughput.
function whyAbove(run) {
  if (!run.winner || !run.measuredAgain) return "";
  const above = run.rows.filter((row) => row.status === "ok" && row.throughput > run.winner.throughput);
  const once = above.filter((row) => row.once).map((row) => row.trial);
  const tied = above.filter((row) => !row.once).map((row) => row.trial);
  const named = (list) => `Trial${list.length > 1 ? "s" : ""} ${words(list.slice(0, 4).map(String))}${list.length > 4 ? ` and ${list.length - 4} more` : ""}`;
  return [
    once.length ? `${named(once)}, above the winner, ${once.length > 1 ? "were" : "was"} ${run.seen} only once: a trial that is not confirmed cannot win.` : "",
    tied.length ? `${named(tied)} ${tied.length > 1 ? "are" : "is"} faster than the winner by no more than the error: between equal trials the one with more free memory wins, then the simpler one.` : "",
  ].filter(Boolean).join(" ");
}

// A trial in a few lines, for a tooltip.
function trialLines(run, row) {
  const lines = [`Trial ${row.trial}: ${row.status}`];
  if (given(row.throughput)) lines.push(rate(row.throughput, run.unit, 5));
  if (given(row.first)) lines.push(`${run.seen} again; first ${rate(row.first, run.unit, 5)}`);
  else if (row.once) lines.push(`${run.seen} once`);
  if (given(row.peak_memory_mib)) lines.push(`${memory(row.peak_memory_mib)} peak memory`);
  if (row.status !== "ok" && row.reason) lines.push(row.reason.length > 140 ? `${row.reason.slice(0, 139)}…` : row.reason);
  const knobs = run.varying.filter((name) => !run.derived.has(name) && row.knobs[name] !== null && row.knobs[name] !== undefined);
  lines.push(knobs.map((name) => `${name}=${knobText(run, name, row.knobs[name])}`).join(", "));
  return lines.filter(Boolean);
}
