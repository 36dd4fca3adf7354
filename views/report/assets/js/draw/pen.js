// The drawing layer of both pages: nothing else makes svg. It draws lines, marks and texts and knows nothing of their meaning.

const SVG = "http://www.w3.org/2000/svg";

// Draws into an svg element. `kind` is a class that style.css defines for light, dark and print.
class Pen {
  constructor(root) {
    this.root = root;
  }

  add(tag, kind, attributes, ...children) {
    const made = fill(document.createElementNS(SVG, tag), { class: kind, ...attributes }, children);
    this.root.append(made);
    return made;
  }

  // A separate layer, for example one that is drawn again without the rest.
  group(kind) { return new Pen(this.add("g", kind)); }

  line(kind, x1, y1, x2, y2) { return this.add("line", kind, { x1, y1, x2, y2 }); }

  path(kind, d) { return d ? this.add("path", kind, { d }) : null; }

  rect(kind, x, y, width, height, rx = null) { return this.add("rect", kind, { x, y, width, height, rx }); }

  dot(kind, cx, cy, r) { return this.add("circle", kind, { cx, cy, r }); }

  // `anchor` is start, middle or end; `whole` the full text if `words` is shortened.
  text(kind, x, y, words, { anchor = null, turn = null, whole = words } = {}) {
    return this.add("text", kind, { x, y, "text-anchor": anchor, transform: turn === null ? null : `rotate(${turn} ${x} ${y})` },
      whole === words ? null : fill(document.createElementNS(SVG, "title"), {}, [whole]), words);
  }
}

// A drawing of that many pixels, and the pen for it. `x` and `y` are of its upper left corner.
function drawing(width, height, kind, { x = 0, y = 0, ...attributes } = {}) {
  return new Pen(fill(document.createElementNS(SVG, "svg"), { class: kind, viewBox: `${x} ${y} ${width} ${height}`, width, height, ...attributes }, []));
}

// A small picture beside a text, from [kind, path] around its centre.
function picture(width, height, ...paths) {
  const pen = drawing(width, height, null, { x: -width / 2, y: -height / 2, "aria-hidden": "true" });
  for (const [kind, d] of paths) pen.path(kind, d);
  return pen.root;
}

// A legend from [picture, text].
function legend(...entries) {
  return el("p", { class: "legend" }, entries.map(([shown, words]) => el("span", {}, shown, " ", words)));
}

// A bar of shares from {kind, size}, as wide as its container.
function shareBar(parts, label) {
  const pen = drawing(100, 10, "bar-chart", { width: null, height: null, preserveAspectRatio: "none", role: "img", "aria-label": label });
  const total = parts.reduce((sum, each) => sum + each.size, 0) || 1;
  let at = 0;
  for (const { kind, size } of parts) {
    if (!(size > 0)) continue;
    const width = (size / total) * 100;
    pen.rect(kind, at, 0, Math.max(width, 0.4), 10);
    at += width;
  }
  return pen.root;
}
