// Runs over one another: how fast each came to its best, what memory it took, and where the winners differ.

const LINES = 8;

function throughputOf(runs) {
  const { unit } = runs.find((run) => run.winner) || runs[0];
  return `Throughput${unit ? `, ${unit}` : ""}`;
}

function overlayChart(runs, { caption, label, place, unit, relative }) {
  const value = (run, speed) => (relative ? speed / relative(run) : speed);
  return figure(caption, (width) => {
    const points = [];
    const series = runs.map((run, index) => {
      const rows = run.rows.filter((row) => row.status === "ok" && given(place(run, row))).sort((a, b) => place(run, a) - place(run, b));
      return { run, index, rows };
    }).filter((each) => each.rows.length);
    const reach = Math.max(1e-9, ...series.flatMap((each) => each.run.rows.map((row) => place(each.run, row)).filter(given))) / unit.by;
    const speeds = extent(series.flatMap((each) => each.rows.map((row) => value(each.run, row.throughput)))) || [0, 1];
    const frame = axes(width, 320, {
      x: (from, to) => (unit.whole ? counting(reach, from, to, Math.min(8, width / 80)) : linear(0, reach, from, to, Math.min(8, width / 80), { tight: true })),
      y: (from, to) => linear(Math.min(0, speeds[0]), speeds[1] * 1.03, from, to, 5),
      xLabel: label, yLabel: relative ? "Throughput over the default's" : throughputOf(runs),
    });
    for (const { run, index, rows } of series) {
      const line = climb(run, rows, (row) => place(run, row)).map((row) => {
        const at = [frame.x(place(run, row) / unit.by), frame.y(value(run, row.throughput))];
        points.push({ x: at[0], y: at[1], lines: () => [run.label, ...trialLines(run, row)] });
        return at;
      });
      const last = Math.max(...run.rows.map((row) => place(run, row)).filter(given)) / unit.by;
      frame.layer.append(svg("path", { class: `overlay o${index % LINES}`, d: steps(line, frame.x(last)) }));
      if (line.length) frame.layer.append(svg("circle", { class: `overlay-end o${index % LINES}`, cx: line.at(-1)[0], cy: line.at(-1)[1], r: 4.5 }));
    }
    hover(frame.root, points);
    return frame.root;
  });
}

function overlayMemory(runs, relative) {
  const known = (row) => row.status === "ok" && given(row.peak_memory_mib);
  if (!runs.some((run) => run.rows.some(known))) return null;
  const value = (run, speed) => (relative ? speed / relative(run) : speed);
  return figure("Every successful trial, and each run's frontier of throughput over peak memory.", (width) => {
    const all = runs.flatMap((run) => run.rows.filter(known).map((row) => [row.peak_memory_mib, value(run, row.throughput)]));
    const most = Math.max(...all.map(([each]) => each));
    const unit = memoryUnit(most);
    const frame = axes(width, 360, {
      x: (from, to) => linear(0, most / unit.by, from, to, Math.min(8, width / 80), { tight: true }),
      y: (from, to) => linear(0, Math.max(...all.map(([, each]) => each)) * 1.03, from, to, 5),
      xLabel: `Peak memory of a rank, ${unit.name}`, yLabel: relative ? "Throughput over the default's" : throughputOf(runs),
    });
    const points = [];
    runs.forEach((run, index) => {
      const at = (row) => [frame.x(row.peak_memory_mib / unit.by), frame.y(value(run, row.throughput))];
      let dots = "";
      for (const row of run.rows.filter(known)) {
        const [x, y] = at(row);
        dots += outline("ok", x, y, all.length > 1500 ? 2 : 3);
        points.push({ x, y, lines: () => [run.label, ...trialLines(run, row)] });
      }
      frame.layer.append(svg("path", { class: `overlay-dots o${index % LINES}`, d: dots }));
      const line = run.frontier.map((each) => run.byTrial.get(each)).filter((row) => row && known(row)).map(at);
      if (line.length) frame.layer.append(svg("path", { class: `overlay o${index % LINES}`, d: steps(line) }));
    });
    hover(frame.root, points);
    return frame.root;
  });
}

function overlayTable(runs) {
  const names = [...new Set(runs.flatMap((run) => run.knobNames))];
  const line = (title, text, compared = false) => {
    const cells = runs.map(text);
    return el("tr", { class: compared && new Set(cells.filter((cell, at) => runs[at].winner)).size > 1 ? "differs" : null }, el("th", { scope: "row" }, title), cells.map((cell) => el("td", {}, cell)));
  };
  const of = (name) => (run) => {
    if (!run.winner || !(name in run.winner.config)) return MISSING;
    return knobText(run, name, run.winner.config[name]);
  };
  return el("div", { class: "table-pane" }, el("table", { class: "overlay-table" },
    el("thead", {}, el("tr", {}, el("th", {}, ""), runs.map((run, index) => el("th", { scope: "col" }, key(index), ` ${run.label}`)))),
    el("tbody", {},
      line("Folder", (run) => run.path),
      line("Devices", (run) => run.devices || MISSING),
      line("Begun", (run) => run.began || MISSING),
      line("State", (run) => STATES[run.state]),
      line("Numbers", (run) => (run.simulated ? "simulated: predictions" : "measured")),
      line("Winner", (run) => (run.winner ? `trial ${run.winner.trial}` : "none")),
      line("Throughput", (run) => (run.winner ? `${rate(run.winner.throughput, run.unit, 5)}${given(run.winner.spread) ? ` ± ${percent(run.winner.spread)}` : ""}` : MISSING)),
      line("Over the default", (run) => (given(run.headline.gain) ? `${run.headline.gain.toFixed(2)}×` : MISSING)),
      line("Peak memory", (run) => (run.winner ? memory(run.winner.peak_memory_mib) : MISSING)),
      line("Trials", (run) => String(run.rows.length)),
      line("Device time", (run) => (run.headline.cost ? duration(run.headline.cost.device_seconds) : MISSING)),
      names.map((name) => line(name, of(name), true)))));
}

function key(index) {
  return svg("svg", { viewBox: "0 0 26 10", width: 26, height: 10, "aria-hidden": "true" }, svg("path", { class: `overlay o${index % LINES}`, d: "M0 5H26" }));
}

function overlayPage(page, ids) {
  const holders = ids.map(makeHolder);
  const place = el("div", {});
  page.append(el("header", { class: "title" }, el("h1", {}, `${ids.length} runs overlaid`), el("p", { class: "row links" }, el("a", { href: "#/" }, "All runs"))), place);
  document.title = "overlay: redline";
  return poll(async () => {
    const news = await Promise.all(holders.map((each) => each.refresh()));
    if (!news.some(Boolean)) return;
    const runs = holders.map((each) => each.run);
    runs.forEach((run, index) => {
      run.label = runs.filter((each) => each.name === run.name).length > 1 ? run.path : run.name;
      run.spent = spentBy(run);
    });
    // Tokens and samples cannot stand on one axis; ratios to the default can.
    const units = new Set(runs.filter((run) => run.winner).map((run) => run.unit));
    const relative = units.size > 1 ? (run) => (run.base && run.base.throughput) || Math.max(...run.rows.map((row) => row.throughput || 0), 1e-12) : null;
    const unit = timeUnit(Math.max(0, ...runs.flatMap((run) => [...run.spent.values()])));
    const timed = runs.some((run) => run.spent.size);
    place.style.minHeight = `${place.offsetHeight}px`;
    clear(place).append(...[
      el("p", { class: "legend" }, runs.map((run, index) => el("span", {}, el("a", { href: runLink(ids[index]) }, key(index), ` ${run.label}`), tagsOf(run.simulated, run.winner && run.winner.lossy), run.winner ? null : " (no winner)"))),
      new Set(runs.map((run) => run.simulated)).size > 1 ? el("p", { class: "lead" }, "What is simulated is predicted; the others were measured.") : null,
      relative ? el("p", { class: "lead" }, "These runs measure different units, so each is shown as a multiple of its own default configuration (of its best, where that did not run).") : null,
      section("overlay-progress", "How each came to its best", "The highest throughput so far, by number of trials and by device time spent.",
        el("div", { class: "pair" },
          overlayChart(runs, { caption: "", label: "Trial", place: (run, row) => row.trial, unit: { by: 1, whole: true }, relative }),
          timed ? overlayChart(runs, { caption: "", label: `Device time spent, ${unit.name}`, place: (run, row) => run.spent.get(row.trial), unit, relative }) : null)),
      section("overlay-memory", "Throughput over peak memory", null, overlayMemory(runs, relative)),
      section("overlay-winners", "The winners side by side", "Marked: knobs in which they differ.", overlayTable(runs)),
    ].filter(Boolean));
    requestAnimationFrame(() => requestAnimationFrame(() => { place.style.minHeight = ""; }));
  }, (error) => gone(holders.every((each) => each.run) ? holders.map((each) => each.run.path) : [])(error));
}
