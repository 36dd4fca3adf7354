// Tooltip and ring for the point of a chart that is nearest to the pointer.

const tip = { element: null };

function hideTip() {
  if (tip.element) tip.element.hidden = true;
}

function showTip(lines, x, y) {
  if (!tip.element) {
    tip.element = el("div", { class: "tip", role: "status" });
    document.body.append(tip.element);
  }
  clear(tip.element).append(...lines.map((line, at) => el(at ? "div" : "strong", {}, line)));
  tip.element.hidden = false;
  const { offsetWidth: width, offsetHeight: height } = tip.element;
  const left = Math.max(8, Math.min(x + 14, document.documentElement.clientWidth - width - 8));
  const top = y + 18 + height > innerHeight ? y - height - 12 : y + 18;
  tip.element.style.left = `${left}px`;
  tip.element.style.top = `${Math.max(4, top)}px`;
}

// `points` are {x, y, lines(), pick()}, in the units of the drawing; points may be added later.
function hover(pen, points, { reach = 28 } = {}) {
  const { root } = pen;
  const ring = pen.add("circle", "ring", { r: 8, visibility: "hidden" });
  const nearest = (event) => {
    const box = root.getBoundingClientRect();
    const ratio = root.viewBox.baseVal.width / box.width;
    const x = (event.clientX - box.left) * ratio;
    const y = (event.clientY - box.top) * ratio;
    let best = null;
    let least = reach * reach;
    for (const each of points) {
      const distance = (each.x - x) ** 2 + (each.y - y) ** 2;
      if (distance < least) { least = distance; best = each; }
    }
    return best;
  };
  const move = (event) => {
    const found = nearest(event);
    root.classList.toggle("hit", Boolean(found));
    ring.setAttribute("visibility", found ? "visible" : "hidden");
    if (!found) { hideTip(); return; }
    ring.setAttribute("cx", found.x);
    ring.setAttribute("cy", found.y);
    showTip(found.lines(), event.clientX, event.clientY);
  };
  root.addEventListener("pointermove", move);
  root.addEventListener("pointerdown", move);
  root.addEventListener("pointerleave", () => { ring.setAttribute("visibility", "hidden"); hideTip(); });
  root.addEventListener("click", (event) => {
    const found = nearest(event);
    if (found && found.pick) { hideTip(); found.pick(); }
  });
}
