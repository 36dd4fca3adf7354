// Predicted against measured values; on the diagonal they agree.

// Error of the predictions, as a factor if it is large: nine times is clearer than 808 %.
function agreement(run, title, { ratio, error }) {
  const factor = Math.max(ratio, 1 / ratio);
  if (!(factor > 2)) return `half of the predictions are within ${percent(error)} of the ${run.seen} ${title}, which is typically ${number(ratio, 3)} times the predicted one`;
  const more = ratio > 1;
  const than = title === "peak memory" ? (more ? "more" : "less") : (title === "step time") === more ? "slower" : "faster";
  return `typically ${number(factor, 2)} times ${than} than predicted`;
}

// Each of `pairs` has a row, the predicted value, the measured one, and the first one if it was measured again.
function agreementChart(run, pairs, { title, unit, by, accuracy }) {
  const caption = `${plural(accuracy.count, "trial")}; ${agreement(run, title, accuracy)}${given(accuracy.rank_correlation) ? `; rank correlation ${number(accuracy.rank_correlation, 2)}` : ""}.`;
  const [low, high] = extent(pairs.flatMap((each) => each.slice(1))).map((each) => each / by);
  // Both axes have the same scale, so that agreement lies on the diagonal.
  const scale = (from, to) => linear(low > high * 0.4 ? low * 0.95 : 0, high, from, to, 5);
  return figure((width) => {
    const frame = axes(width, Math.min(width, 380), { x: { label: `Predicted ${title}, ${unit}`, scale }, y: { label: `${run.simulated ? "Simulated" : "Measured"} ${title}, ${unit}`, scale } });
    frame.line("reference", frame.left, frame.base, frame.right, frame.top);
    const points = pairs.map(([row, predicted, measured, first]) => point(run, row, frame.x(predicted / by), frame.y(measured / by), given(first) ? frame.y(first / by) : null));
    trialMarks(frame, points, { radius: 3.2 });
    hover(frame, points);
    return frame;
  }, `predicted against ${run.seen} ${title}`, { before: el("h3", {}, title[0].toUpperCase() + title.slice(1)), caption });
}

// Trials with predicted and measured step time, or throughput if step times are unknown.
function speedPairs(run) {
  const rows = run.rows.filter((row) => row.status === "ok" && row.throughput > 0 && row.predicted_throughput > 0);
  const timed = rows.every((row) => given(row.step_ms));
  // The work of a step is the same, so the predicted step time follows from the two throughputs.
  const pairs = rows.map((row) => {
    if (!timed) return [row, row.predicted_throughput, row.throughput, row.first];
    const work = row.step_ms * row.throughput;
    return [row, work / row.predicted_throughput, row.step_ms, row.first > 0 ? work / row.first : null];
  });
  return { timed, pairs: pairs.filter((each) => given(each[1])) };
}

function predicted(run) {
  const { throughput, memory: ram } = run.predictions;
  const shown = [];
  const { pairs: speeds, timed } = speedPairs(run);
  if (throughput && speeds.length) {
    const [, top] = extent(speeds.flatMap((each) => each.slice(1, 3)));
    const [unit, by] = timed ? (top >= 10000 ? ["s", 1000] : ["ms", 1]) : [run.unit || "as measured", 1];
    const accuracy = timed ? { ...throughput, ratio: 1 / throughput.ratio } : throughput;
    shown.push(agreementChart(run, speeds, { title: timed ? "step time" : "throughput", unit, by, accuracy }));
  }
  if (ram) {
    const pairs = run.rows.filter((row) => (row.status === "ok" || row.status === "oom") && row.peak_memory_mib > 0 && row.predicted_memory_mib > 0)
      .map((row) => [{ ...row, once: false }, row.predicted_memory_mib, row.peak_memory_mib]);
    const { by, name } = memoryUnit(extent(pairs.flatMap((each) => each.slice(1)))[1]);
    shown.push(agreementChart(run, pairs, { title: "peak memory", unit: name, by, accuracy: ram }));
  }
  if (!shown.length) return null;
  const { ok, oom } = run.headline.counts;
  return section("predicted", `Predicted against ${run.seen}`,
    run.simulated ? "The prediction for each trial and its result on the simulated cluster, which differs from the prediction as a real one would. On the diagonal they agree; above it the result is larger."
      : "The prediction for each trial before it ran. On the diagonal the prediction was exact; above it the measured value is larger.",
    el("div", { class: "pair" }, shown), legend(...statusKeys({ ok, oom }), ...againKeys(run)));
}
