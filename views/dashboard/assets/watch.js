// The page of a run; changed parts are redrawn as rows arrive.

const MANY_ROWS = 500;

// The state of a run, from the answers of the server. `take` returns true if anything changed.
function makeHolder(id) {
  let version = "";
  const ui = {};
  const holder = {
    run: null,
    async refresh() {
      const news = await ask("api/run", { run: id, have: version });
      if (!news) return false;
      version = news.version;
      holder.run = makeRun({ ...news.document, ui, path: id === "." ? news.document.folder : id });
      return true;
    },
  };
  return holder;
}

// Replaces the contents of a part without moving the page.
function redrawn(place, parts) {
  place.style.minHeight = `${place.offsetHeight}px`;
  clear(place).append(...parts.flat().filter(Boolean));
  requestAnimationFrame(() => requestAnimationFrame(() => { place.style.minHeight = ""; }));
}

// A part of the page that is redrawn when its key changes.
function slot(make, key) {
  const place = el("div", { class: "slot" });
  let last = null;
  return {
    place,
    update(run) {
      const now = key(run);
      if (now === last) return;
      last = now;
      redrawn(place, [make(run)]);
    },
  };
}

function logAndExports(id) {
  return async (row, box) => {
    const formats = el("div", {});
    const log = el("pre", { class: "code log", tabindex: 0 }, "…");
    const note = el("p", { class: "under" });
    const parts = [[el("h4", {}, "Export"), formats], [el("h4", {}, "Log"), note, log]];
    // For a failed trial the log comes first.
    box.append(...(row.status === "ok" ? parts : parts.reverse()).flat());
    let answers;
    try {
      answers = await Promise.all([ask("api/exports", { run: id, trial: row.trial }), ask("api/log", { run: id, trial: row.trial })]);
    } catch (error) {
      if (!(error instanceof Unreachable) && !(error instanceof Refused)) throw error;
      answers = [[], { why: error instanceof Refused ? `${error.message}.` : "The dashboard's server does not answer." }];
    }
    const [list, text] = answers;
    formats.append(exportPanel(list) || "");
    if (text.why) {
      note.textContent = text.why;
      log.remove();
      return;
    }
    note.append(text.cut ? `The last part of ${number(text.size / 1024, 4)} KiB. ` : "", el("a", { href: `log?${new URLSearchParams({ run: id, trial: row.trial })}`, download: "" }, "Download the whole log"));
    log.textContent = text.text || "The trial printed nothing.";
    log.scrollTop = log.scrollHeight;
  };
}

function watchPage(page, id) {
  const holder = makeHolder(id);
  const more = logAndExports(id);
  const pick = (row) => showDetails(holder.run, row, more);
  const all = (run) => `${run.rows.length} ${run.made} ${run.state}`;
  const text = (...names) => (run) => JSON.stringify(names.map((name) => run[name]));
  const slots = [
    slot((run) => title(run, el("p", { class: "row links" }, el("a", { href: "#/" }, "All runs"), el("a", { href: `table?${new URLSearchParams({ run: id })}`, download: "" }, "Download the table (CSV)"))), text("name", "state", "made", "winner")),
    slot((run) => problemList(run.problems), text("problems")),
    slot((run) => headline(run), text("headline", "exports", "reproduce")),
    ...FIGURES.map((draw) => slot(draw, all)),
    slot(failureList, text("failures")),
  ];
  const tablePlace = el("div", {});
  const after = [slot(spaceWords, text("space")), slot(environment, text("environment", "asked"))];
  page.append(...slots.map((each) => each.place), tablePlace, ...after.map((each) => each.place));
  let table = null;
  return poll(async () => {
    if (!await holder.refresh()) return;
    const run = holder.run;
    run.pick = pick;
    document.title = `${run.name}: redline`;
    if (table) table.update(run);
    for (const each of [...slots, ...after]) {
      each.update(run);
      // Thousands of trials take time to draw: between two figures the page handles input.
      if (run.rows.length > MANY_ROWS) await new Promise((resume) => { setTimeout(resume); });
    }
    if (!table && run.rows.length) {
      table = trialTable(run, pick);
      tablePlace.append(table.element);
    }
  }, (error) => gone(holder.run ? [holder.run.path] : [])(error));
}
