// Thousands of marks as a few elements: one path a status.

function marks(layer, points, { radius = 3.6, dim = false } = {}) {
  const size = points.length > 1500 ? radius * 0.66 : points.length > 300 ? radius * 0.82 : radius;
  const look = `${dim ? " dim" : ""}${points.length > 300 ? " many" : ""}`;
  for (const status of [...STATUSES].reverse()) {
    for (const once of [true, false]) {
      let path = "";
      for (const each of points) if (each.status === status && Boolean(each.once) === once) path += outline(status, each.x, each.y, size);
      if (path) layer.append(svg("path", { class: `mark s-${status}${look}${once ? " once" : ""}`, d: path }));
    }
  }
}

// Thin lines from what a first measurement said to what the trial is judged by, of [x, y of the first, y].
function revisions(layer, lines) {
  let path = "";
  for (const [x, from, to] of lines) {
    path += `M${x.toFixed(1)} ${to.toFixed(1)}V${from.toFixed(1)}m-3 0h6`;
  }
  if (path) layer.append(svg("path", { class: "revised", d: path }));
}

// What the legend says of trials that were measured again, and of the others.
function againKeys(run) {
  const keys = [];
  if (run.rows.some((row) => row.status === "ok" && given(row.first))) keys.push([[svg("path", { class: "revised", d: "M-3 -7h6M0 -7V7" }), svg("path", { class: "mark s-ok", d: outline("ok", 0, 6, 3) })], `${run.seen} again, from its first value`]);
  if (run.rows.some((row) => row.once)) keys.push([svg("path", { class: "mark s-ok once", d: outline("ok", 0, 0, 4) }), `${run.seen} once`]);
  return keys;
}

// A step line through [x, y] pairs that holds its value until the next.
function steps(pairs, end) {
  let path = "";
  pairs.forEach(([x, y], at) => { path += at ? `H${x.toFixed(1)}V${y.toFixed(1)}` : `M${x.toFixed(1)} ${y.toFixed(1)}`; });
  return path && end !== undefined ? `${path}H${end.toFixed(1)}` : path;
}

// Words beside a point, kept inside the frame.
function note(layer, text, x, y, frame, kind = "") {
  const width = textWidth(text) + 4;
  const right = x + 11 + width <= frame.right;
  layer.append(svg("text", {
    class: `note ${kind}`, x: right ? x + 11 : x - 11, y: Math.max(frame.top + 10, y + 4), "text-anchor": right ? "start" : "end",
  }, text));
}
