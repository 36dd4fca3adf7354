// Timeline of the trials by device; with many devices, one row for each trial.

const TALLEST = 260;

function timelineChart(run) {
  const { lanes, items, of } = run.timeline;
  const devices = of === "devices";
  const [, end] = extent(items.map((each) => each[4]));
  const unit = timeUnit(end);
  const title = lanes > 1 ? `${number(lanes, 9)} ${devices ? "devices" : "trials at once"}` : devices ? "Device" : "One trial at a time";
  return figure((width) => {
    const lane = Math.min(26, TALLEST / lanes);
    const frame = axes(width, lanes * lane + 26 + 42, {
      x: { label: `Time since the first trial began, ${unit.name}`, scale: fromZero(end / unit.by) },
      // Downwards.
      y: { label: title, scale: (from, to) => bands(lanes)(to, from) }, left: devices ? textWidth(String(lanes)) + 22 : 0,
    });
    const shapes = {};
    const points = [];
    for (const [trial, first, count, begin, until] of items) {
      const row = run.byTrial.get(trial);
      if (!row) continue;
      const [x0, x1, y] = [frame.x(begin / unit.by), frame.x(until / unit.by), frame.y(first)];
      const gap = x1 - x0 > 3 ? 0.6 : 0;
      const size = Math.max(count * lane - (lane > 6 ? 2 : 0.5), 1);
      shapes[row.status] = `${shapes[row.status] || ""}M${x0.toFixed(2)} ${y.toFixed(1)}h${Math.max(x1 - x0 - gap, 0.7).toFixed(2)}v${size.toFixed(1)}H${x0.toFixed(2)}Z`;
      points.push(point(run, row, (x0 + x1) / 2, y + size / 2));
    }
    for (const status of STATUSES) frame.path(`fill s-${status}`, shapes[status]);
    for (let at = 0; devices && at < lanes; at += Math.ceil(lanes / 8)) frame.text("tick", frame.left - 7, frame.y(at) + Math.min(lane, 20) / 2 + 4, at, { anchor: "end" });
    hover(frame, points, { reach: 40 });
    return frame;
  }, `timeline of the trials by ${devices ? "device" : "time"}`);
}

function timeline(run) {
  if (!run.timeline) return null;
  const { items, origin, of } = run.timeline;
  const used = [...new Set(items.map(([trial]) => (run.byTrial.get(trial) || {}).devices))];
  const drawn = of === "devices"
    ? "Each block is a trial, as wide as its time and as high as its number of devices. The table does not record which devices: a trial is drawn on the lowest free ones."
    : `Each block is a trial${used.length === 1 && given(used[0]) ? ` on ${plural(used[0], "device")}` : ""}, as wide as its time; trials that ran at the same time are one below the other.`;
  const [, end] = extent(items.map((each) => each[4]));
  const again = run.seconds_again;
  const beyond = given(again) ? ` Measuring the leaders again took another ${duration(again)}, ${percent(again / (end + again))} of the whole.` : "";
  return section("timeline", "Timeline",
    `${drawn} It begins at ${moment(origin)}${run.simulated ? ", in the time of the simulated cluster" : ""}.${beyond}`,
    timelineChart(run), legend(...statusKeys(run.headline.counts)));
}
