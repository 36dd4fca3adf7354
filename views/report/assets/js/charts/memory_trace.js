// Traced memory of one rank over an optimizer step, and the largest tensors at its peak.

const MIB = 2 ** 20;

// Phases of the step as [name, first interval, end].
function phases(points) {
  const out = [];
  points.forEach(({ phase }, at) => {
    if (out.length && out.at(-1)[0] === phase) out.at(-1)[2] = at + 1;
    else out.push([phase, at, at + 1]);
  });
  return out;
}

// What the allocator has taken from the device.
function taken({ allocator }) {
  return allocator === "resident set" ? "resident" : "reserved by the allocator";
}

function memoryTraceChart(trace) {
  const { step } = trace;
  const highest = Math.max(trace.peak_live_bytes, ...step.map((each) => each.reserved_bytes)) / MIB;
  const unit = memoryUnit(highest);
  return figure((width) => {
    const frame = axes(width, 280, {
      x: { label: "", scale: bands(step.length) }, y: { label: `Memory of the rank, ${unit.name}`, scale: fromZero((1.04 * highest) / unit.by) },
    });
    const high = (bytes) => frame.y(bytes / MIB / unit.by);
    const line = (name) => steps(step.map((each, at) => [frame.x(at), high(each[name])]), frame.right);
    for (const [phase, begin, end] of phases(step)) {
      if (begin) frame.line("grid", frame.x(begin), frame.top, frame.x(begin), frame.base);
      if (textWidth(phase) < frame.x(end) - frame.x(begin)) frame.text("tick", (frame.x(begin) + frame.x(end)) / 2, frame.base + 17, phase, { anchor: "middle" });
    }
    frame.path("fill-memory", `${line("live_bytes")}V${frame.base}H${frame.left}Z`);
    frame.path("frontier", line("reserved_bytes"));
    hover(frame, step.map((each, at) => ({
      x: frame.x(at + 0.5), y: high(each.live_bytes),
      lines: () => [each.phase, `${memory(each.live_bytes / MIB)} of tensors`, `${memory(each.reserved_bytes / MIB)} ${taken(trace)}`],
    })), { reach: 300 });
    return frame;
  }, "memory of a rank over a step");
}

function largestTensors({ largest }) {
  const cells = (each) => [memory(each.bytes / MIB), each.role, each.name, `${each.shape.join(" × ")}, ${each.dtype}`];
  return el("div", { class: "table-pane" }, el("table", { class: "plain" },
    el("thead", {}, el("tr", {}, ["Size", "Purpose", "Tensor", "Shape"].map((each) => el("th", { scope: "col" }, each)))),
    el("tbody", {}, largest.map((each) => el("tr", {}, cells(each).map((cell) => el("td", {}, cell)))))));
}

function memoryTrace(run) {
  const trace = run.memory_trace;
  if (!trace) return null;
  const cuda = trace.allocator !== "resident set";
  const row = run.winner && run.byTrial.get(run.winner.trial);
  const parts = Object.entries(trace.at_peak).filter(([, bytes]) => bytes >= trace.peak_live_bytes / 1000);
  return section("memory-trace", "Memory over a step", [
    `Rank ${trace.rank} of the winner, traced allocation by allocation without a device and replayed through a model of ${cuda ? "PyTorch's caching allocator" : "the C library's allocator"}.`,
    `Tensors take ${memory(trace.peak_live_bytes / MIB)} at the peak, in ${trace.peak_phase}; ${memory(trace.peak_reserved_bytes / MIB)} are ${taken(trace)}.`,
    row && given(row.peak_memory_mib) ? `The trial's peak was ${memory(row.peak_memory_mib)}${cuda ? "" : ", with tensors that the C library keeps after they are freed"}.` : "",
    trace.untraced.length ? `The trace leaves out ${words(trace.untraced)}, with which a step keeps other, mostly fewer, tensors.` : "",
  ].filter(Boolean).join(" "),
  memoryTraceChart(trace),
  legend([picture(14, 12, ["fill-memory", "M-7 -5h14v10h-14Z"]), "tensors"], [picture(14, 12, ["frontier", "M-7 0h14"]), taken(trace)]),
  el("h3", {}, "At the peak"),
  el("dl", {}, parts.map(([role, bytes]) => el("div", {}, el("dt", {}, role), el("dd", {}, `${memory(bytes / MIB)}, ${percent(bytes / trace.peak_live_bytes)}`)))),
  el("h3", {}, "Largest tensors at the peak"), largestTensors(trace));
}
