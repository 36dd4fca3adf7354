// What was asked, and where it ran.

function environment(run) {
  const groups = [["Asked", run.asked], ...run.environment].filter(([, list]) => list.length);
  if (!groups.length) return null;
  return section("environment", run.simulated ? "What was asked, and where it was predicted" : "What was asked, and where it ran", null,
    el("div", { class: "groups" }, groups.map(([title, list]) => el("div", {}, el("h3", {}, title), pairs(list)))));
}
