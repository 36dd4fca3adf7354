// Selects the page of the address.

let leave = null;

function route() {
  if (leave) leave();
  hideTip();
  document.querySelectorAll("dialog[open]").forEach((each) => each.close());
  const page = clear(document.getElementById("page"));
  scrollTo(0, 0);
  const [, kind, ...ids] = location.hash.replace(/^#/, "").split("/");
  const named = ids.map((each) => { try { return decodeURIComponent(each); } catch (error) { if (error instanceof URIError) return each; throw error; } });
  if (kind === "run" && named.length === 1) leave = watchPage(page, named[0]);
  else if (kind === "overlay" && named.length) leave = overlayPage(page, named);
  else if (document.documentElement.dataset.list) location.replace(document.documentElement.dataset.list);
  else leave = listPage(page);
}

addEventListener("hashchange", route);
route();
onPrint();
