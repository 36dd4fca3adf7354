// The form to submit a search.

const FIELDS = [
  ["target", "Model: a preset's name or a hub id", { required: true, value: "gpt2-tiny" }, String],
  ["name", "Name (optional)", {}, String],
  ["devices", "Devices of a trial", { type: "number", min: 1, value: 1 }, Number],
  ["trials", "Trials", { type: "number", min: 1, value: 16 }, Number],
  ["seq_len", "Sequence length, tokens", { type: "number", min: 1 }, Number],
  ["global_batch", "Global batch, samples", { type: "number", min: 1 }, Number],
  ["time", "Time, such as 30m", {}, String],
  ["priority", "Priority, -100 to 100", { type: "number", min: -100, max: 100, value: 0 }, Number],
  ["device", "Kind of device (empty for any)", {}, String],
];
const OF_THE_QUEUE = ["name", "priority", "device"];

function submitPage(page) {
  page.append(el("h1", {}, "Submit a search"));
  if (session.role === "reader") {
    page.append(el("p", {}, "Your role, reader, may not submit: ask an admin for the role submitter."));
    return () => {};
  }
  const wrong = el("p", { class: "wrong", role: "alert" });
  const inputs = Object.fromEntries(FIELDS.map(([name, , attributes]) => [name, el("input", { name, spellcheck: "false", ...attributes })]));
  const button = el("button", { type: "submit", class: "primary" }, "Submit");
  const form = el("form", { class: "service-form", novalidate: true }, FIELDS.map(([name, label]) => el("label", {}, label, inputs[name])), wrong, button);
  // The key only changes with the form's contents, so that a repeated click does not submit twice.
  let key = crypto.randomUUID ? crypto.randomUUID() : String(Math.random()).slice(2);
  form.addEventListener("input", () => { key = `${key.slice(0, 36)}-${Date.now()}`; });
  form.addEventListener("submit", async (event) => {
    event.preventDefault();
    wrong.textContent = "";
    button.disabled = true;
    const body = { request: {} };
    for (const [name, , , read] of FIELDS) {
      const value = inputs[name].value.trim();
      if (value === "") continue;
      (OF_THE_QUEUE.includes(name) ? body : body.request)[name] = read(value);
    }
    try {
      const made = await ask("v1/searches", body, { "idempotency-key": key });
      location.hash = `#/search/${made.id}`;
    } catch (error) {
      if (!(error instanceof Refused) && !(error instanceof Unreachable)) throw error;
      wrong.textContent = error instanceof Refused ? error.message : "The server does not answer; try again.";
      const field = error.field ? inputs[error.field.split(".").at(-1)] : null;
      if (field) field.focus();
    } finally {
      button.disabled = false;
    }
  });
  page.append(el("p", { class: "lead" }, el("code", {}, "redline submit"), " has more options."), form);
  return () => {};
}
