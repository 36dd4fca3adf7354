// Numbers as readable texts; a missing one is a dash.

const MISSING = "–";
const NBSP = "\u00a0";

function given(value) {
  return typeof value === "number" && Number.isFinite(value);
}

// `digits` significant digits and grouped thousands; an exponent for very small and very large numbers.
function number(value, digits = 4) {
  if (!given(value)) return MISSING;
  const size = Math.abs(value);
  if (size !== 0 && (size < 1e-4 || size >= 1e12)) return value.toExponential(Math.max(0, digits - 1));
  const decimals = size === 0 ? 0 : Math.max(0, digits - 1 - Math.floor(Math.log10(size)));
  return value.toLocaleString("en-US", { maximumFractionDigits: Math.min(decimals, 12) });
}

function percent(share, digits = 2) {
  if (!given(share)) return MISSING;
  const value = share * 100;
  return `${number(value, Math.abs(value) >= 10 || value === 0 ? 2 : digits)}${NBSP}%`;
}

// The divisor of the values of an axis, and the name of the unit.
function memoryUnit(mib) {
  return mib >= 4096 ? { by: 1024, name: "GiB" } : { by: 1, name: "MiB" };
}

function timeUnit(seconds) {
  if (seconds >= 2 * 86400) return { by: 86400, name: "days" };
  if (seconds >= 3 * 3600) return { by: 3600, name: "h" };
  if (seconds >= 300) return { by: 60, name: "min" };
  if (seconds >= 1) return { by: 1, name: "s" };
  return { by: 1e-3, name: "ms" };
}

function memory(mib) {
  if (!given(mib)) return MISSING;
  const unit = memoryUnit(mib);
  return `${number(mib / unit.by, unit.by === 1 ? 4 : 3)}${NBSP}${unit.name}`;
}

function duration(seconds) {
  if (!given(seconds)) return MISSING;
  const unit = timeUnit(Math.abs(seconds));
  return `${number(seconds / unit.by, 3)}${NBSP}${unit.name}`;
}

function milliseconds(ms) {
  return given(ms) ? (ms >= 10000 ? `${number(ms / 1000, 3)}${NBSP}s` : `${number(ms, 4)}${NBSP}ms`) : MISSING;
}

function rate(value, unit, digits = 4) {
  return given(value) ? `${number(value, digits)}${unit ? `${NBSP}${unit}` : ""}` : MISSING;
}

// A rate without line breaks; browsers break at the slash of "tokens/s".
function rateOf(value, unit, digits = 4) {
  return el("span", { class: "solid" }, rate(value, unit, digits));
}

// Model FLOPs utilisation, with the precision of the peak.
function utilisation(row, knobs) {
  const precision = knobs && typeof knobs.precision === "string" ? `${knobs.precision.replace(/_pure$/, "")} ` : "";
  return given(row.mfu) ? `${percent(row.mfu)} of ${precision}peak` : MISSING;
}

// Value of a knob.
function knob(value) {
  if (value === null || value === undefined) return MISSING;
  return typeof value === "number" ? String(Math.abs(value) < 1e15 ? +value.toPrecision(6) : value) : String(value);
}

function moment(unix) {
  return given(unix) && Math.abs(unix) <= 8.64e12 ? new Date(unix * 1000).toISOString().slice(0, 19).replace("T", " ") + " UTC" : MISSING;
}
