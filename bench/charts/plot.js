// The same by Observable Plot: dots with a symbol for each status, a stepped line, a tip at what is nearest to the pointer.
let run = null;

function begin(document) {
  run = makeRun(document);
}

const tipOf = (row) => trialLines(run, row).join("\n");
const SYMBOL = { symbol: { legend: true } };

const CHARTS = {
  progress: () => (host) => {
    const rows = run.rows.map((row) => ({ ...row, y: row.throughput ?? 0 }));
    host.append(Plot.plot({
      width: host.clientWidth, height: 400, ...SYMBOL,
      marks: [Plot.ruleY([0]), Plot.dot(rows, { x: "trial", y: "y", symbol: "status", stroke: "status" }),
        Plot.lineY(climb(run, { place: (each, row) => row.trial }), { x: "trial", y: "throughput", curve: "step-after" }),
        Plot.tip(rows, Plot.pointer({ x: "trial", y: "y", title: tipOf }))],
    }));
  },
  memory: () => (host) => {
    const rows = run.rows.map((row) => ({ ...row, x: memoryNeed(row), y: row.throughput ?? 0 })).filter((row) => given(row.x));
    const frontier = run.frontier.map((each) => run.byTrial.get(each));
    host.append(Plot.plot({
      width: host.clientWidth, height: 400, ...SYMBOL,
      marks: [Plot.ruleY([0]), Plot.dot(rows, { x: "x", y: "y", symbol: "status", stroke: "status" }),
        Plot.lineY(frontier, { x: "peak_memory_mib", y: "throughput", curve: "step-after" }), Plot.tip(rows, Plot.pointer({ x: "x", y: "y", title: tipOf }))],
    }));
  },
  // As its gallery draws them: each axis a row, a line for each trial.
  parallel: () => (host) => {
    const list = [...run.varying.map((name) => knobAxis(run, name)), { name: "throughput", place: linear(...extent(run.rows.map((row) => row.throughput)), 0, 1, 5, { tight: true }) }];
    const points = run.rows.filter((row) => row.status === "ok").flatMap((row) => list.map((axis) => ({ trial: row.trial, axis: axis.name, at: axis.place(axis.name === "throughput" ? row.throughput : row.knobs[axis.name]), speed: row.throughput })));
    host.append(Plot.plot({
      width: host.clientWidth, height: 400, marginLeft: 110, x: { axis: null }, y: { domain: list.map((each) => each.name) }, color: { scheme: "blues" },
      marks: [Plot.ruleY(list, { y: "name" }), Plot.line(points, { x: "at", y: "axis", z: "trial", stroke: "speed", strokeWidth: 0.7, strokeOpacity: 0.4 }),
        Plot.tip(points, Plot.pointer({ x: "at", y: "axis", title: (each) => tipOf(run.byTrial.get(each.trial)) }))],
    }));
  },
};
