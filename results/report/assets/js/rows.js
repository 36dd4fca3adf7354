// The trials of a run, as the charts and the table read them.

function makeRun(data) {
  const columns = data.rows;
  const names = Object.keys(columns);
  const count = (columns.trial || []).length;
  const rows = [];
  for (let at = 0; at < count; at += 1) {
    const row = { knobs: {} };
    for (const name of names) {
      const value = columns[name][at];
      if (name.startsWith("knob.")) row.knobs[name.slice(5)] = value;
      else row[name] = value;
    }
    rows.push(row);
  }
  const knobNames = names.filter((each) => each.startsWith("knob.")).map((each) => each.slice(5));
  const derived = new Set(data.space.knobs.filter((each) => each.derived).map((each) => each.name));
  return {
    ...data, rows, columns: names, knobNames, derived,
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

// A trial in a few lines, for a tooltip.
function trialLines(run, row) {
  const lines = [`Trial ${row.trial}: ${row.status}`];
  if (given(row.throughput)) lines.push(rate(row.throughput, run.unit, 5));
  if (given(row.peak_memory_mib)) lines.push(`${memory(row.peak_memory_mib)} peak memory`);
  if (row.status !== "ok" && row.reason) lines.push(row.reason.length > 140 ? `${row.reason.slice(0, 139)}…` : row.reason);
  const told = run.varying.filter((name) => !run.derived.has(name) && row.knobs[name] !== null && row.knobs[name] !== undefined);
  lines.push(told.map((name) => `${name}=${knob(row.knobs[name])}`).join(", "));
  return lines.filter(Boolean);
}

function point(run, row, x, y) {
  return { x, y, status: row.status, lines: () => trialLines(run, row), pick: run.pick ? () => run.pick(row) : null };
}
