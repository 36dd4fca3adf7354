// Several runs in one chart: progress, memory, and differences of the winners.

const LINES = 8;

// The common scale of throughputs: `of(run, speed)` and the unit. Runs with different units are compared by their ratios
// to the default.
function comparison(runs) {
  const winners = runs.filter((run) => run.winner);
  if (new Set(winners.map((run) => run.unit)).size < 2) return { of: (run, speed) => speed, axis: (speeds) => throughputAxis((winners[0] || runs[0]).unit, speeds) };
  const base = new Map(runs.map((run) => [run, (run.base && run.base.throughput) || (extent(run.rows.map((row) => row.throughput)) || [0, 0])[1] || 1e-12]));
  return { ratios: true, of: (run, speed) => speed / base.get(run), axis: (speeds) => ({ ...throughputAxis("", speeds), label: "Throughput over the default's" }) };
}

function overlayChart(runs, course, compared) {
  const climbs = runs.map((run) => climb(run, course));
  const speeds = compared.axis(runs.flatMap((run, index) => climbs[index].map((row) => compared.of(run, row.throughput))));
  return figure((width) => {
    const frame = axes(width, 320, { x: course, y: speeds });
    const points = [];
    runs.forEach((run, index) => {
      if (!climbs[index].length) return;
      const line = climbs[index].map((row) => [frame.x(course.place(run, row)), frame.y(compared.of(run, row.throughput))]);
      const [, last] = extent(run.rows.map((row) => course.place(run, row)));
      frame.path(`overlay o${index % LINES}`, steps(line, frame.x(last)));
      frame.dot(`overlay-end o${index % LINES}`, ...line.at(-1), 4.5);
      line.forEach(([x, y], at) => points.push({ x, y, lines: () => [run.label, ...trialLines(run, climbs[index][at])] }));
    });
    hover(frame, points);
    return frame;
  }, `best throughput so far of each run by ${course.name}`);
}

function overlayMemory(runs, compared) {
  const known = runs.map((run) => run.rows.filter((row) => row.status === "ok" && given(row.peak_memory_mib)));
  const all = known.flat();
  if (!all.length) return null;
  const memories = memoryAxis(extent(all.map((row) => row.peak_memory_mib))[1]);
  const speeds = compared.axis(runs.flatMap((run, index) => known[index].map((row) => compared.of(run, row.throughput))));
  return figure((width) => {
    const frame = axes(width, 360, { x: memories, y: speeds });
    const points = [];
    runs.forEach((run, index) => {
      const at = (row) => [frame.x(row.peak_memory_mib / memories.by), frame.y(compared.of(run, row.throughput))];
      const dots = known[index].map((row) => {
        const [x, y] = at(row);
        points.push({ x, y, lines: () => [run.label, ...trialLines(run, row)] });
        return outline("dot", x, y, all.length > 1500 ? 2 : 3);
      });
      frame.path(`overlay-dots o${index % LINES}`, dots.join(""));
      frame.path(`overlay o${index % LINES}`, steps(run.frontier.map((each) => run.byTrial.get(each)).filter((row) => row && known[index].includes(row)).map(at)));
    });
    hover(frame, points);
    return frame;
  }, "throughput over peak memory of each run", { caption: "Every successful trial, and each run's frontier of throughput over peak memory." });
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
    el("thead", {}, el("tr", {}, el("th", {}, ""), runs.map((run, index) => el("th", { scope: "col" }, lineKey(`overlay o${index % LINES}`, ` ${run.label}`))))),
    el("tbody", {},
      line("Folder", (run) => run.path),
      line("Devices", (run) => run.devices || MISSING),
      line("Begun", (run) => run.began || MISSING),
      line("State", (run) => STATES[run.state]),
      line("Numbers", (run) => (run.simulated ? "simulated: predictions" : "measured")),
      line("Winner", (run) => (run.winner ? `trial ${run.winner.trial}` : "none")),
      line("Throughput", (run) => (run.winner ? `${rate(run.winner.throughput, run.unit, 5)}${given(run.winner.spread) ? ` ± ${percent(run.winner.spread)}` : ""}` : MISSING)),
      line("Gain over the default", (run) => (given(run.headline.gain) ? `${run.headline.gain.toFixed(2)}×${given(run.headline.gain_half_width) ? ` ±${NBSP}${number(run.headline.gain_half_width, 2)}` : ""}` : MISSING)),
      line("Peak memory", (run) => (run.winner ? memory(run.winner.peak_memory_mib) : MISSING)),
      line("Trials", (run) => number(run.rows.length, 9)),
      line("Device time", (run) => (run.headline.cost ? duration(run.headline.cost.device_seconds) : MISSING)),
      names.map((name) => line(name, of(name), true)))));
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
    for (const run of runs) run.label = runs.filter((each) => each.name === run.name).length > 1 ? run.path : run.name;
    const compared = comparison(runs);
    redrawn(place, [
      legend(...runs.map((run, index) => [el("a", { href: runLink(ids[index]) }, lineKey(`overlay o${index % LINES}`, ` ${run.label}`)), [tagsOf(run, run.winner && run.winner.lossy), run.winner ? null : " (no winner)"]])),
      new Set(runs.map((run) => run.simulated)).size > 1 ? el("p", { class: "lead" }, "Simulated runs contain predictions; the others were measured.") : null,
      compared.ratios ? el("p", { class: "lead" }, "These runs measure different units, so each is shown relative to its own default configuration (to its best, if that did not succeed).") : null,
      section("overlay-progress", "Progress of each run", "The highest throughput so far, by number of trials and by device time used.",
        el("div", { class: "pair" }, courses(runs).map((each) => overlayChart(runs, each, compared)))),
      section("overlay-memory", "Throughput over peak memory", null, overlayMemory(runs, compared)),
      section("overlay-winners", "The winners side by side", "Marked: knobs that differ.", overlayTable(runs)),
    ]);
  }, (error) => gone(holders.every((each) => each.run) ? holders.map((each) => each.run.path) : [])(error));
}
