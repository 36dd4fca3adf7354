// All values of a trial in a dialog.

const DETAIL_FIELDS = [
  ["throughput", "Throughput", (row, run) => rate(row.throughput, run.unit, 6)],
  ["step_ms", "Step time", (row) => `${milliseconds(row.step_ms)}${given(row.step_ms_spread) ? ` ± ${milliseconds(row.step_ms_spread)}` : ""}`],
  ["peak_memory_mib", "Peak memory", (row) => `${memory(row.peak_memory_mib)}${given(row.memory_limit_mib) ? ` of ${memory(row.memory_limit_mib)}` : ""}`],
  ["tflops_per_device", "Model TFLOP/s per device", (row) => number(row.tflops_per_device, 3)],
  ["mfu", "Model FLOPs utilisation", (row) => utilisation(row, row.knobs)],
  ["predicted_throughput", "Predicted throughput", (row, run) => rate(row.predicted_throughput, run.unit, 4)],
  ["predicted_memory_mib", "Predicted memory", (row) => memory(row.predicted_memory_mib)],
  ["devices", "Devices", (row) => number(row.devices, 9)],
  ["sampler", "Chosen by", (row) => row.sampler],
  ["loss", "Loss of the first step", (row) => number(row.loss, 6)],
  ["expert_load", "Rows of the fullest expert over the mean", (row) => number(row.expert_load, 3)],
  ["expert_dropped", "Share of rows that experts dropped", (row) => number(row.expert_dropped, 3)],
  ["started", "Started", (row) => moment(row.started)],
  ["seconds_total", "Total time", (row) => duration(row.seconds_total)],
  ["seconds_build", "Build", (row) => duration(row.seconds_build)],
  ["seconds_warmup", "Warm-up", (row) => duration(row.seconds_warmup)],
  ["seconds_measure", "Measurement", (row) => duration(row.seconds_measure)],
  ["seconds_overhead", "Overhead", (row) => duration(row.seconds_overhead)],
];

function pairs(list) {
  return el("dl", {}, list.map(([name, value]) => el("div", {}, el("dt", {}, name), el("dd", {}, value))));
}

// `more(row, host)` may add content that needs a server: the log, the exports.
function showDetails(run, row, more = null) {
  const again = run.again[String(row.trial)];
  const facts = DETAIL_FIELDS.filter(([name]) => row[name] !== null && row[name] !== undefined && row[name] !== "")
    .map(([, title, text]) => [title, text(row, run)]);
  const title = run.simulated ? "Simulated" : "Measured";
  if (again) facts.splice(row.status === "ok" ? 1 : 0, 0, ["First", rate(again.first, run.unit, 6)], ...(again.again.length ? [[`${title} again`, again.again.map((each) => number(each, 5)).join(", ")]] : []));
  const knobs = Object.entries(row.knobs).filter(([, value]) => value !== null && value !== undefined);
  const box = el("dialog", { class: "details", "aria-label": `Trial ${row.trial}` },
    el("header", {}, el("h3", {}, `Trial ${row.trial} `, badge(row.status), run.simulated ? tag("simulated") : null, run.emulated ? tag("emulated") : null),
      el("button", { type: "button", class: "close", "aria-label": "Close", onclick: () => box.close() }, "×")),
    row.reason ? el("p", { class: "reason" }, row.reason) : null,
    el("h4", {}, "Configuration"),
    pairs(knobs.map(([name, value]) => [name, knobOf(run, name, value)])),
    el("p", {}, copyButton("Copy as knob=value", configText(row.knobs))),
    el("h4", {}, title), pairs(facts));
  box.addEventListener("click", (event) => { if (event.target === box) box.close(); });
  box.addEventListener("close", () => box.remove());
  document.body.append(box);
  if (more) more(row, box);
  box.showModal();
  return box;
}
