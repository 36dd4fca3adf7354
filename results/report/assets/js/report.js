// The report: the data that stands in the page, drawn once.

const data = JSON.parse(document.getElementById("data").textContent);
const run = makeRun(data);
run.pick = (row) => showDetails(run, row);
const page = document.getElementById("page");
page.append(...[title(run), problemList(run.problems), ...figures(run), run.rows.length ? trialTable(run, run.pick).element : null, ...background(run)].filter(Boolean),
  el("footer", {}, "Made by redline. This page is one file, fetches nothing and can be passed on as it is."));
onPrint();
