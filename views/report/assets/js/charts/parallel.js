// Parallel coordinates: each trial is a line through the values of its knobs to its throughput.

function ordered(values) {
  return [...values].sort((a, b) => (typeof a === typeof b ? (a < b ? -1 : a > b ? 1 : 0) : typeof a < typeof b ? -1 : 1));
}

// An axis: its name, the position of a value on it, 0 to 1, and its labels as [position, text, value]; ticks of a scale
// have no value and cannot be clicked.
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
    return { name, labels: scale.ticks.map((each) => [scale(each), scale.label(each)]), place: (value) => (given(value) ? scale(value) : 0) };
  }
  const listed = missing ? [...values, null] : values;
  const at = new Map(listed.map((each, index) => [each, listed.length > 1 ? index / (listed.length - 1) : 0.5]));
  const shown = listed.length > 24 ? listed.filter((each, index) => index % Math.ceil(listed.length / 24) === 0) : listed;
  return { name, labels: shown.map((each) => [at.get(each), each === null ? "not set" : knob(each), each]), place: (value) => at.get(value ?? null) ?? 0.5 };
}

const RAMP = 9;
const NAME = [12, 550];
const VALUE = [11, 650];
const NAME_ROW = 18;
const VALUE_ROW = 14;

// Axes side by side: the position of each and the row of its name; null if their texts do not fit.
function sideBySide(axesList, width) {
  const widest = (axis) => Math.max(0, ...axis.labels.map(([, text]) => textWidth(text, ...VALUE))) + 7;
  const left = 14;
  const gap = (width - left - widest(axesList.at(-1)) - 8) / Math.max(axesList.length - 1, 1);
  if (axesList.slice(0, -1).some((axis) => widest(axis) + 8 > gap)) return null;
  const names = axesList.map((axis, index) => {
    const wide = textWidth(axis.name, ...NAME);
    return [inside(left + index * gap, wide, width, 3), wide];
  });
  const rows = inRows(names, 3);
  if (!rows) return null;
  const top = 34 + Math.max(...rows) * NAME_ROW;
  const height = top + 328;
  return {
    height,
    at: (index, share) => [left + index * gap, height - 22 - share * (height - 22 - top)],
    name: (index) => ({ x: names[index][0], y: 14 + rows[index] * NAME_ROW, anchor: "middle" }),
    labels: (index) => axesList[index].labels.map(([share, text, value]) => ({ share, text, value, dx: 7, dy: 4, anchor: "start" })),
  };
}

// Axes one below the other, for a narrow window: each is as high as its values need.
function belowOneAnother(axesList, width) {
  const tops = [];
  const labels = [];
  let y = 0;
  for (const axis of axesList) {
    const listed = axis.labels.map(([share, text, value]) => {
      const cut = shorten(text, width - 10, ...VALUE);
      const wide = textWidth(cut, ...VALUE);
      const x = 18 + share * (width - 36);
      const middle = inside(x, wide, width, 3);
      return { share, text: cut, value, anchor: "middle", dx: middle - x, place: [middle, wide] };
    });
    // Ticks of a scale may be left out, but values that can be clicked may not.
    const rows = inRows(listed.map((each) => each.place), Infinity, 5);
    const shown = listed.map((each, at) => ({ ...each, dy: 18 + rows[at] * VALUE_ROW })).filter((each, at) => each.value !== undefined || rows[at] === 0);
    tops.push(y + 44);
    labels.push(shown);
    y += 74 + VALUE_ROW * Math.max(0, ...shown.map((each) => (each.dy - 18) / VALUE_ROW));
  }
  return {
    height: y + 14,
    at: (index, share) => [18 + share * (width - 36), tops[index]],
    name: (index) => ({ x: 4, y: tops[index] - 24, anchor: "start" }),
    labels: (index) => labels[index],
  };
}

// The varying knobs, the most important ones last, then the throughput if a trial succeeded.
function parallelAxes(run, speeds) {
  const effect = new Map(run.effects.knobs.map((each, at) => [each.name, at]));
  const names = run.varying.filter((name) => !run.derived.has(name)).sort((a, b) => (effect.get(b) ?? -1) - (effect.get(a) ?? -1));
  const out = names.map((name) => knobAxis(run, name));
  if (!out.length || !speeds) return out;
  const scale = linear(...speeds, 0, 1, 5, { tight: true });
  return [...out, { name: run.unit || "throughput", speed: true, labels: scale.ticks.map((each) => [scale(each), scale.label(each)]), place: scale }];
}

// The trials as few paths, grouped by speed; adds their end points.
function parallelLines(run, pen, axesList, speeds, { at }, ends) {
  const matches = (row) => [...run.ui.chosen].every(([name, value]) => (row.knobs[name] ?? null) === value);
  const pairs = (row) => axesList.filter((axis) => !axis.speed || row.status === "ok").map((axis, index) => at(index, axis.place(axis.speed ? row.throughput : row.knobs[axis.name])));
  const kinds = ["out", "failed", ...Array.from({ length: RAMP }, (unused, share) => `q${share}`)];
  const paths = Object.fromEntries(kinds.map((each) => [each, []]));
  for (const row of run.rows) {
    if (row.status === "skipped") continue;
    const line = pairs(row);
    const fit = matches(row);
    const share = row.status === "ok" && speeds[1] > speeds[0] ? (row.throughput - speeds[0]) / (speeds[1] - speeds[0]) : 1;
    paths[!fit ? "out" : row.status !== "ok" ? "failed" : `q${Math.min(RAMP - 1, Math.floor(share * RAMP))}`].push(through(line));
    if (fit && row.status === "ok") ends.push(point(run, row, ...line.at(-1)));
  }
  for (const kind of kinds) pen.path(`line ${kind}${run.rows.length > 400 ? " many" : ""}`, paths[kind].join(""));
  const winner = run.winner && run.byTrial.get(run.winner.trial);
  if (winner && matches(winner)) {
    pen.path("line winner", through(pairs(winner)));
    winnerMark(pen, ...pairs(winner).at(-1));
  }
}

// Makes a value clickable, by pointer and keyboard.
function pressable(label, name, press) {
  label.classList.add("choice");
  fill(label, {
    tabindex: "0", role: "button", "data-knob": name, onclick: press,
    onkeydown: (event) => { if (event.key === "Enter" || event.key === " ") { event.preventDefault(); press(); } },
  }, []);
}

function parallelChart(run, axesList, speeds) {
  const { chosen } = run.ui;
  return figure((width) => {
    const layout = sideBySide(axesList, width) || belowOneAnother(axesList, width);
    const pen = drawing(width, layout.height, "chart parallel");
    const lines = pen.group("lines");
    const ends = [];
    const choices = [];
    // Only the lines are drawn again, so that the clicked value keeps the focus.
    const redraw = () => {
      clear(lines.root);
      ends.length = 0;
      parallelLines(run, lines, axesList, speeds, layout, ends);
      for (const [label, name, value] of choices) label.setAttribute("aria-pressed", String(chosen.get(name) === value));
    };
    const press = (name, value) => {
      if (chosen.get(name) === value) chosen.delete(name); else chosen.set(name, value);
      redraw();
    };
    axesList.forEach((axis, index) => {
      pen.line("axis", ...layout.at(index, 0), ...layout.at(index, 1));
      const { x, y, anchor } = layout.name(index);
      pen.text("label axis-name", x, y, shorten(axis.name, width - 8, ...NAME), { anchor, whole: axis.name });
      for (const { share, text, value, dx, dy, anchor: side } of layout.labels(index)) {
        const [atX, atY] = layout.at(index, share);
        const label = pen.text("axis-value", atX + dx, atY + dy, text, { anchor: side });
        if (value === undefined) continue;
        pressable(label, axis.name, () => press(axis.name, value));
        choices.push([label, axis.name, value]);
      }
    });
    redraw();
    hover(pen, ends, { reach: 18 });
    return pen;
  }, "parallel coordinates of the knobs and the throughput", { controls: true });
}

function parallel(run) {
  // Stored with the run, so that the selection survives a redraw.
  run.ui.chosen ||= new Map();
  const speeds = extent(run.rows.filter((row) => row.status === "ok").map((row) => row.throughput));
  const axesList = parallelAxes(run, speeds);
  if (!axesList.length || run.rows.length < 2) return null;
  const ramp = picture(90, 10, ...Array.from({ length: RAMP }, (unused, at) => [`line q${at} thick`, `M${at * 10 - 45} 0h10`]));
  return section("parallel", "Configurations and their outcomes",
    `Each line is a trial, from its knobs to its throughput; its colour shows its speed. Dashed trials failed. Click a value to show only the trials with it, click it again to show all. The most important knobs are nearest to the throughput. ${whyAbove(run)}`.trim(),
    parallelChart(run, axesList, speeds), legend([["slow ", ramp], "fast"], lineKey("line failed", "failed"), ...(run.winner ? [lineKey("line winner", "winner")] : [])));
}
