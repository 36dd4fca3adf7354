// Marks and lines as paths: one element for thousands of them.

// Outlines around x, y, about as large as a circle of radius r.
const SHAPES = {
  dot: (at, r) => `M${at(-r, 0)}a${r} ${r} 0 1 0 ${2 * r} 0a${r} ${r} 0 1 0 ${-2 * r} 0Z`,
  cross: (at, r) => `M${at(-r, -r)}L${at(r, r)}M${at(-r, r)}L${at(r, -r)}`,
  triangle: (at, r) => `M${at(0, -r * 1.2)}L${at(r * 1.15, r * 0.9)}L${at(-r * 1.15, r * 0.9)}Z`,
  square: (at, r) => `M${at(-r, -r)}L${at(r, -r)}L${at(r, r)}L${at(-r, r)}Z`,
  diamond: (at, r) => `M${at(0, -r * 1.35)}L${at(r * 1.35, 0)}L${at(0, r * 1.35)}L${at(-r * 1.35, 0)}Z`,
  star: (at, r) => `M${Array.from({ length: 10 }, (unused, i) => {
    const size = i % 2 ? r * 0.45 : r;
    const angle = (Math.PI * i) / 5 - Math.PI / 2;
    return at(size * Math.cos(angle), size * Math.sin(angle));
  }).join("L")}Z`,
};

function outline(shape, x, y, r) {
  return SHAPES[shape]((dx, dy) => `${(x + dx).toFixed(1)} ${(y + dy).toFixed(1)}`, r);
}

// Points of {x, y, kind} as marks, the kinds in the order of `shapes`, a Map of kind to shape. Many are drawn smaller.
function marks(pen, points, shapes, { radius = 3.6, look = "" } = {}) {
  const size = points.length > 1500 ? radius * 0.66 : points.length > 300 ? radius * 0.82 : radius;
  for (const [kind, shape] of shapes) {
    let path = "";
    for (const each of points) if (each.kind === kind) path += outline(shape, each.x, each.y, size);
    pen.path(`mark ${kind} ${look}${points.length > 300 ? " many" : ""}`, path);
  }
}

// A line through [x, y] pairs.
function through(pairs) {
  return pairs.length ? `M${pairs.map(([x, y]) => `${x.toFixed(1)} ${y.toFixed(1)}`).join("L")}` : "";
}

// A line through [x, y] pairs that holds its height until the next, and the last one's until `end`.
function steps(pairs, end) {
  let path = "";
  pairs.forEach(([x, y], at) => { path += at ? `H${x.toFixed(1)}V${y.toFixed(1)}` : `M${x.toFixed(1)} ${y.toFixed(1)}`; });
  return path && end !== undefined ? `${path}H${end.toFixed(1)}` : path;
}
