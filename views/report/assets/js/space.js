// The knobs and constraints of the space.

function knobWords(run, each) {
  if (each.derived) return el("span", {}, "derived: ", el("code", {}, each.derived));
  if (each.values) {
    return el("span", {}, each.values.map((value, at) => [at ? ", " : "", el("span", { class: value === each.default && each.values.length > 1 ? "is-default" : null }, knob(value)), isLossy(run, each.name, value) ? [" ", tag("lossy")] : null]),
      each.values.length === 1 ? " (fixed)" : "");
  }
  return el("span", {}, each.range || "", each.default !== undefined && each.default !== null ? ` (default ${knob(each.default)})` : "");
}

function spaceWords(run) {
  const { knobs, constraints, declared } = run.space;
  if (!knobs.length) return null;
  return section("space", "The search space",
    declared ? "The knobs and their values. Underlined: the default." : "There is no run.yaml, so these are the values of the trials; the space may contain others.",
    el("dl", { class: "space" }, knobs.map((each) => el("div", {}, el("dt", {}, each.name),
      el("dd", {}, knobWords(run, each), each.when ? el("span", { class: "aside" }, ` only when ${each.when}`) : null, each.help ? el("p", { class: "under" }, each.help) : null)))),
    constraints.length ? [el("h3", {}, "Constraints"), el("ul", { class: "rules" }, constraints.map((each) => el("li", {}, each.reason ? `${each.reason}: ` : "", el("code", {}, each.text))))] : null);
}
