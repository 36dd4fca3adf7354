// The head of the report and of the dashboard's page of a run, and the figures of both.

function problemList(problems) {
  if (!problems.length) return null;
  const shown = problems.slice(0, 8);
  return el("div", { class: "problems", role: "note" }, el("h2", {}, "Problems with the files of the run"),
    el("ul", {}, shown.map((each) => el("li", {}, each))), problems.length > shown.length ? el("p", {}, `and ${problems.length - shown.length} more.`) : null);
}

function title(run, ...more) {
  return el("header", { class: "title" },
    el("div", {}, el("h1", {}, run.name), el("span", { class: `state state-${run.state}`, title: STATE_WORDS[run.state] }, STATES[run.state]), tagsOf(run, run.winner && run.winner.lossy)),
    el("p", { class: "identity" }, [["Folder", run.path || run.folder], ["Devices", run.devices], ["Started", run.began]].filter(([, value]) => value).map(([name, value]) => el("span", {}, `${name} `, el("strong", {}, value)))),
    el("p", { class: "under" }, `Made on ${moment(run.made)}. ${run.state === "finished" ? "" : STATE_WORDS[run.state]}`), more);
}

// The figures; each returns a section, or null for a run without its data.
const FIGURES = [progress, throughputOverMemory, parallel, effects, predicted];
