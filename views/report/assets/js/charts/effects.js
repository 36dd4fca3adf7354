// The effect of each knob: its measured throughputs, and its effect with the others held equal.

const SLANT = Math.SQRT1_2;

function importance(share) {
  return share < 0.001 ? `< ${percent(0.001)}` : percent(share);
}

function importanceChart(run) {
  const known = run.effects.knobs.filter((each) => given(each.importance));
  if (!known.length) return null;
  const rest = Math.max(0, 1 - run.effects.explained);
  const bars = [...known.map((each) => [each.name, each.importance, "fill-effect"]), ["not explained", rest, "fill-rest strong"]];
  return figure((width) => {
    const left = Math.min(Math.max(...bars.map(([name]) => textWidth(name))) + 12, width * 0.6);
    const pen = drawing(width, bars.length * 26 + 6, "chart");
    const most = Math.max(...bars.map(([, share]) => share), 1e-9);
    bars.forEach(([name, share, kind], at) => {
      const y = at * 26 + 4;
      const long = Math.max((share / most) * (width - left - 56), 1);
      pen.text("tick strong", left - 8, y + 14, shorten(name, left - 10), { anchor: "end", whole: name });
      pen.rect(kind, left, y + 2, long, 16, 2);
      pen.text("tick", left + long + 6, y + 14, importance(share));
    });
    return pen;
  }, "share of the variation of throughput each knob explains");
}

// Layout of the labels of a knob's values: in a row, or slanted if they are too wide. A slanted label extends down
// and to the left.
function placeLabels(values, width, usual) {
  const counts = values.map((each) => each.counts.ok || "none");
  const wide = (each) => textWidth(each, 11);
  if (!values.some((each) => wide(each.label) > (width - usual - 4) / values.length - 6)) {
    return { slanted: false, labels: values.map((each) => each.label), counts, left: usual, depth: 18 };
  }
  const labels = values.map((each, at) => `${shorten(each.label, width * 0.62, 11)} (${counts[at]})`);
  const reach = labels.map((each, at) => {
    const share = (at + 0.5) / labels.length;
    return (wide(each) * SLANT + 2 - (width - 4) * share) / (1 - share);
  });
  return { slanted: true, labels, counts, left: Math.max(usual, ...reach), depth: Math.max(...labels.map(wide)) * SLANT + 14 };
}

// Box, whisker and median of a value.
function box(frame, value, x, half) {
  const y = frame.y;
  frame.line("whisker", x, y(value.min), x, y(value.max));
  frame.rect("box", x - half, y(value.high), half * 2, Math.max(y(value.low) - y(value.high), 1.5));
  frame.line("median", x - half, y(value.median), x + half, y(value.median));
}

// Description of a value.
function valueLines(run, name, value) {
  const ran = value.counts.ok || 0;
  const lost = Object.entries(value.counts).filter(([status]) => status !== "ok");
  return [
    `${name} = ${value.label}`,
    `${plural(ran, "trial")} ok${lost.map(([status, count]) => `, ${count} ${status}`).join("")}`,
    given(value.median) ? `median ${rate(value.median, run.unit)}, quartiles ${number(value.low)} to ${number(value.high)}, all ${number(value.min)} to ${number(value.max)}` : "",
    given(value.effect) ? `with the other knobs equal: × ${number(value.effect, 3)} of the average (${number(value.effect_low, 3)} to ${number(value.effect_high, 3)})` : "",
  ].filter(Boolean);
}

// An effect is a multiple of the throughput `center`.
function effectChart(run, shown, speeds, center) {
  return figure((width) => {
    const { ticks, label } = speeds(0, 1, 3);
    const usual = Math.max(34, ...ticks.map((each) => textWidth(label(each)) + 12));
    const { slanted, labels, counts, left, depth } = placeLabels(shown.values, width, usual);
    const frame = axes(width, 196 + depth, { x: { label: "", scale: bands(shown.values.length) }, y: { label: run.unit || "throughput", scale: (from, to) => speeds(from, to, 3) }, left, right: 4, below: depth });
    const points = [];
    const line = [];
    shown.values.forEach((value, at) => {
      const x = frame.x(at + 0.5);
      if (given(value.median)) box(frame, value, x, Math.min(frame.x.size * 0.32, 16));
      if (given(value.effect)) {
        const y = (factor) => frame.y(Math.min(Math.max(center * factor, frame.y.begin), frame.y.end));
        frame.line("effect", x, y(value.effect_low), x, y(value.effect_high));
        line.push([x, y(value.effect)]);
      }
      points.push({ x, y: given(value.median) ? frame.y(value.median) : frame.base - 8, lines: () => valueLines(run, shown.name, value) });
      if (slanted) {
        frame.text("tick small", x + 4, frame.base + 14, labels[at], { anchor: "end", turn: -45, whole: value.label });
      } else {
        frame.text("tick small", x, frame.base + 18, labels[at], { anchor: "middle" });
        frame.text("count", x, frame.base + 34, counts[at], { anchor: "middle" });
      }
    });
    frame.path("effect-line", through(line));
    for (const [x, y] of line) frame.dot("effect-dot", x, y, 3.5);
    hover(frame, points, { reach: 60 });
    return frame;
  }, `throughput by ${shown.name}`, { before: el("h3", {}, shown.name, given(shown.importance) ? el("span", { class: "aside" }, ` ${importance(shown.importance)}`) : null) });
}

function effects(run) {
  const knobs = run.effects.knobs;
  if (!knobs.length || !run.effects.count) return null;
  const good = run.rows.filter((row) => row.status === "ok" && row.throughput > 0).map((row) => row.throughput);
  const center = Math.exp(good.reduce((sum, each) => sum + Math.log(each), 0) / good.length);
  const [, high] = extent(good);
  const known = given(run.effects.explained) && run.effects.explained > 0;
  const why = known
    ? `The bars show the share of the variation of (log) throughput that each knob explains by itself, checked by leaving out each of the ${plural(run.effects.count, "successful trial")} in turn; the rest is interaction between knobs, and noise.`
    : `The ${plural(run.effects.count, "successful trial")} are too few, or too similar, for the importance of each knob; below are the ${run.seen} throughputs.`;
  return section("effects", "Effect of each knob", why, importanceChart(run),
    el("p", { class: "lead" }, "For each value: the box is the middle half of the throughputs, the line in it the median, the whisker their full range; the number below the value is their count. The connected dots are the effect with the other knobs equal, ± one standard error."),
    el("div", { class: "small-multiples" }, knobs.map((each) => effectChart(run, each, fromZero(high * 1.02), center))));
}
