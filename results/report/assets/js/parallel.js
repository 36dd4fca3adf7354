// Parallel coordinates: every trial a line through the values of its knobs, ending at its throughput.

function ordered(values) {
  return [...values].sort((a, b) => (typeof a === typeof b ? (a < b ? -1 : a > b ? 1 : 0) : typeof a < typeof b ? -1 : 1));
}

// An axis: its name, where a value stands on it, 0 to 1, and its labels as [place, text, value]; ticks of a scale are of
// no value, so that they cannot be pressed.
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

// In how many rows, at most `most`, texts of these places and widths stand without touching; a row for each, or null.
function inRows(texts, most, gap = 8) {
  const ends = [];
  const rows = texts.map(([middle, width]) => {
    const found = ends.findIndex((end) => middle - width / 2 >= end + gap);
    const row = found < 0 ? ends.length : found;
    ends[row] = middle + width / 2;
    return row;
  });
  return ends.length <= most ? rows : null;
}

function kept(middle, width, room) {
  return Math.min(Math.max(middle, width / 2 + 3), Math.max(room - width / 2 - 3, width / 2 + 3));
}

// Axes side by side: where each stands and in which row its name; null where their texts do not fit like that.
function sideBySide(axesList, width) {
  const widest = (axis) => Math.max(0, ...axis.labels.map(([, text]) => textWidth(text, ...VALUE))) + 7;
  const left = 14;
  const gap = (width - left - widest(axesList.at(-1)) - 8) / Math.max(axesList.length - 1, 1);
  if (axesList.slice(0, -1).some((axis) => widest(axis) + 8 > gap)) return null;
  const names = axesList.map((axis, index) => {
    const wide = textWidth(axis.name, ...NAME);
    return [kept(left + index * gap, wide, width), wide];
  });
  const rows = inRows(names, 3);
  if (!rows) return null;
  const top = 34 + Math.max(...rows) * NAME_ROW;
  const height = top + 328;
  return {
    height,
    at: (index, share) => [left + index * gap, height - 22 - share * (height - 22 - top)],
    name: (index) => ({ x: names[index][0], y: 14 + rows[index] * NAME_ROW, "text-anchor": "middle" }),
    labels: (index) => axesList[index].labels.map(([share, text, value]) => ({ share, text, value, dx: 7, dy: 4, anchor: "start" })),
  };
}

// Axes below one another, for a window too narrow for their texts side by side: each is as high as its values need.
function belowOneAnother(axesList, width) {
  const tops = [];
  const labels = [];
  let y = 0;
  for (const axis of axesList) {
    const listed = axis.labels.map(([share, text, value]) => {
      const cut = shorten(text, width - 10, ...VALUE);
      const wide = textWidth(cut, ...VALUE);
      const x = 18 + share * (width - 36);
      return { share, text: cut, value, anchor: "middle", dx: kept(x, wide, width) - x, place: [kept(x, wide, width), wide] };
    });
    // Of a scale some ticks may be left out, but every value that can be pressed has its place.
    const rows = inRows(listed.map((each) => each.place), Infinity, 5);
    const shown = listed.map((each, at) => ({ ...each, dy: 18 + rows[at] * VALUE_ROW })).filter((each, at) => each.value !== undefined || rows[at] === 0);
    tops.push(y + 44);
    labels.push(shown);
    y += 74 + VALUE_ROW * Math.max(0, ...shown.map((each) => (each.dy - 18) / VALUE_ROW));
  }
  return {
    height: y + 14,
    at: (index, share) => [18 + share * (width - 36), tops[index]],
    name: (index) => ({ x: 4, y: tops[index] - 24, "text-anchor": "start" }),
    labels: (index) => labels[index],
  };
}

function parallel(run) {
  const names = run.varying.filter((name) => !run.derived.has(name));
  if (!names.length || run.rows.length < 2) return null;
  const effect = new Map(run.effects.knobs.map((each, at) => [each.name, at]));
  names.sort((a, b) => (effect.get(b) ?? -1) - (effect.get(a) ?? -1));
  const good = run.rows.filter((row) => row.status === "ok");
  const speeds = extent(good.map((row) => row.throughput));
  const axesList = names.map((name) => knobAxis(run, name));
  if (speeds) {
    const scale = linear(speeds[0], speeds[1], 0, 1, 5, { tight: true });
    axesList.push({ name: run.unit || "throughput", speed: true, labels: scale.ticks.map((each) => [scale(each), scale.label(each)]), place: scale });
  }
  // Kept with the run, so that a redraw while it grows does not let go of it.
  const chosen = (run.ui.chosen ||= new Map());
  const matches = (row) => [...chosen].every(([name, value]) => (row.knobs[name] ?? null) === value);
  const pathOf = (line) => `M${line.map((each) => `${each[0].toFixed(1)} ${each[1].toFixed(1)}`).join("L")}`;
  let plot = null;

  // The trials as few paths, by how fast they were; returns the points at their ends.
  function drawLines(root, { at }) {
    const through = (row) => axesList.map((axis, index) => (axis.speed ? (row.status === "ok" ? at(index, axis.place(row.throughput)) : null) : at(index, axis.place(row.knobs[axis.name])))).filter(Boolean);
    const buckets = Array.from({ length: RAMP + 2 }, () => []);
    const ends = [];
    for (const row of run.rows) {
      if (row.status === "skipped") continue;
      const line = through(row);
      const fit = matches(row);
      const share = row.status === "ok" && speeds[1] > speeds[0] ? (row.throughput - speeds[0]) / (speeds[1] - speeds[0]) : 1;
      const bucket = !fit ? 0 : row.status !== "ok" ? 1 : 2 + Math.min(RAMP - 1, Math.floor(share * RAMP));
      buckets[bucket].push(pathOf(line));
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
      const line = through(winner);
      root.append(svg("path", { class: "line winner", d: pathOf(line) }), svg("path", { class: "star", d: star(...line.at(-1), 9) }));
    }
    return ends;
  }

  function choice(label, axis, value, width) {
    const on = chosen.get(axis.name) === value;
    const toggle = () => {
      if (on) chosen.delete(axis.name); else chosen.set(axis.name, value);
      plot.replaceChildren(draw(width));
    };
    fill(label, {
      class: `axis-value choice${on ? " on" : ""}`, tabindex: "0", role: "button", "data-knob": axis.name, "aria-pressed": String(on), onclick: toggle,
      onkeydown: (event) => { if (event.key === "Enter" || event.key === " ") { event.preventDefault(); toggle(); } },
    }, []);
  }

  function draw(width) {
    const layout = sideBySide(axesList, width) || belowOneAnother(axesList, width);
    const root = svg("svg", { viewBox: `0 0 ${width} ${layout.height}`, width, height: layout.height, class: "chart parallel" });
    const ends = drawLines(root, layout);
    axesList.forEach((axis, index) => {
      const [x0, y0] = layout.at(index, 0);
      const [x1, y1] = layout.at(index, 1);
      root.append(svg("line", { class: "axis", x1: x0, x2: x1, y1: y0, y2: y1 }));
      const name = shorten(axis.name, width - 8, ...NAME);
      root.append(svg("text", { class: "label axis-name", ...layout.name(index) }, name === axis.name ? null : svg("title", {}, axis.name), name));
      for (const { share, text, value, dx, dy, anchor } of layout.labels(index)) {
        const [x, y] = layout.at(index, share);
        const label = svg("text", { class: "axis-value", x: x + dx, y: y + dy, "text-anchor": anchor }, text);
        if (value !== undefined) choice(label, axis, value, width);
        root.append(label);
      }
    });
    hover(root, ends, { reach: 18 });
    return root;
  }

  const made = figure("", draw, { label: "parallel coordinates of the knobs and the throughput" });
  plot = made.querySelector(".plot");
  const key = (kind, text) => el("span", {}, svg("svg", { viewBox: "0 0 30 10", width: 30, height: 10, "aria-hidden": "true" }, svg("path", { class: `line ${kind}`, d: "M0 5H30" })), ` ${text}`);
  return section("parallel", "Configurations and what came of them",
    `Each line is a trial, from its knobs to its throughput; its colour tells how fast it was. Dashed ones did not run to the end. Press a value to keep only the trials that have it, press it again to let go. The knobs that matter most stand nearest the throughput. ${whyAbove(run)}`.trim(),
    made, el("p", { class: "legend" }, el("span", {}, "slow ", ramp(), " fast"), key("failed", "failed"), run.winner ? key("winner", "winner") : null));
}

function ramp() {
  return svg("svg", { viewBox: `0 0 ${RAMP * 10} 10`, width: 90, height: 10, "aria-hidden": "true" },
    Array.from({ length: RAMP }, (unused, at) => svg("path", { class: `line q${at} thick`, d: `M${at * 10} 5h10` })));
}
