// The report's own figures, as they are.
let run = null;

function begin(document) {
  run = makeRun(document);
}

const CHARTS = {
  progress: () => progressOver(run, courses([run])[0]),
  memory: () => throughputOverMemory(run).querySelector("figure"),
  parallel: () => parallel(run).querySelector("figure"),
};
