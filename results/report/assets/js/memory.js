// Throughput over peak memory: what fits, how fast it is, and where memory ended.

function memoryNeed(row) {
  if (row.status === "ok" || row.status === "oom") return row.peak_memory_mib;
  return row.status === "skipped" ? row.predicted_memory_mib : null;
}

function throughputOverMemory(run) {
  const done = run.rows.filter((row) => row.status === "ok" && given(row.peak_memory_mib));
  const failed = run.rows.filter((row) => (row.status === "oom" || row.status === "skipped") && given(memoryNeed(row)));
  if (!done.length && !failed.length) return null;
  const limit = run.headline.limit_mib;
  const unknown = run.rows.filter((row) => row.status === "oom" && !given(row.peak_memory_mib)).length;
  const kinds = ["oom", "skipped"].filter((status) => failed.some((row) => row.status === status));
  const onFrontier = run.frontier.map((each) => run.byTrial.get(each)).filter(Boolean);
  const plot = figure("", (width) => {
    // An OOM that asked for ten times the limit must not squeeze all others into a corner.
    const needs = run.rows.map(memoryNeed).filter(given).sort((a, b) => a - b);
    const usual = Math.max(0, ...done.map((row) => row.peak_memory_mib));
    const nearLimit = limit && needs.at(-1) > limit * 0.2;
    const most = Math.min(needs.at(-1), Math.max(usual, nearLimit ? limit : 0, needs[needs.length >> 1]) * 1.5);
    const high = Math.max(most, nearLimit ? limit * 1.03 : 0);
    const unit = memoryUnit(high);
    const strip = kinds.length * 20 + (kinds.length ? 8 : 0);
    const speeds = extent(done.flatMap((row) => [row.throughput, row.first])) || [0, 1];
    const none = Object.assign(() => 0, { ticks: [], label: String });
    const frame = axes(width, (done.length ? 400 : 100) + strip, {
      x: (from, to) => linear(0, high / unit.by, from, to, Math.min(9, width / 75), { tight: true }),
      y: (from, to) => (done.length ? linear(Math.min(0, speeds[0]), speeds[1] * 1.04, from, to, 6) : none),
      xLabel: `Peak memory of a rank, ${unit.name}`, yLabel: done.length ? `Throughput${run.unit ? `, ${run.unit}` : ""}` : "", below: strip, right: 18,
      left: kinds.length ? Math.max(textWidth("skipped") + 12, textWidth(number(speeds[1] * 1.2, 2)) + 12) : null,
    });
    const x = (mib) => Math.min(frame.x(mib / unit.by), frame.right);
    kinds.forEach((status, at) => {
      const y = frame.base + 16 + at * 20;
      frame.layer.append(svg("rect", { class: "strip", x: frame.left, y: y - 9, width: frame.right - frame.left, height: 18 }));
      frame.layer.append(svg("text", { class: "ticks strip-label", x: frame.left - 7, y: y + 4, "text-anchor": "end" }, status));
    });
    if (nearLimit) {
      const at = x(limit);
      frame.layer.append(svg("line", { class: "limit", x1: at, x2: at, y1: frame.top - 6, y2: frame.base + strip }));
      frame.layer.append(svg("text", { class: "note limit-note", x: at - 5, y: frame.top + 4, "text-anchor": "end" }, `limit ${memory(limit)}`));
    }
    if (onFrontier.length > 1) {
      frame.layer.append(svg("path", { class: "frontier", d: steps(onFrontier.map((row) => [x(row.peak_memory_mib), frame.y(row.throughput)])) }));
    }
    const points = [
      ...done.map((row) => point(run, row, x(row.peak_memory_mib), frame.y(row.throughput))),
      ...failed.map((row) => point(run, row, x(memoryNeed(row)), frame.base + 16 + kinds.indexOf(row.status) * 20)),
    ];
    revisions(frame.layer, done.filter((row) => given(row.first)).map((row) => [x(row.peak_memory_mib), frame.y(row.first), frame.y(row.throughput)]));
    marks(frame.layer, points);
    for (const [trial, kind] of [[run.base, "default"], [run.winner, "winner"]]) {
      const row = trial && run.byTrial.get(trial.trial);
      if (!row || row.status !== "ok" || !given(row.peak_memory_mib) || (kind === "default" && run.winner && run.winner.trial === row.trial)) continue;
      const [px, py] = [x(row.peak_memory_mib), frame.y(row.throughput)];
      frame.layer.append(svg("path", { class: kind === "winner" ? "star" : "default-mark", d: kind === "winner" ? star(px, py, 10) : outline("ok", px, py, 7) }));
      note(frame.layer, kind, px, py, frame, kind);
    }
    hover(frame.root, points);
    return frame.root;
  });
  const aside = [
    limit && !run.rows.some((row) => memoryNeed(row) > limit * 0.2) ? `The limit, ${memory(limit)}, lies far to the right and is not drawn.` : "",
    unknown ? `${plural(unknown, "OOM")} left no figure of what was needed and ${unknown === 1 ? "is" : "are"} not shown.` : "",
  ].filter(Boolean).join(" ");
  return section("memory", "Throughput over peak memory",
    `${done.length ? "The stepped line is the frontier: no trial on it is beaten in speed by one that needs less memory." : "No trial ran to the end."}${kinds.length ? " Below the axis stands what did not fit: OOMs at what they held plus what they asked for, skipped ones at what was predicted; a mark at the right edge lies beyond it." : ""} ${whyAbove(run)} ${aside}`.replace(/ +/g, " ").trim(),
    plot, legend(run.headline.counts, !done.length ? [] : [[svg("path", { class: "star", d: star(0, 0, 8) }), "winner"], [svg("path", { class: "default-mark", d: outline("ok", 0, 0, 6) }), "default"], ...againKeys(run)]));
}
