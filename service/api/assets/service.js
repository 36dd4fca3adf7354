// Routing: shows the page that the address names.

let leave = null;

function route() {
  if (leave) leave();
  const page = clear(document.getElementById("page"));
  scrollTo(0, 0);
  const [, kind, id] = location.hash.replace(/^#/, "").split("/");
  for (const link of document.querySelectorAll(".service-nav a")) {
    if (link.getAttribute("href") === (kind ? `#/${kind}` : "#/")) link.setAttribute("aria-current", "page");
    else link.removeAttribute("aria-current");
  }
  if (kind === "devices") leave = devicesPage(page);
  else if (kind === "submit") leave = submitPage(page);
  else if (kind === "events") leave = eventsPage(page);
  else if (kind === "search" && id) leave = searchPage(page, id);
  else leave = queuePage(page);
}

ask("v1/me").then((found) => {
  session = found;
  if (found.role === "reader") document.querySelector(".service-nav a[href='#/submit']").remove();
  document.getElementById("who").textContent = `${found.name}, ${found.role}`;
  addEventListener("hashchange", route);
  route();
  listen();
}).catch((error) => { if (!(error instanceof Refused) && !(error instanceof Unreachable)) throw error; complain(error); });
