// The frame of a chart: axes, grid, room for labels. Drawn anew when its width changes.

const DRAWN = new Set();

// A figure whose `draw(width)` returns an svg element.
function figure(caption, draw, { minimum = 0, before = null, label = caption } = {}) {
  const host = el("div", { class: "plot" });
  const element = el("figure", {}, before, host, caption ? el("figcaption", {}, caption) : null);
  const each = {
    host,
    width: 0,
    render(width) {
      if (width < 40 || Math.abs(width - each.width) < 1) return;
      each.width = width;
      const made = draw(Math.max(width, minimum));
      made.setAttribute("role", "img");
      made.setAttribute("aria-label", label || "");
      clear(host).append(made);
    },
  };
  new ResizeObserver((entries) => {
    if (!host.isConnected) return;
    each.render(Math.floor(entries[0].contentRect.width));
  }).observe(host);
  DRAWN.add(new WeakRef(each));
  return element;
}

// Paper is not as wide as the window.
function onPrint(width = 680) {
  const all = (size) => {
    for (const reference of DRAWN) {
      const each = reference.deref();
      if (!each || !each.host.isConnected) { if (!each) DRAWN.delete(reference); continue; }
      each.render(size ? Math.min(size, each.host.closest(".pair, .small-multiples") ? 330 : size) : Math.floor(each.host.clientWidth));
    }
  };
  addEventListener("beforeprint", () => all(width));
  addEventListener("afterprint", () => all(0));
}

// An svg with axes. `x(from, to)` and `y(from, to)` make scales once the room is known.
function axes(width, height, { x, y, xLabel, yLabel, left = null, right = 14, top = 26, below = 0, xTicks = null }) {
  const bottom = (xLabel ? 42 : 24) + below;
  const draft = y(height - bottom, top);
  const room = left ?? Math.max(34, ...draft.ticks.map((each) => textWidth(draft.label(each)) + 12));
  const xs = x(room, width - right);
  const ys = draft;
  const root = svg("svg", { viewBox: `0 0 ${width} ${height}`, width, height, class: "chart" });
  const grid = svg("g", { class: "grid" });
  const text = svg("g", { class: "ticks" });
  for (const tick of ys.ticks) {
    const at = ys(tick);
    grid.append(svg("line", { x1: room, x2: width - right, y1: at, y2: at }));
    text.append(svg("text", { x: room - 7, y: at + 4, "text-anchor": "end" }, ys.label(tick)));
  }
  const base = height - bottom;
  let taken = -Infinity;
  for (const tick of xTicks || xs.ticks) {
    const at = xs(tick);
    const label = xs.label(tick);
    const half = textWidth(label) / 2;
    grid.append(svg("line", { class: "tick", x1: at, x2: at, y1: base, y2: base + 4 }));
    const shown = Math.min(Math.max(at, half), width - half);
    if (shown - half < taken + 8) continue;
    taken = shown + half;
    text.append(svg("text", { x: shown, y: base + below + 17, "text-anchor": "middle" }, label));
  }
  grid.append(svg("line", { class: "axis", x1: room, x2: width - right, y1: base, y2: base }));
  if (xLabel) text.append(svg("text", { class: "label", x: (room + width - right) / 2, y: height - 6, "text-anchor": "middle" }, xLabel));
  root.append(grid, text);
  if (yLabel) text.append(svg("text", { class: "label", x: 0, y: 11 }, yLabel));
  const clipped = svg("g", {});
  root.append(clipped);
  return { root, x: xs, y: ys, left: room, right: width - right, top, base, layer: clipped };
}

const textWidth = (() => {
  let context = null;
  return (text, size = 12, weight = 400) => {
    context ||= document.createElement("canvas").getContext("2d");
    context.font = `${weight} ${size}px ${getComputedStyle(document.documentElement).fontFamily}`;
    return context.measureText(text).width;
  };
})();

function shorten(text, room, size = 12, weight = 400) {
  if (textWidth(text, size, weight) <= room) return text;
  let kept = text;
  while (kept.length > 1 && textWidth(`${kept}…`, size, weight) > room) kept = kept.slice(0, -1);
  return `${kept}…`;
}
