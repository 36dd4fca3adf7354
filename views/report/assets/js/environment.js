// The request and the environment.

function environment(run) {
  const groups = [["Request", run.asked], ...run.environment].filter(([, list]) => list.length);
  if (!groups.length) return null;
  return section("environment", run.simulated ? "Request and simulated environment" : "Request and environment", null,
    el("div", { class: "groups" }, groups.map(([title, list]) => el("div", {}, el("h3", {}, title), pairs(list)))));
}
