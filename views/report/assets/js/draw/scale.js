// Scales from values to positions, and their ticks.

function niceStep(span, count) {
  const raw = span / Math.max(1, count);
  const power = 10 ** Math.floor(Math.log10(raw));
  const unit = raw / power;
  return (unit <= 1 ? 1 : unit <= 2 ? 2 : unit <= 2.5 ? 2.5 : unit <= 5 ? 5 : 10) * power;
}

// A linear scale over at least [low, high], widened to whole ticks unless `tight`. Returns a function with `.ticks`.
function linear(low, high, from, to, count = 6, { tight = false } = {}) {
  // Values that differ only by rounding count as equal.
  if (!(high - low > Math.max(Math.abs(low), Math.abs(high)) * 1e-12 + 1e-280)) {
    const pad = Math.abs(low) > 1e-270 ? Math.abs(low) * 0.05 : 1;
    high = low + pad;
    low -= low > 0 && low - pad < 0 ? low : pad;
  }
  const step = niceStep(high - low, count);
  const first = Math.floor(low / step + 1e-9) * step;
  const last = Math.ceil(high / step - 1e-9) * step;
  const [begin, end] = tight ? [low, high] : [first, last];
  const scale = (value) => from + ((value - begin) / (end - begin)) * (to - from);
  scale.ticks = [];
  for (let i = 0; i <= Math.round((last - first) / step); i += 1) {
    const tick = +(first + i * step).toPrecision(12);
    if (tick >= begin - step * 1e-6 && tick <= end + step * 1e-6) scale.ticks.push(tick);
  }
  const power = Math.floor(Math.log10(step) + 1e-9);
  const digits = Math.max(0, Math.abs(step / 10 ** power - 2.5) < 1e-6 ? 1 - power : -power);
  scale.label = (tick) => tick.toLocaleString("en-US", { maximumFractionDigits: Math.min(digits, 12) });
  scale.begin = begin;
  scale.end = end;
  return scale;
}

// The scales of axes, created once the space is known: each is called with its ends in pixels and the number of ticks that fit.

function fromZero(high) {
  return (from, to, count) => linear(0, high, from, to, count, { tight: true });
}

// Whole numbers, for example of trials.
function counting(last) {
  const most = Math.max(last, 1);
  return (from, to, count) => {
    const scale = linear(0, most, from, to, Math.min(count, most), { tight: true });
    scale.ticks = scale.ticks.filter((each) => Number.isInteger(each));
    return scale;
  };
}

// Slots of equal size, each starting at a whole number. The caller draws the labels.
function bands(count) {
  return (from, to) => Object.assign((at) => from + (at / count) * (to - from), { ticks: [], size: Math.abs(to - from) / count });
}

function extent(values) {
  let low = Infinity;
  let high = -Infinity;
  for (const each of values) {
    if (!given(each)) continue;
    if (each < low) low = each;
    if (each > high) high = each;
  }
  return low <= high ? [low, high] : null;
}
