// What each knob does: its throughputs as they were measured, and its effect with the others held equal.

const SLANT = Math.SQRT1_2;

function importance(share) {
  return share < 0.001 ? `< ${percent(0.001)}` : percent(share);
}

function importanceChart(run) {
  const told = run.effects.knobs.filter((each) => given(each.importance));
  if (!told.length) return null;
  const rest = Math.max(0, 1 - run.effects.explained);
  const bars = [...told.map((each) => [each.name, each.importance, "fill-effect"]), ["not explained", rest, "fill-rest strong"]];
  return figure("", (width) => {
    const left = Math.min(Math.max(...bars.map(([name]) => textWidth(name))) + 12, width * 0.6);
    const height = bars.length * 26 + 6;
    const root = svg("svg", { viewBox: `0 0 ${width} ${height}`, width, height, class: "chart" });
    const room = width - left - 56;
    const most = Math.max(...bars.map(([, share]) => share), 1e-9);
    bars.forEach(([name, share, kind], at) => {
      const y = at * 26 + 4;
      root.append(svg("text", { class: "ticks strong", x: left - 8, y: y + 14, "text-anchor": "end" }, svg("title", {}, name), shorten(name, left - 10)));
      root.append(svg("rect", { class: kind, x: left, y: y + 2, width: Math.max((share / most) * room, 1), height: 16, rx: 2 }));
      root.append(svg("text", { class: "ticks", x: left + Math.max((share / most) * room, 1) + 6, y: y + 14 }, importance(share)));
    });
    return root;
  }, { label: "share of the variation of throughput each knob explains" });
}

function effectChart(run, told, range) {
  return figure("", (width) => {
    const counts = told.values.map((each) => each.counts.ok || "none");
    const ticks = linear(range[0], range[1], 0, 1, 4);
    const usual = Math.max(34, ...ticks.ticks.map((each) => textWidth(ticks.label(each)) + 12));
    const count = told.values.length;
    const slanted = told.values.some((each) => textWidth(each.label, 11) > (width - usual - 4) / count - 6);
    const labels = told.values.map((each, at) => (slanted ? `${shorten(each.label, width * 0.62, 11)} (${counts[at]})` : each.label));
    const widths = labels.map((each) => textWidth(each, 11));
    // A slanted label reaches down and to the left, further than its place if it is long.
    const reach = (at) => {
      const share = (at + 0.5) / count;
      return (widths[at] * SLANT + 2 - (width - 4) * share) / (1 - share);
    };
    const left = Math.max(usual, ...(slanted ? labels.map((each, at) => reach(at)) : []));
    const depth = slanted ? Math.max(...widths) * SLANT + 14 : 18;
    const height = 196 + depth;
    const scale = linear(range[0], range[1], height - depth - 22, 24, 4);
    const root = svg("svg", { viewBox: `0 0 ${width} ${height}`, width, height, class: "chart" });
    for (const tick of scale.ticks) {
      root.append(svg("line", { class: "grid-line", x1: left, x2: width - 4, y1: scale(tick), y2: scale(tick) }));
      root.append(svg("text", { class: "ticks", x: left - 7, y: scale(tick) + 4, "text-anchor": "end" }, scale.label(tick)));
    }
    root.append(svg("text", { class: "label", x: 0, y: 11 }, `${run.unit || "throughput"}`));
    const wide = (width - left - 4) / count;
    const line = [];
    const points = [];
    told.values.forEach((value, at) => {
      const x = left + wide * (at + 0.5);
      const half = Math.min(wide * 0.32, 16);
      if (given(value.median)) {
        root.append(svg("line", { class: "whisker", x1: x, x2: x, y1: scale(value.min), y2: scale(value.max) }));
        root.append(svg("rect", { class: "box", x: x - half, width: half * 2, y: scale(value.high), height: Math.max(scale(value.low) - scale(value.high), 1.5) }));
        root.append(svg("line", { class: "median", x1: x - half, x2: x + half, y1: scale(value.median), y2: scale(value.median) }));
      }
      if (given(value.effect)) {
        const y = (factor) => scale(Math.min(Math.max(run.center * factor, scale.begin), scale.end));
        root.append(svg("line", { class: "effect", x1: x, x2: x, y1: y(value.effect_low), y2: y(value.effect_high) }));
        line.push([x, y(value.effect)]);
      }
      const ran = value.counts.ok || 0;
      const lost = Object.entries(value.counts).filter(([status]) => status !== "ok");
      const lines = [`${told.name} = ${value.label}`, `${plural(ran, "trial")} ok${lost.map(([status, count]) => `, ${count} ${status}`).join("")}`];
      if (given(value.median)) lines.push(`median ${rate(value.median, run.unit)}, quartiles ${number(value.low)} to ${number(value.high)}, all ${number(value.min)} to ${number(value.max)}`);
      if (given(value.effect)) lines.push(`with the others held equal: × ${number(value.effect, 3)} of the average (${number(value.effect_low, 3)} to ${number(value.effect_high, 3)})`);
      points.push({ x, y: given(value.median) ? scale(value.median) : height - depth - 30, lines: () => lines });
      const y = height - depth - 6;
      root.append(slanted
        ? svg("text", { class: "ticks small", x: x + 4, y: y + 2, "text-anchor": "end", transform: `rotate(-45 ${x + 4} ${y + 2})` }, svg("title", {}, value.label), labels[at])
        : svg("text", { class: "ticks small", x, y: y + 6, "text-anchor": "middle" }, labels[at]));
      if (!slanted) root.append(svg("text", { class: "count", x, y: height - 2, "text-anchor": "middle" }, counts[at]));
    });
    if (line.length) {
      root.append(svg("path", { class: "effect-line", d: `M${line.map(([x, y]) => `${x.toFixed(1)} ${y.toFixed(1)}`).join("L")}` }));
      for (const [x, y] of line) root.append(svg("circle", { class: "effect-dot", cx: x, cy: y, r: 3.5 }));
    }
    hover(root, points, { reach: 60 });
    return root;
  }, { before: el("h3", {}, told.name, given(told.importance) ? el("span", { class: "aside" }, ` ${importance(told.importance)}`) : null), label: `throughput by ${told.name}` });
}

function effects(run) {
  const told = run.effects.knobs;
  if (!told.length || !run.effects.count) return null;
  const good = run.rows.filter((row) => row.status === "ok" && row.throughput > 0).map((row) => row.throughput);
  const drawn = { ...run, center: Math.exp(good.reduce((sum, each) => sum + Math.log(each), 0) / good.length) };
  const [low, high] = extent(good);
  const known = given(run.effects.explained) && run.effects.explained > 0;
  const why = known
    ? `The bars say which share of the variation of (log) throughput each knob accounts for by itself, checked by leaving each of the ${plural(run.effects.count, "successful trial")} out in turn; what is not explained is interplay between knobs, and noise.`
    : `The ${plural(run.effects.count, "successful trial")} are too few, or too alike, to tell how much each knob matters; below is what was ${run.seen}.`;
  return section("effects", "What each knob does", why, importanceChart(run),
    el("p", { class: "lead" }, "For each value: the box holds the middle half of the throughputs, the line across it is the median, the whisker spans all of them, the number at its name counts them. The dots joined by a line are the effect with the other knobs held equal, one standard error up and down."),
    el("div", { class: "small-multiples" }, told.map((each) => effectChart(drawn, each, [Math.min(0, low), high]))));
}
