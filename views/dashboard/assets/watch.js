// One run, redrawn where it changed as rows arrive.

const MANY_ROWS = 500;

// Holds a run as the server's answers add up. `take` returns whether anything is new.
function makeHolder(id) {
  let version = "";
  let rows = {};
  const ui = {};
  const holder = {
    run: null,
    async refresh() {
      const news = await ask("api/run", { run: id, have: version });
      if (!news) return false;
      if (news.added && holder.run) {
        const place = new Map((rows.trial || []).map((trial, at) => [trial, at]));
        (news.rows.trial || []).forEach((trial, from) => {
          const at = place.has(trial) ? place.get(trial) : rows.trial.length;
          for (const name of Object.keys(rows)) rows[name][at] = news.rows[name][from];
        });
      } else {
        rows = news.rows;
      }
      version = news.version;
      holder.run = makeRun({ ...news.document, rows, ui, path: id === "." ? news.document.folder : id });
      return true;
    },
  };
  return holder;
}

// What is shown in a place, replaced without the page jumping.
function redrawn(place, parts) {
  place.style.minHeight = `${place.offsetHeight}px`;
  clear(place).append(...parts.flat().filter(Boolean));
  requestAnimationFrame(() => requestAnimationFrame(() => { place.style.minHeight = ""; }));
}

// A place on the page that is redrawn when its key changes.
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
    const told = el("p", { class: "under" });
    const parts = [[el("h4", {}, "For the trainer you use"), formats], [el("h4", {}, "Log"), told, log]];
    // Of a trial that failed the log is what one wants to see.
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
      told.textContent = text.why;
      log.remove();
      return;
    }
    told.append(text.cut ? `The last part of ${number(text.size / 1024, 4)} KiB. ` : "", el("a", { href: `log?${new URLSearchParams({ run: id, trial: row.trial })}`, download: "" }, "Download the whole log"));
    log.textContent = text.text || "It printed nothing.";
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
      // Thousands of trials take a while to draw: between two figures the page may scroll and be typed in.
      if (run.rows.length > MANY_ROWS) await new Promise((resume) => { setTimeout(resume); });
    }
    if (!table && run.rows.length) {
      table = trialTable(run, pick);
      tablePlace.append(table.element);
    }
  }, (error) => gone(holder.run ? [holder.run.path] : [])(error));
}
