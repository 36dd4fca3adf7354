// The result: the winner, the ratio, the spread, the headroom and the cost.

// A large number with a small unit that does not wrap.
function figureOf(value) {
  const [digits, ...unit] = String(value).split(NBSP);
  return [digits, unit.length ? [" ", el("span", { class: "unit solid" }, unit.join(NBSP))] : null];
}

function tile(title, value, under, chart = null) {
  return el("div", { class: "tile" }, el("h3", {}, title), el("p", { class: "value" }, figureOf(value)), chart, el("p", { class: "under" }, under));
}

// The large text and the sentence below it.
function verdict(run) {
  const { winner, base, simulated } = run;
  const { gain } = run.headline;
  if (!winner) {
    if (!run.rows.length) return ["No trials yet", "Trials appear here as they end."];
    return [simulated ? "No trial is predicted to succeed" : "No trial succeeded", `${run.headline.why[0].toUpperCase()}${run.headline.why.slice(1)}`];
  }
  const trial = `Trial ${winner.trial}`;
  const speed = rateOf(winner.throughput, run.unit);
  const large = rate(winner.throughput, run.unit);
  if (base && base.trial === winner.trial) return [large, [`${trial}, the default configuration: ${run.rows.length > 1 ? run.headline.only_default || "no other trial was faster" : "no other configuration was tried"}.`]];
  const trains = [trial, simulated ? " is predicted to train at " : " trains at ", speed];
  if (gain) {
    const half = run.headline.gain_half_width;
    const sure = given(half) ? ` ±${NBSP}${number(half, 2)}` : "";
    if (!run.headline.gain_shown && given(half)) {
      return ["No gain shown", [trains, `; the default configuration at `, rateOf(base.throughput, run.unit), `. The interval of the ratio, ${gain.toFixed(2)}${sure}, includes 1: measure longer, or on a machine with less other load.`]];
    }
    const faster = gain >= 1 ? `${number((gain - 1) * 100, 3)}${NBSP}% faster than` : `${number(gain, 3)} times`;
    return [`${gain.toFixed(2)}×`, [trains, `: ${faster} the default configuration's `, rateOf(base.throughput, run.unit), `, ratio ${gain.toFixed(2)}${sure}.`]];
  }
  const why = base ? `The default configuration (trial ${base.trial}) ${simulated ? "would end" : "ended"} as ${base.status}.` : "The default configuration was not tried, so there is no ratio.";
  return [large, [trains, `, the fastest. ${why}`]];
}

// A warning that the winner changes the training itself.
function caution(run) {
  const { lossy, throughput } = run.winner;
  const { exact, exactness } = run.headline;
  return el("p", { class: "caution" }, tag("lossy"), ` ${lossy} trades accuracy for speed: it changes the training, not only its speed. `,
    exact ? [`The best ${exactness} is trial ${exact.trial} at `, rateOf(exact.throughput, run.unit), run.measuredAgain && !given(exact.first) ? ` (${run.seen} once)` : "", `; the winner is ${number(throughput / exact.throughput, 3)} times as fast.`]
      : `No trial ${exactness} succeeded.`);
}

function throughputTile(run, predicted) {
  const { winner } = run;
  const times = winner.remeasured.length;
  const how = times ? `over ${plural(times, "re-measurement")}` : "within one measurement";
  const spread = given(winner.spread) ? `±${NBSP}${percent(winner.spread)} ${how}` : `±${NBSP}unknown: ${times ? how : "measured once"}`;
  return tile(`Throughput${predicted}`, rate(winner.throughput, run.unit), [
    el("span", {}, spread), given(winner.first) ? el("span", {}, "first ", rateOf(winner.first, run.unit)) : null,
    given(winner.mfu) ? el("span", {}, `${utilisation(winner, winner.config)} (MFU)`) : null]);
}

function memoryTile(run, predicted) {
  const { winner } = run;
  const limit = winner.memory_limit_mib ?? run.headline.limit_mib;
  const free = given(limit) && limit > 0 ? 1 - winner.peak_memory_mib / limit : null;
  return tile(`Peak memory${predicted}`, memory(winner.peak_memory_mib),
    given(free) ? `${percent(Math.max(free, 0))} of ${memory(limit)} left as headroom` : "the limit is not recorded",
    given(free) ? shareBar([{ kind: "fill-memory", size: winner.peak_memory_mib }, { kind: "fill-rest", size: Math.max(limit - winner.peak_memory_mib, 0) }], "share of the memory limit in use") : null);
}

function headline(run) {
  const { winner, base, simulated } = run;
  const { counts, cost } = run.headline;
  const [big, sentence] = verdict(run);
  const predicted = simulated ? ", predicted" : "";
  const tiles = winner ? [throughputTile(run, predicted), given(winner.peak_memory_mib) ? memoryTile(run, predicted) : null] : [];
  if (cost) {
    const lost = cost.device_seconds > 0 ? cost.lost / cost.device_seconds : 0;
    const wall = given(cost.wall_seconds) ? `; ${duration(cost.wall_seconds)} of wall time` : "";
    tiles.push(tile(`Device time${predicted}`, duration(cost.device_seconds), `${lost > 0 ? `${percent(lost)} lost to failures` : "none lost to failures"}${wall}`,
      shareBar(statusParts(cost.by_status), "device time by status")));
  }
  tiles.push(tile(simulated ? "Trials, simulated" : "Trials", number(run.headline.trials, 9), words(STATUSES.filter((each) => counts[each]).map((each) => `${number(counts[each], 9)} ${each}`)) || "none has ended",
    shareBar(statusParts(counts), "trials by status")));
  const { failures } = run.headline;
  return el("section", { id: "headline", class: !winner ? "nothing" : run.headline.gain_shown && run.headline.gain > 1 ? "gain" : "" },
    el("p", { class: "big" }, figureOf(big)),
    el("p", { class: "verdict" }, simulated ? [tag("simulated"), " Nothing was run. "] : run.emulated ? [tag("emulated"), " Some ranks ran alone on one device. "] : null, sentence),
    winner && winner.lossy ? caution(run) : null,
    winner && winner.unconfirmed ? el("p", { class: "caution" }, tag("unconfirmed"), ` ${winner.unconfirmed}.`) : null,
    el("div", { class: "tiles" }, tiles),
    failures ? el("p", { class: "lead", id: "ended" }, `${failures}.`) : null,
    winner ? winning(run, base) : null);
}

// The winning configuration with its differences from the default, and the buttons that copy it.
function winning(run, base) {
  const same = base && base.trial === run.winner.trial;
  const cells = Object.entries(run.winner.config).map(([name, value]) => {
    const before = base && !same ? base.config[name] : undefined;
    const changed = before !== undefined && before !== null && knob(before) !== knob(value);
    return el("div", { class: changed ? "knob changed" : "knob" }, el("dt", {}, name),
      el("dd", {}, knobOf(run, name, value), changed ? el("span", { class: "was" }, ` was ${knob(before)}`) : null));
  });
  return el("div", { id: "winner" }, el("h2", {}, "The winning configuration"),
    base && !same ? el("p", { class: "lead" }, "Marked: differences from the default configuration.") : null,
    el("dl", { class: "knobs" }, cells), exportPanel(run.exports),
    run.reproduce ? el("div", { class: "reproduce" }, el("p", { class: "lead" }, run.simulated ? "Measure it on real devices with" : "Measure it again with"),
      el("pre", { class: "code", tabindex: 0 }, run.reproduce), copyButton("Copy the command", run.reproduce)) : null);
}
