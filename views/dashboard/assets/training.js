// The page of a training; changed parts are redrawn as the log grows.

function trainingLink(id) {
  return `#/training/${encodeURIComponent(id)}`;
}

function trainingTitle(training) {
  return el("header", { class: "title" },
    el("div", {}, el("h1", {}, training.name), el("span", { class: `state state-${training.state}`, title: TRAIN_STATE_WORDS[training.state] }, STATES[training.state])),
    el("p", { class: "identity" }, [["Folder", training.path], ["Ranks", given(training.devices) ? number(training.devices, 9) : ""], ["Begun", given(training.began) ? moment(training.began) : ""]]
      .filter(([, value]) => value).map(([name, value]) => el("span", {}, `${name} `, el("strong", {}, value)))),
    training.state === "finished" ? null : el("p", { class: "under" }, TRAIN_STATE_WORDS[training.state]),
    training.unread > 0 ? el("p", { class: "under", role: "status" }, `Reading the log: ${memory(training.unread / 1048576)} left.`) : null,
    el("p", { class: "row links" }, el("a", { href: "#/" }, "All runs")));
}

function trainingTiles(training) {
  const { last, steps, step } = training;
  const held = training.held_out[0].length ? `held out ${number(training.held_out[1].at(-1), 5)} at step ${number(training.held_out[0].at(-1), 15)}` : "nothing is held out";
  const speed = training.unit === "samples/s" ? last.samples_per_second : last.tokens_per_second;
  const left = given(steps) ? Math.max(steps - step, 0) : 0;
  const saved = training.checkpoints.filter((each) => !each.failure).at(-1);
  const failed = training.checkpoints.filter((each) => each.failure);
  return el("section", { id: "headline" }, el("div", { class: "tiles five" },
    tile("Step", number(step, 15), [el("span", {}, given(steps) ? `of ${number(steps, 15)}` : ""), training.state === "running" && given(last.seconds_left) ? el("span", { id: "left" }, `${duration(last.seconds_left)} left`) : null],
      given(steps) ? shareBar([{ kind: "fill-memory", size: step }, { kind: "fill-rest", size: left }], "share of the steps that are done") : null),
    tile("Loss", number(last.loss, 5), held),
    tile("Throughput", rate(speed, training.unit), [el("span", {}, given(last.step_ms) ? `${milliseconds(last.step_ms)} a step` : ""), given(last.mfu) ? el("span", {}, `${percent(last.mfu)} of peak (MFU)`) : null]),
    tile("Peak memory", memory(last.memory_mib), given(last.lr) ? `learning rate ${number(last.lr, 3)}${given(last.grad_norm) ? `, gradient norm ${number(last.grad_norm, 3)}` : ""}` : ""),
    tile("Last checkpoint", saved ? `step ${number(saved.step, 15)}` : "none", failed.length ? el("span", { class: "failed-words" }, `${plural(failed.length, "checkpoint")} not saved: ${failed.at(-1).failure}`) : saved ? `training paused for ${duration(saved.stalled)} of ${duration(saved.seconds)}` : "none saved yet")));
}

function strategyTable(training) {
  if (!training.strategies.length) return null;
  const before = new Map();
  training.strategies.forEach((each, at) => before.set(each, training.strategies[at - 1]));
  const knobs = (each) => Object.entries(each.configuration).map(([name, value]) => {
    const was = before.get(each);
    const changed = was && knob(was.configuration[name]) !== knob(value);
    return el("div", { class: changed ? "knob changed" : "knob" }, el("dt", {}, name), el("dd", {}, knob(value), changed ? el("span", { class: "was" }, ` was ${knob(was.configuration[name])}`) : null));
  });
  const latest = [...training.strategies].reverse();
  return section("configurations", "Configurations", training.strategies.length > 1 ? "The latest first. Marked: differences from the one before." : null,
    latest.map((each) => el("div", { class: "strategy", "data-strategy": each.number },
      el("h3", {}, `#${each.number}, from step ${number(each.step, 15)}, on ${plural(each.devices, "rank")}`), el("p", { class: "under" }, each.why), el("dl", { class: "knobs" }, knobs(each)))));
}

// Text of a line of the log.
function logWords(line, unit) {
  const step = `step ${number(line.step, 15)}`;
  if (line.kind === "step") {
    const speed = unit === "samples/s" ? line.samples_per_second : line.tokens_per_second;
    return [step, `loss ${number(line.loss, 6)}`, `lr ${number(line.lr, 3)}`, given(line.grad_norm) ? `norm ${number(line.grad_norm, 3)}` : "", rate(speed, unit), given(line.memory_mib) ? memory(line.memory_mib) : ""].filter(Boolean).join("  ");
  }
  if (line.kind === "evaluation") return `${step}  held-out loss ${number(line.loss, 6)}`;
  if (line.kind === "checkpoint") return line.failure ? `${step}  CHECKPOINT NOT SAVED: ${line.failure}` : `${step}  checkpoint saved in ${duration(line.seconds)}`;
  if (line.kind === "resumed") return `${step}  going on from ${line.checkpoint}`;
  if (line.kind === "end") return `${step}  ${line.stopped ? "ended early" : "ended"}${line.failure ? `: ${line.failure}` : ""}`;
  return `note: ${line.text}`;
}

function logSection(training) {
  if (!training.lines.length) return null;
  const box = el("pre", { class: "code log", tabindex: 0 }, training.lines.map((line) => [el("span", { class: line.failure ? "failed-words" : null }, `${given(line.time) ? moment(line.time).slice(11, 19) : ""}  ${logWords(line, training.unit)}`), "\n"]));
  requestAnimationFrame(() => { box.scrollTop = box.scrollHeight; });
  return section("log", "The end of the log", null, box);
}

// The output of the ranks, requested with a button.
function printedSection(id) {
  const source = el("p", { class: "under" });
  const box = el("pre", { class: "code log", tabindex: 0, hidden: true });
  const show = async () => {
    const answer = await ask("api/printed", { training: id });
    source.textContent = answer.why || `${answer.cut ? "The last part of " : ""}${answer.name}`;
    box.hidden = Boolean(answer.why);
    box.textContent = answer.text || "The ranks printed nothing.";
    box.scrollTop = box.scrollHeight;
  };
  const button = el("button", { type: "button" }, "Show the output of the ranks");
  button.addEventListener("click", () => show().catch((error) => {
    if (!(error instanceof Unreachable) && !(error instanceof Refused)) throw error;
    source.textContent = error instanceof Refused ? error.message : "The dashboard's server does not answer.";
  }));
  return el("section", { id: "printed" }, button, source, box);
}

function trainingPage(page, id) {
  let version = "";
  let training = null;
  const text = (...names) => (each) => JSON.stringify(names.map((name) => each[name]));
  const drawn = text("curves", "held_out", "strategies", "checkpoints", "resumed");
  const slots = [
    slot(trainingTitle, text("name", "state", "devices", "began", "unread")),
    slot((each) => problemList(each.problems), text("problems")),
    slot(trainingTiles, text("last", "held_out", "checkpoints", "state", "step", "steps")),
    slot(lossFigure, drawn),
    slot(courseFigure, drawn),
    slot(strategyTable, text("strategies")),
    slot(logSection, text("lines")),
  ];
  const asked = slot((each) => (each.asked.length ? section("environment", "Request and data", null, el("div", { class: "groups" }, [["Request", each.asked], ["Data", each.data]].filter(([, list]) => list.length).map(([title, list]) => el("div", {}, el("h3", {}, title), pairs(list))))) : null), text("asked", "data"));
  page.append(...slots.map((each) => each.place), printedSection(id), asked.place);
  return poll(async () => {
    const news = await ask("api/training", { training: id, have: version });
    if (!news) return;
    version = news.version;
    training = { ...news, reach: Math.max(news.step, 1), path: id === "." ? news.folder : id };
    document.title = `${training.name}: redline`;
    hideTip();
    for (const each of [...slots, asked]) each.update(training);
  }, (error) => gone(training ? [training.path] : [])(error));
}

// A line in the list of trainings.
function trainingLine(each, root) {
  return el("li", { class: "run-line training-line", "data-training": each.training },
    el("span", {}),
    el("a", { class: "run-name", href: trainingLink(each.training) }, el("span", {}, el("strong", {}, each.name)), el("span", { class: "under" }, each.training === "." ? root : each.training), given(each.devices) ? el("span", { class: "under" }, plural(each.devices, "rank")) : null),
    el("span", { class: "run-state" }, el("span", { class: `state state-${each.state}`, title: TRAIN_STATE_WORDS[each.state] }, STATES[each.state]),
      each.problems ? el("span", { class: "warned", title: "Some files could not be read; see its page." }, "⚠ unreadable files") : null),
    lossline(each.spark),
    el("span", { class: "run-best" }, el("strong", {}, given(each.loss) ? `loss ${number(each.loss, 4)}` : MISSING), el("span", { class: "under" }, [given(each.held_out) ? `held out ${number(each.held_out, 4)}` : "", given(each.speed) ? rate(each.speed, each.unit) : ""].filter(Boolean).join(", "))),
    el("span", { class: "run-trials" }, `step ${number(each.step, 15)}${given(each.steps) ? ` of ${number(each.steps, 15)}` : ""}`, given(each.steps) ? shareBar([{ kind: "fill-memory", size: each.step }, { kind: "fill-rest", size: Math.max(each.steps - each.step, 0) }], "share of the steps that are done") : null),
    el("span", { class: "under run-when" }, el("span", { title: "last changed" }, ago(each.changed)), each.state === "running" && given(each.seconds_left) ? el("span", {}, `${duration(each.seconds_left)} left`) : null));
}

function lossline(values) {
  const pen = drawing(120, 28, "spark", { role: "img", "aria-label": "loss so far" });
  const found = extent(values);
  if (!found) return pen.root;
  const [low, high] = found;
  const at = values.map((each, index) => [3 + (values.length > 1 ? index / (values.length - 1) : 1) * 110, high > low ? 24 - ((each - low) / (high - low)) * 20 : 14]);
  pen.path("best", through(at));
  pen.dot("spark-end", ...at.at(-1), 3);
  return pen.root;
}
