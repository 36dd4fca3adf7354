// What the report and the dashboard's page of a run begin with, and the figures they show.

function problemList(problems) {
  if (!problems.length) return null;
  const shown = problems.slice(0, 8);
  return el("div", { class: "problems", role: "note" }, el("h2", {}, "What could not be read"),
    el("ul", {}, shown.map((each) => el("li", {}, each))), problems.length > shown.length ? el("p", {}, `and ${problems.length - shown.length} more.`) : null);
}

function title(run, ...more) {
  return el("header", { class: "title" },
    el("div", {}, el("h1", {}, run.name), el("span", { class: `state state-${run.state}`, title: STATE_WORDS[run.state] }, STATES[run.state]), tagsOf(run, run.winner && run.winner.lossy)),
    el("p", { class: "identity" }, [["Folder", run.path || run.folder], ["Devices", run.devices], ["Begun", run.began]].filter(([, value]) => value).map(([name, value]) => el("span", {}, `${name} `, el("strong", {}, value)))),
    el("p", { class: "under" }, `Made from ${run.table} on ${moment(run.made)}. ${run.state === "finished" ? "" : STATE_WORDS[run.state]}`), more);
}

// The figures, each a section of its own or null where a run has nothing for it.
const FIGURES = [progress, throughputOverMemory, parallel, effects, predicted, timeline];
