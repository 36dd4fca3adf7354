// The report: draws the data embedded in the page.

const data = JSON.parse(document.getElementById("data").textContent);
const run = makeRun(data);
run.pick = (row) => showDetails(run, row);
const page = document.getElementById("page");
page.append(...[
  title(run), problemList(run.problems), headline(run), ...FIGURES.map((draw) => draw(run)), failureList(run),
  run.rows.length ? trialTable(run, run.pick).element : null, spaceWords(run), environment(run),
  el("footer", {}, "Made by redline. This page is a single file, loads nothing else and can be shared as it is."),
].filter(Boolean));
onPrint();
