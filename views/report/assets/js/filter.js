// Parser of filters such as `ok micro_batch=8 throughput>5000 sdpa`; all terms must match.

const TERM = /^([^\s=<>!]+)(<=|>=|!=|=|<|>)(.*)$/;

function cellOf(row, name) {
  if (name in row.knobs) return row.knobs[name];
  if (name.startsWith("knob.")) return row.knobs[name.slice(5)];
  return name in row ? row[name] : undefined;
}

function termTest(term) {
  const parts = TERM.exec(term);
  if (!parts) {
    const text = term.toLowerCase();
    return (row) => [row.trial, row.status, row.reason, row.sampler, ...Object.values(row.knobs)].some((each) => String(each ?? "").toLowerCase().includes(text));
  }
  const [, name, sign, wanted] = parts;
  const value = wanted === "" ? NaN : Number(wanted);
  return (row) => {
    const cell = cellOf(row, name);
    if (cell === undefined) return false;
    if (sign === "=" || sign === "!=") {
      const same = typeof cell === "number" && !Number.isNaN(value) ? cell === value : String(cell ?? "").toLowerCase() === wanted.toLowerCase();
      return same === (sign === "=");
    }
    if (!given(cell) || Number.isNaN(value)) return false;
    return { "<": cell < value, ">": cell > value, "<=": cell <= value, ">=": cell >= value }[sign];
  };
}

// Returns a predicate of a row, and the names in the filter that are no column.
function makeFilter(text, run) {
  const terms = text.trim().split(/\s+/).filter(Boolean);
  const known = new Set([...run.columns, ...run.knobNames]);
  const unknown = terms.map((each) => TERM.exec(each)).filter((each) => each && !known.has(each[1])).map((each) => each[1]);
  const tests = terms.map(termTest);
  return { test: (row) => tests.every((each) => each(row)), unknown };
}
