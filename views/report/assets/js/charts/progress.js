// The best throughput so far, against trials and against device time.

function progressOver(run, course) {
  const rows = run.rows.filter((row) => given(course.place(run, row)));
  if (!rows.some((row) => row.status === "ok")) return null;
  const speeds = throughputAxis(run.unit, rows.filter((row) => row.status === "ok").flatMap((row) => [row.throughput, row.first]));
  return figure((width) => {
    const frame = axes(width, 300, { x: course, y: speeds });
    const at = (row) => [frame.x(course.place(run, row)), row.status === "ok" ? frame.y(row.throughput) : frame.base - 7];
    const points = rows.map((row) => point(run, row, ...at(row), given(row.first) ? frame.y(row.first) : null));
    if (run.base && given(run.base.throughput)) {
      const height = frame.y(run.base.throughput);
      frame.line("reference", frame.left, height, frame.right, height);
      lineNote(frame, "default", height, points, "default");
    }
    trialMarks(frame, points, { radius: 3, look: run.measuredAgain ? "" : "dim" });
    frame.path("best", steps(climb(run, course).map(at), frame.right));
    const winner = run.winner && run.byTrial.get(run.winner.trial);
    if (winner && given(course.place(run, winner))) winnerMark(frame, ...at(winner));
    hover(frame, points);
    return frame;
  }, `best throughput so far by ${course.name}`);
}

function progress(run) {
  const shown = courses([run]).map((each) => progressOver(run, each)).filter(Boolean);
  if (!shown.length) return null;
  return section("progress", "Progress of the search",
    [`The line is the highest throughput ${run.seen} so far${run.winner ? ", up to the winner's" : ""}; marks are trials, failed ones along the bottom.`,
      shown.length > 1 ? "Left: by number of trials; right: by device time used." : "",
      run.measuredAgain && run.winner ? `The fastest trials were ${run.seen} again at the end; the star marks the winner.` : "", whyAbove(run)].filter(Boolean).join(" "),
    el("div", { class: "pair" }, shown), legend(...statusKeys(run.headline.counts), ...(run.winner ? [winnerKey(), ...againKeys(run)] : [])));
}
