// Failures by reason, with the end of a log.

function failureList(run) {
  if (!run.failures.length) return null;
  const lost = run.failures.filter((each) => each.status !== "skipped").reduce((sum, each) => sum + each.trials.length, 0);
  const never = run.failures.filter((each) => each.status === "skipped").reduce((sum, each) => sum + each.trials.length, 0);
  const lead = [lost ? `${plural(lost, "trial")} failed` : "No trial failed", never ? `${never} ${never === 1 ? "was" : "were"} not run, as known not to fit` : ""].filter(Boolean).join("; ");
  return section("failures", "Failures by reason", `${lead}. Reasons that differ only in numbers are listed once, with the text of the last such trial.`,
    run.failures.map((each) => el("article", { class: "failure" },
      el("h3", {}, badge(each.status), el("span", { class: "times" }, ` ${plural(each.trials.length, "trial")}`)),
      el("p", { class: "reason" }, each.reason || "No reason is recorded.", each.alike ? el("span", { class: "aside" }, " (and similar)") : null),
      el("p", { class: "under trials-of" }, `Trial${each.trials.length > 1 ? "s" : ""} ${each.trials.slice(0, 20).join(", ")}${each.trials.length > 20 ? ` and ${each.trials.length - 20} more` : ""}`),
      each.log ? el("details", { open: run.failures.length <= 6 }, el("summary", {}, `Last lines of ${each.log_path} (trial ${each.log_trial})`), el("pre", { class: "code log", tabindex: 0 }, each.log)) : null,
      each.log_why ? el("p", { class: "under" }, each.log_why[0].toUpperCase() + each.log_why.slice(1), ".") : null)));
}
