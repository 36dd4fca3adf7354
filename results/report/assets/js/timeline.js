// When trials ran, on as many devices as they took at once; where those are many, one trial below the other.

const TALLEST = 260;

function timeline(run) {
  if (!run.timeline) return null;
  const { lanes, items, origin, of } = run.timeline;
  const devices = of === "devices";
  const end = Math.max(...items.map((each) => each[4]));
  const unit = timeUnit(end);
  const plot = figure("", (width) => {
    const lane = Math.min(26, TALLEST / lanes);
    const height = lanes * lane + 26 + 44;
    const left = devices ? textWidth(String(lanes)) + 22 : 14;
    const frame = axes(width, height, {
      x: (from, to) => linear(0, end / unit.by, from, to, Math.min(9, width / 80), { tight: true }),
      y: (from, to) => Object.assign((value) => to + value * lane, { ticks: [], label: String }),
      xLabel: `Time since the first trial began, ${unit.name}`, yLabel: lanes === 1 ? (devices ? "Device" : "One trial at a time") : `${number(lanes, 9)} ${devices ? "devices" : "trials at once"}`, left,
    });
    const shapes = {};
    const points = [];
    for (const [trial, first, count, begin, until] of items) {
      const row = run.byTrial.get(trial);
      if (!row) continue;
      const x0 = frame.x(begin / unit.by);
      const x1 = frame.x(until / unit.by);
      const gap = x1 - x0 > 3 ? 0.6 : 0;
      const y = frame.y(first);
      const size = Math.max(count * lane - (lane > 6 ? 2 : 0.5), 1);
      shapes[row.status] = `${shapes[row.status] || ""}M${x0.toFixed(2)} ${y.toFixed(1)}h${Math.max(x1 - x0 - gap, 0.7).toFixed(2)}v${size.toFixed(1)}H${x0.toFixed(2)}Z`;
      points.push(point(run, row, (x0 + x1) / 2, y + size / 2));
    }
    for (const status of STATUSES) if (shapes[status]) frame.layer.append(svg("path", { class: `fill-${status}`, d: shapes[status] }));
    for (let at = 0; devices && at < lanes; at += Math.ceil(lanes / 8)) frame.layer.append(svg("text", { class: "ticks", x: left - 7, y: frame.y(at) + Math.min(lane, 20) / 2 + 4, "text-anchor": "end" }, at));
    hover(frame.root, points, { reach: 40 });
    return frame.root;
  }, { label: "timeline of the trials by device" });
  const used = [...new Set(items.map(([trial]) => (run.byTrial.get(trial) || {}).devices))];
  const drawn = devices
    ? "Each block is a trial, as wide as the time it took and as high as the devices it used. The table does not name devices: a trial is drawn on the lowest ones that were free."
    : `Each block is a trial${used.length === 1 && given(used[0]) ? ` on ${plural(used[0], "device")}` : ""}, as wide as the time it took; those that ran at the same time stand below one another.`;
  return section("timeline", "Where the time went",
    `${drawn} It begins at ${moment(origin)}${run.simulated ? " and goes by the simulated cluster's clock" : ""}.`,
    plot, legend(run.headline.counts));
}
