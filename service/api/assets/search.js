// A search: its state, its actions, and its best configuration. The page of its run has its trials and figures.

function knobsOf(config) {
  return Object.entries(config).map(([name, value]) => el("div", { class: "knob" }, el("dt", {}, name), el("dd", {}, String(value))));
}

function runOf(search) {
  return search.trials ? `runs/#/run/${encodeURIComponent(search.id)}` : `#/search/${search.id}`;
}

function searchPage(page, id) {
  const alert = el("p", { class: "wrong", role: "alert" });
  const head = el("div"), buttons = el("p", { class: "row actions" }), best = el("div");
  page.append(head, buttons, alert, best);
  let shown = "";
  return live(async () => {
    const search = await ask(`v1/searches/${encodeURIComponent(id)}`);
    clear(head).append(
      el("h1", {}, search.name || search.id), el("p", {}, state(search.state), ` ${search.reason}`),
      el("p", { class: "lead" }, `${search.id}, submitted by ${search.user} ${when(search.created)}, ${plural(search.devices, "device")} a trial${search.device ? ` of ${search.device}` : ""}, ${plural(search.trials, "trial")}`),
      el("p", { class: "row links" }, search.trials ? el("a", { href: runOf(search) }, "The run with its trials and figures") : null));
    // Redrawn only if the available actions change, so that a button keeps its focus and its question.
    if (shown !== search.state) {
      shown = search.state;
      clear(buttons).append(...Object.keys(ACTIONS).map((each) => actionButton(each, search, alert, each === "delete" ? () => { location.hash = "#/"; } : undefined)).filter(Boolean));
    }
    clear(best).append(...(search.best ? [el("h2", {}, search.state === "running" ? "Best so far" : "Best"), el("p", {}, bestOf(search.best)), el("dl", { class: "knobs" }, knobsOf(search.best.config))] : []));
  });
}
