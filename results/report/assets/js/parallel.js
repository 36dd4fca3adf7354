// Parallel coordinates: every trial a line through the values of its knobs, ending at its throughput.

function ordered(values) {
  return [...values].sort((a, b) => (typeof a === typeof b ? (a < b ? -1 : a > b ? 1 : 0) : typeof a < typeof b ? -1 : 1));
}

function knobAxis(run, name) {
  const all = run.rows.map((row) => row.knobs[name]);
  const values = ordered(new Set(all.filter((each) => each !== null && each !== undefined)));
  const missing = all.some((each) => each === null || each === undefined);
  const numeric = values.every((each) => typeof each === "number");
  const declared = (run.space.knobs.find((each) => each.name === name) || {}).values || [];
  const rank = (each) => (declared.includes(each) ? declared.indexOf(each) : declared.length);
  if (!numeric) values.sort((a, b) => rank(a) - rank(b));
  if (numeric && values.length > 14) {
    const scale = linear(values[0], values.at(-1), 0, 1, 5, { tight: true });
    return { name, labels: scale.ticks.map((each) => [scale(each), scale.label(each), null]), place: (value) => (given(value) ? scale(value) : 0) };
  }
  const listed = missing ? [...values, null] : values;
  const at = new Map(listed.map((each, index) => [each, listed.length > 1 ? index / (listed.length - 1) : 0.5]));
  const shown = listed.length > 24 ? listed.filter((each, index) => index % Math.ceil(listed.length / 24) === 0) : listed;
  return { name, labels: shown.map((each) => [at.get(each), each === null ? "not set" : knob(each), each]), place: (value) => at.get(value ?? null) ?? 0.5 };
}

const RAMP = 9;

function parallel(run) {
  const names = run.varying.filter((name) => !run.derived.has(name));
  if (!names.length || run.rows.length < 2) return null;
  const effect = new Map(run.effects.knobs.map((each, at) => [each.name, at]));
  names.sort((a, b) => (effect.get(b) ?? -1) - (effect.get(a) ?? -1));
  const good = run.rows.filter((row) => row.status === "ok");
  const speeds = extent(good.map((row) => row.throughput));
  // Kept with the run, so that a redraw while it grows does not let go of it.
  const chosen = (run.ui.chosen ||= new Map());
  let plot = null;
  const draw = (width) => {
    const axesList = names.map((name) => knobAxis(run, name));
    if (speeds) {
      const scale = linear(speeds[0], speeds[1], 0, 1, 5, { tight: true });
      axesList.push({ name: run.unit || "throughput", speed: true, labels: scale.ticks.map((each) => [scale(each), scale.label(each), null]), place: scale });
    }
    // On a narrow window the axes lie on top of one another instead of side by side.
    const flat = width < axesList.length * 72;
    const gap = (width - 120) / Math.max(axesList.length - 1, 1);
    // Names too long to stand side by side stand on two lines in turn.
    const staggered = !flat && axesList.some((axis) => textWidth(axis.name) > gap - 12);
    const height = flat ? axesList.length * 74 + 14 : 380;
    const root = svg("svg", { viewBox: `0 0 ${width} ${height}`, width, height, class: "chart parallel" });
    const at = (index, share) => (flat
      ? [18 + share * (width - 36), 44 + index * 74]
      : [46 + index * gap, height - 22 - share * (height - 74)]);
    const matches = (row) => [...chosen].every(([name, value]) => (row.knobs[name] ?? null) === value);
    const buckets = Array.from({ length: RAMP + 2 }, () => []);
    const ends = [];
    for (const row of run.rows) {
      if (row.status === "skipped") continue;
      const line = axesList.map((axis, index) => (axis.speed ? (row.status === "ok" ? at(index, axis.place(row.throughput)) : null) : at(index, axis.place(row.knobs[axis.name])))).filter(Boolean);
      const fit = matches(row);
      const share = row.status === "ok" && speeds[1] > speeds[0] ? (row.throughput - speeds[0]) / (speeds[1] - speeds[0]) : 1;
      const bucket = !fit ? 0 : row.status !== "ok" ? 1 : 2 + Math.min(RAMP - 1, Math.floor(share * RAMP));
      buckets[bucket].push(`M${line.map((each) => `${each[0].toFixed(1)} ${each[1].toFixed(1)}`).join("L")}`);
      if (fit && row.status === "ok") ends.push(point(run, row, ...line.at(-1)));
    }
    const many = run.rows.length > 400;
    buckets.forEach((lines, index) => {
      if (!lines.length) return;
      const kind = index === 0 ? "out" : index === 1 ? "failed" : `q${index - 2}`;
      root.append(svg("path", { class: `line ${kind}${many ? " many" : ""}`, d: lines.join("") }));
    });
    const winner = run.winner && run.byTrial.get(run.winner.trial);
    if (winner && matches(winner)) {
      const line = axesList.map((axis, index) => at(index, axis.speed ? axis.place(winner.throughput) : axis.place(winner.knobs[axis.name])));
      root.append(svg("path", { class: "line winner", d: `M${line.map((each) => each.map((v) => v.toFixed(1)).join(" ")).join("L")}` }));
      root.append(svg("path", { class: "star", d: star(...line.at(-1), 9) }));
    }
    axesList.forEach((axis, index) => {
      const [x0, y0] = at(index, 0);
      const [x1, y1] = at(index, 1);
      root.append(svg("line", { class: "axis", x1: x0, x2: x1, y1: y0, y2: y1 }));
      const room = flat ? width - 20 : Math.max(gap - 8, 60);
      const name = shorten(axis.name, staggered ? gap * 2 - 16 : room, 12);
      const middle = Math.max(x0, textWidth(name) / 2 + 4);
      root.append(svg("text", { class: "label axis-name", x: flat ? 4 : middle, y: flat ? y0 - 24 : staggered && index % 2 ? 32 : 14, "text-anchor": flat ? "start" : "middle" },
        svg("title", {}, axis.name), name));
      let taken = -Infinity;
      for (const [share, text, value] of axis.labels) {
        const [x, y] = at(index, share);
        const cut = shorten(text, flat ? 120 : Math.max(room - 12, 40), 11);
        const half = textWidth(cut, 11) / 2;
        const middleX = flat ? Math.min(Math.max(x, half + 2), width - half - 2) : x;
        if (flat && middleX - half < taken + 5) continue;
        taken = middleX + half;
        const on = value !== null && chosen.get(axis.name) === value;
        const label = svg("text", { class: `value${on ? " on" : ""}${value !== null ? " choice" : ""}`, x: flat ? middleX : x + 7, y: flat ? y + 18 : y + 4, "text-anchor": flat ? "middle" : "start" }, cut);
        if (value !== null && !axis.speed) {
          label.setAttribute("tabindex", "0");
          label.setAttribute("role", "button");
          label.setAttribute("aria-pressed", String(on));
          const toggle = () => {
            if (on) chosen.delete(axis.name); else chosen.set(axis.name, value);
            plot.replaceChildren(draw(width));
          };
          label.addEventListener("click", toggle);
          label.addEventListener("keydown", (event) => { if (event.key === "Enter" || event.key === " ") { event.preventDefault(); toggle(); } });
        }
        root.append(label);
      }
    });
    hover(root, ends, { reach: 18 });
    return root;
  };
  const made = figure("", draw, { label: "parallel coordinates of the knobs and the throughput" });
  plot = made.querySelector(".plot");
  return section("parallel", "Configurations and what came of them",
    "Each line is a trial, from its knobs to its throughput; its colour tells how fast it was. Dashed ones did not run to the end. Press a value to keep only the trials that have it, press it again to let go. The knobs that matter most stand nearest the throughput.",
    made, el("p", { class: "legend" }, el("span", {}, "slow ", ramp(), " fast"), el("span", {}, svg("svg", { viewBox: "0 0 30 10", width: 30, height: 10, "aria-hidden": "true" }, svg("path", { class: "line failed", d: "M0 5H30" })), " failed"), run.winner ? el("span", {}, svg("svg", { viewBox: "0 0 30 10", width: 30, height: 10, "aria-hidden": "true" }, svg("path", { class: "line winner", d: "M0 5H30" })), " winner") : null));
}

function ramp() {
  return svg("svg", { viewBox: `0 0 ${RAMP * 10} 10`, width: 90, height: 10, "aria-hidden": "true" },
    Array.from({ length: RAMP }, (unused, at) => svg("path", { class: `line q${at} thick`, d: `M${at * 10} 5h10` })));
}
