// The best throughput so far, against trials and against device time.

function progressOver(run, { label, place, unit, caption }) {
  const rows = run.rows.filter((row) => given(place(row)));
  if (!rows.some((row) => row.status === "ok")) return null;
  return figure(caption, (width) => {
    const reach = extent(rows.map(place))[1] / unit.by;
    const good = rows.filter((row) => row.status === "ok");
    const speeds = extent(good.flatMap((row) => [row.throughput, row.first]));
    const frame = axes(width, 300, {
      x: (from, to) => (unit.whole ? counting(reach, from, to, Math.min(8, width / 80)) : linear(0, reach, from, to, Math.min(8, width / 80), { tight: true })),
      y: (from, to) => linear(Math.min(0, speeds[0]), speeds[1] * 1.02, from, to, 5),
      xLabel: label, yLabel: `Throughput${run.unit ? `, ${run.unit}` : ""}`,
    });
    const points = rows.map((row) => point(run, row, frame.x(place(row) / unit.by), row.status === "ok" ? frame.y(row.throughput) : frame.base - 7));
    if (run.base && given(run.base.throughput)) {
      const at = frame.y(run.base.throughput);
      frame.layer.append(svg("line", { class: "reference", x1: frame.left, x2: frame.right, y1: at, y2: at }));
      // Above the line or below it, where fewer marks are.
      const inside = (y) => points.filter((each) => each.x > frame.right - 52 && Math.abs(each.y - y + 4) < 10).length;
      const y = inside(at - 5) > inside(at + 14) ? at + 14 : at - 5;
      frame.layer.append(svg("text", { class: "note default", x: frame.right, y, "text-anchor": "end" }, "default"));
    }
    revisions(frame.layer, good.filter((row) => given(row.first)).map((row) => [frame.x(place(row) / unit.by), frame.y(row.first), frame.y(row.throughput)]));
    marks(frame.layer, points, { radius: 3, dim: !run.measuredAgain });
    const line = climb(run, rows, place).map((row) => [frame.x(place(row) / unit.by), frame.y(row.throughput)]);
    frame.layer.append(svg("path", { class: "best", d: steps(line, frame.right) }));
    const winner = run.winner && run.byTrial.get(run.winner.trial);
    if (winner && given(place(winner))) frame.layer.append(svg("path", { class: "star", d: star(frame.x(place(winner) / unit.by), frame.y(winner.throughput), 8) }));
    hover(frame.root, points);
    return frame.root;
  });
}

// Device seconds spent when each trial ended, by trial.
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

function progress(run) {
  const spent = spentBy(run);
  const total = Math.max(0, ...spent.values());
  const unit = timeUnit(total);
  const shown = [
    progressOver(run, { label: "Trial", place: (row) => row.trial, unit: { by: 1, whole: true }, caption: "" }),
    total > 0 ? progressOver(run, { label: `Device time spent, ${unit.name}`, place: (row) => spent.get(row.trial), unit, caption: "" }) : null,
  ].filter(Boolean);
  if (!shown.length) return null;
  return section("progress", "How the best was found",
    [`The line is the highest throughput ${run.seen} so far${run.winner ? ", up to the winner's" : ""}; marks are trials, those that failed along the bottom.`,
      shown.length > 1 ? "Left by number of trials, right by the device time they took." : "",
      run.measuredAgain && run.winner ? `The leaders were ${run.seen} again at the end; the winner, starred, is the one that held up.` : "", whyAbove(run)].filter(Boolean).join(" "),
    el("div", { class: "pair" }, shown), legend(run.headline.counts, run.winner ? [[svg("path", { class: "star", d: star(0, 0, 8) }), "winner"], ...againKeys(run)] : []));
}
