// Thousands of marks as a few elements: one path a status.

function marks(layer, points, { radius = 3.6, dim = false } = {}) {
  const size = points.length > 1500 ? radius * 0.66 : points.length > 300 ? radius * 0.82 : radius;
  for (const status of [...STATUSES].reverse()) {
    let path = "";
    for (const each of points) if (each.status === status) path += outline(status, each.x, each.y, size);
    if (path) layer.append(svg("path", { class: `mark s-${status}${dim ? " dim" : ""}${points.length > 300 ? " many" : ""}`, d: path }));
  }
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
