// Throughput over peak memory.

const STRIP = 20;

function memoryNeed(row) {
  if (row.status === "ok" || row.status === "oom") return row.peak_memory_mib;
  return row.status === "skipped" ? row.predicted_memory_mib : null;
}

// End of the memory axis: an OOM that requested ten times the limit must not compress all others into a corner.
function memoryReach(run, done, limit) {
  const needs = run.rows.map(memoryNeed).filter(given).sort((a, b) => a - b);
  const [, usual] = extent(done.map((row) => row.peak_memory_mib)) || [0, 0];
  return Math.max(Math.min(needs.at(-1), Math.max(usual, limit, needs[needs.length >> 1]) * 1.5), limit * 1.03);
}

// `failed` trials are in strips below the axis, one for each of `kinds`; `limit` is drawn unless 0.
function memoryChart(run, { done, failed, kinds, limit }) {
  const memories = memoryAxis(memoryReach(run, done, limit));
  const speeds = done.length ? throughputAxis(run.unit, done.flatMap((row) => [row.throughput, row.first])) : { label: "", scale: bands(1) };
  const below = kinds.length ? kinds.length * STRIP + 8 : 0;
  return figure((width) => {
    const frame = axes(width, (done.length ? 400 : 100) + below, { x: memories, y: speeds, below, right: 18, left: Math.max(0, ...kinds.map((each) => textWidth(each))) + 12 });
    const x = (mib) => Math.min(frame.x(mib / memories.by), frame.right);
    const at = (row) => [x(row.peak_memory_mib), frame.y(row.throughput)];
    const strip = (status) => frame.base + 16 + kinds.indexOf(status) * STRIP;
    for (const status of kinds) {
      frame.rect("strip", frame.left, strip(status) - 9, frame.right - frame.left, 18);
      frame.text("tick", frame.left - 7, strip(status) + 4, status, { anchor: "end" });
    }
    if (limit) {
      frame.line("limit", x(limit), frame.top - 6, x(limit), frame.base + below);
      frame.text("note limit-note", x(limit) - 5, frame.top + 4, `limit ${memory(limit)}`, { anchor: "end" });
    }
    const line = run.frontier.map((each) => run.byTrial.get(each)).filter(Boolean).map(at);
    if (line.length > 1) frame.path("frontier", steps(line));
    const points = [
      ...done.map((row) => point(run, row, ...at(row), given(row.first) ? frame.y(row.first) : null)),
      ...failed.map((row) => point(run, row, x(memoryNeed(row)), strip(row.status))),
    ];
    trialMarks(frame, points);
    for (const kind of ["default", "winner"]) {
      const special = kind === "winner" ? run.winner : run.base;
      const row = special && run.byTrial.get(special.trial);
      if (!row || !done.includes(row) || (kind === "default" && run.winner && run.winner.trial === row.trial)) continue;
      if (kind === "winner") winnerMark(frame, ...at(row)); else frame.path("default-mark", outline("dot", ...at(row), 7));
      note(frame, kind, ...at(row), kind);
    }
    hover(frame, points);
    return frame;
  }, "throughput over peak memory");
}

function throughputOverMemory(run) {
  const done = run.rows.filter((row) => row.status === "ok" && given(row.peak_memory_mib));
  const failed = run.rows.filter((row) => (row.status === "oom" || row.status === "skipped") && given(memoryNeed(row)));
  if (!done.length && !failed.length) return null;
  const limit = run.headline.limit_mib;
  const far = limit && !run.rows.some((row) => memoryNeed(row) > limit * 0.2);
  const unknown = run.rows.filter((row) => row.status === "oom" && !given(row.peak_memory_mib)).length;
  const kinds = ["oom", "skipped"].filter((status) => failed.some((row) => row.status === status));
  return section("memory", "Throughput over peak memory", [
    done.length ? "The stepped line is the Pareto front: no trial needs less memory and is faster than one on it." : "No trial succeeded.",
    kinds.length ? "Trials that did not fit are below the axis: OOMs at the memory in use plus the requested memory, skipped trials at their predicted memory; a mark at the right edge lies beyond it." : "",
    whyAbove(run),
    far ? `The limit, ${memory(limit)}, lies far to the right and is not drawn.` : "",
    unknown ? `${plural(unknown, "OOM")} left no figure of what was needed and ${unknown === 1 ? "is" : "are"} not shown.` : "",
  ].filter(Boolean).join(" "),
  memoryChart(run, { done, failed, kinds, limit: far ? 0 : limit || 0 }),
  legend(...statusKeys(run.headline.counts), ...(done.length ? [winnerKey(), [picture(14, 14, ["default-mark", outline("dot", 0, 0, 5)]), "default"], ...againKeys(run)] : [])));
}
