// The frame of a chart: axes, grid, space for labels. It is drawn again when its width changes.

const DRAWN = new Set();

// A figure whose `draw(width)` returns a pen. `label` describes it to screen readers; with `controls` it is not
// marked as an image.
function figure(draw, label, { caption = "", before = null, controls = false } = {}) {
  const host = el("div", { class: "plot" });
  const element = el("figure", {}, before, host, caption ? el("figcaption", {}, caption) : null);
  const each = {
    host,
    width: 0,
    render(width) {
      if (width < 40 || Math.abs(width - each.width) < 1) return;
      each.width = width;
      clear(host).append(fill(draw(width).root, { role: controls ? "group" : "img", "aria-label": label }, []));
    },
  };
  new ResizeObserver((entries) => {
    if (!host.isConnected) return;
    each.render(Math.floor(entries[0].contentRect.width));
  }).observe(host);
  DRAWN.add(new WeakRef(each));
  return element;
}

// The paper has another width than the window.
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

// A drawing with two axes, each {label, scale}; its pen has the scales `x` and `y` and the edges of the area between
// them. `left` is the minimum space at its left, `below` that above the labels of its lower axis.
function axes(width, height, { x, y, left = 14, right = 14, below = 0 }) {
  const top = 26;
  const base = height - (x.label ? 42 : 24) - below;
  const end = width - right;
  const ys = y.scale(base, top, Math.max((base - top) / 55, 2));
  // Labels of 300 digits must leave room for the figure.
  const begin = Math.min(Math.max(left, ...ys.ticks.map((each) => textWidth(ys.label(each)) + 12)), end * 0.6);
  const xs = x.scale(begin, end, Math.min((end - begin) / 60, 9));
  const pen = drawing(width, height, "chart");
  for (const tick of ys.ticks) {
    pen.line("grid", begin, ys(tick), end, ys(tick));
    pen.text("tick", begin - 7, ys(tick) + 4, ys.label(tick), { anchor: "end" });
  }
  let taken = -Infinity;
  for (const tick of xs.ticks) {
    pen.line("axis", xs(tick), base, xs(tick), base + 4);
    const words = xs.label(tick);
    const wide = textWidth(words);
    const middle = inside(xs(tick), wide, width);
    if (middle - wide / 2 < taken + 8) continue;
    taken = middle + wide / 2;
    pen.text("tick", middle, base + below + 17, words, { anchor: "middle" });
  }
  pen.line("axis", begin, base, end, base);
  if (x.label) pen.text("label", (begin + end) / 2, height - 6, x.label, { anchor: "middle" });
  if (y.label) pen.text("label", 0, 11, y.label);
  return Object.assign(pen, { x: xs, y: ys, left: begin, right: end, top, base });
}
