// A search: how it stands, its best configuration, its trials as they end.

const SHOWN_TRIALS = 500;

function knobsOf(config) {
  return Object.entries(config).map(([name, value]) => el("div", { class: "knob" }, el("dt", {}, name), el("dd", {}, String(value))));
}

function searchPage(page, id) {
  const told = el("p", { class: "wrong", role: "alert" });
  const head = el("div"), best = el("div"), trials = el("div");
  page.append(head, told, best, trials);
  return live(async () => {
    const [search, rows] = await Promise.all([ask(`v1/searches/${encodeURIComponent(id)}`), ask(`v1/searches/${encodeURIComponent(id)}/trials`)]);
    const ran = search.state === "running" || rows.length;
    clear(head).append(
      el("h1", {}, search.name || search.id), el("p", {}, state(search.state), ` ${search.reason}`),
      el("p", { class: "lead" }, `${search.id}, submitted by ${search.user} ${when(search.created)}, ${plural(search.devices, "device")} a trial${search.device ? ` of ${search.device}` : ""}`),
      el("p", {}, cancelButton(search, told), ran ? el("a", { href: `runs/#/run/${encodeURIComponent(id)}` }, "The run with its figures") : null, " ", rows.length ? el("a", { href: `v1/searches/${id}/trials.csv` }, "trials.csv") : null));
    clear(best).append(...(search.best ? [el("h2", {}, search.state === "running" ? "Best so far" : "Best"), el("p", {}, bestOf(search.best)), el("dl", { class: "knobs" }, knobsOf(search.best.config))] : []));
    clear(trials).append(...(rows.length ? [el("h2", {}, plural(rows.length, "trial")), table(["trial", "status", "throughput", "peak MiB", "reason", "log"], rows.slice(-SHOWN_TRIALS).reverse().map((each) => el("tr", { "data-trial": each.trial },
      el("td", { class: "number" }, String(each.trial)), el("td", {}, each.status), el("td", { class: "number" }, number(each.throughput, 5)), el("td", { class: "number" }, number(each.peak_memory_mib)),
      el("td", {}, each.reason || ""), el("td", {}, each.log ? el("a", { href: `v1/searches/${id}/logs/${each.trial}` }, "log") : null))), "Trials")] : []));
  });
}
