// The curves of a training over its steps.

const TRAIN_STATE_WORDS = {
  running: "A process is working on this training; the page follows it.",
  finished: "The training has finished its last step.",
  stopped: "No process works on this training, and it has not reached its last step; `redline train FOLDER --resume` continues it.",
};

// [step, value] pairs of two columns.
function pairsOf([steps, values]) {
  return steps.map((step, at) => [step, values[at]]);
}

// Numbered lines from top to bottom at changes of the configuration, thin ones where the training was only resumed.
function changeLines(frame, training) {
  const changed = training.strategies.filter((each) => each.step > 0 || each.number > 1);
  const at = new Set(changed.map((each) => each.step));
  for (const each of training.resumed) {
    if (at.has(each.step) || each.step > training.step) continue;
    frame.line("taken-up", frame.x(each.step), frame.top, frame.x(each.step), frame.base);
  }
  let taken = -Infinity;
  for (const each of changed) {
    const x = frame.x(Math.min(each.step, training.reach));
    frame.line("change", x, frame.top - 4, x, frame.base);
    const words = `#${each.number}`;
    const middle = inside(x, textWidth(words), frame.right + 14);
    if (middle - taken < textWidth(words) + 4) continue;
    taken = middle;
    frame.text("note change-note", middle, frame.top - 8, words, { anchor: "middle" });
  }
}

// Checkpoints along the lower axis: a stroke for a saved one, a cross for a failed one.
function checkpointMarks(frame, training, points) {
  const height = frame.base - 6;
  const place = (each) => frame.x(Math.min(each.step, training.reach));
  const good = training.checkpoints.filter((each) => !each.failure);
  const failed = training.checkpoints.filter((each) => each.failure);
  frame.path("saved", good.map((each) => `M${place(each).toFixed(1)} ${frame.base}v-9`).join(""));
  frame.path("unsaved", failed.map((each) => outline("cross", place(each), height, 4.5)).join(""));
  for (const each of training.checkpoints) points.push({ x: place(each), y: height, lines: () => checkpointLines(each) });
}

function checkpointLines(each) {
  if (each.failure) return [`Step ${number(each.step, 15)}: checkpoint not saved`, each.failure];
  return [`Step ${number(each.step, 15)}: checkpoint saved`, `in ${duration(each.seconds)}, of which training was paused ${duration(each.stalled)}`];
}

// A chart of `lines`, [{kind, name, points, dots}], over steps. `text(value)` describes a value.
function stepChart(training, { label, name, lines, text, height = 240, low = null, by = 1, checkpoints = false }) {
  const known = lines.filter((each) => each.points.length);
  if (!known.length) return null;
  const [least, most] = extent(known.flatMap((each) => each.points.map(([, value]) => value / by)));
  return figure((width) => {
    const frame = axes(width, height, {
      x: { label: "Step", scale: counting(training.reach) },
      y: { label, scale: (from, to, count) => linear(low === null ? least : Math.min(low, least), most, from, to, count) },
    });
    const points = [];
    changeLines(frame, training);
    if (checkpoints) checkpointMarks(frame, training, points);
    for (const each of known) {
      const drawn = each.points.map(([step, value]) => [frame.x(step), frame.y(value / by)]);
      frame.path(`curve ${each.kind}`, through(drawn));
      if (each.dots) frame.path(`curve-dots ${each.kind}`, drawn.length <= 200 ? drawn.map(([x, y]) => outline("dot", x, y, 3)).join("") : "");
      frame.dot(`curve-end ${each.kind}`, ...drawn.at(-1), 3.5);
      each.points.forEach(([step, value], at) => points.push({ x: drawn[at][0], y: drawn[at][1], lines: () => [`Step ${number(step, 15)}`, `${each.name} ${text(value)}`, strategyAt(training, step)] }));
    }
    hover(frame, points);
    return frame;
  }, `${name} over steps`);
}

// The configuration of a step, if there were several.
function strategyAt(training, step) {
  if (training.strategies.length < 2) return "";
  const found = training.strategies.filter((each) => each.step < step).at(-1);
  return found ? `configuration #${found.number}` : "";
}

function lossFigure(training) {
  const chart = stepChart(training, {
    label: "Loss", name: "loss", height: 340, text: (value) => number(value, 6), checkpoints: true,
    lines: [{ kind: "train", name: "loss", points: pairsOf(training.curves.loss) }, { kind: "held-out", name: "held-out loss", points: pairsOf(training.held_out), dots: true }],
  });
  if (!chart) return el("section", { id: "loss" }, el("p", { class: "lead" }, "No step is logged yet."));
  const failed = training.checkpoints.some((each) => each.failure);
  return section("loss", "Loss", null, chart, legend(
    lineKey("curve train", "trained on"), ...(training.held_out[0].length ? [lineKey("curve held-out", "held out")] : []),
    ...(training.strategies.length > 1 ? [[picture(8, 14, ["change", "M0 -7V7"]), "another configuration"]] : []),
    ...(training.resumed.length ? [[picture(8, 14, ["taken-up", "M0 -7V7"]), "taken up again"]] : []),
    ...(training.checkpoints.some((each) => !each.failure) ? [[picture(8, 14, ["saved", "M0 5V-4"]), "checkpoint"]] : []),
    ...(failed ? [[picture(12, 12, ["unsaved", outline("cross", 0, 0, 4)]), "checkpoint not saved"]] : [])));
}

function courseFigure(training) {
  const curve = (name) => pairsOf(training.curves[name]);
  const one = (name, points) => [{ kind: "train", name, points }];
  const speeds = curve(training.unit === "samples/s" ? "samples_per_second" : "tokens_per_second");
  const memories = curve("memory_mib");
  const unit = memoryUnit((extent(memories.map(([, value]) => value)) || [0, 0])[1]);
  const charts = [
    stepChart(training, { label: "Learning rate", name: "learning rate", low: 0, text: (value) => number(value, 4), lines: one("learning rate", curve("lr")) }),
    stepChart(training, { label: "Gradient norm", name: "gradient norm", low: 0, text: (value) => number(value, 4), lines: one("gradient norm", curve("grad_norm")) }),
    stepChart(training, { label: `Throughput, ${training.unit}`, name: "throughput", low: 0, text: (value) => rate(value, training.unit, 5), lines: one("throughput", speeds) }),
    stepChart(training, { label: "MFU, %", name: "MFU", low: 0, by: 0.01, text: percent, lines: one("MFU", curve("mfu")) }),
    stepChart(training, { label: `Peak memory of a rank, ${unit.name}`, name: "peak memory", low: 0, by: unit.by, text: memory, lines: one("peak memory", memories) }),
  ].filter(Boolean);
  return charts.length ? section("course", "Learning rate, gradient, speed and memory", null, el("div", { class: "pair" }, charts)) : null;
}
