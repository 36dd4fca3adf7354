// Buttons that copy a text, also in pages without clipboard access (plain HTTP, some file://).

async function copyText(text) {
  if (navigator.clipboard && isSecureContext) {
    try {
      await navigator.clipboard.writeText(text);
      return true;
    } catch (error) {
      if (!(error instanceof DOMException)) throw error;
    }
  }
  const area = el("textarea", { class: "offscreen", readonly: true, "aria-hidden": "true" });
  area.value = text;
  (document.querySelector("dialog[open]") || document.body).append(area);
  area.select();
  const done = document.execCommand("copy");
  area.remove();
  return done;
}

function copyButton(label, text, attributes = {}) {
  const button = el("button", { type: "button", ...attributes }, label);
  let timer = 0;
  button.addEventListener("click", async () => {
    const done = await copyText(typeof text === "function" ? await text() : text);
    button.textContent = done ? "Copied" : "Select and copy manually";
    button.classList.toggle("done", done);
    clearTimeout(timer);
    timer = setTimeout(() => { button.textContent = label; button.classList.remove("done"); }, 1600);
  });
  return button;
}

// The winner in every export format; one is shown at a time.
function exportPanel(list) {
  if (!list.length) return null;
  const shown = el("pre", { class: "code", tabindex: 0 });
  const about = el("p", { class: "under" });
  const bar = el("div", { class: "bar" });
  const menu = el("div", { class: "chips", role: "group", "aria-label": "Format" });
  const choose = (each, button) => {
    for (const other of menu.children) other.setAttribute("aria-pressed", String(other === button));
    about.textContent = [each.about, ...(each.notes || [])].filter(Boolean).join(" · ");
    shown.textContent = each.error || each.text;
    clear(bar);
    if (!each.error) bar.append(copyButton(`Copy as ${each.target}`, each.text, { class: "primary", "data-copy": each.target }));
  };
  list.forEach((each) => {
    const button = el("button", { type: "button", "aria-pressed": "false", "data-target": each.target }, each.target);
    button.addEventListener("click", () => choose(each, button));
    menu.append(button);
  });
  choose(list[0], menu.firstChild);
  return el("div", { class: "exports" }, el("div", { class: "row" }, menu, bar), about, shown);
}
