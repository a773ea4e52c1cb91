"use strict";

// A form with a search field and lists filters items: those with all words of the search and the chosen values. The
// choice is kept in the address, such as #verdict=contradicted&section=Convergence.
const FIELDS = ["text", "verdict", "kind", "whose", "section"];
const asks = () => FIELDS.some((name) => new RegExp(`(^|[#&])${name}=`).test(location.hash));

function narrowing(form) {
  const items = [...document.querySelectorAll(form.dataset.filters)];
  // The statement of an item, without sources and metrics, whose words nearly all items share.
  const told = (item) => [item?.dataset.search, ...((item?.querySelector("th, summary") ?? item)?.childNodes ?? [])]
    .map((part) => (part?.className === "source" ? "" : part?.textContent ?? part ?? "")).join(" ");
  const about = (item) => `${told(item)} ${told(item.parentElement.querySelector(":scope > .statement"))}`;
  const words_of = new Map(items.map((item) => [item, about(item).toLowerCase()]));
  const fields = FIELDS.map((name) => form.elements[name]).filter(Boolean);
  let unknown = [];
  const update = () => {
    const words = form.elements.text.value.toLowerCase().split(/\s+/).filter(Boolean);
    const lists = fields.filter((field) => field.name !== "text" && field.value);
    let shown = 0;
    for (const item of items) {
      const fits = words.every((word) => words_of.get(item).includes(word))
        && lists.every((field) => item.dataset[field.name] === field.value);
      item.hidden = !fits;
      shown += fits ? 1 : 0;
    }
    for (const head of document.querySelectorAll("tr.statement")) {
      let next = head.nextElementSibling;
      while (next && next.hidden && !next.matches(".statement")) next = next.nextElementSibling;
      head.hidden = !next || next.matches(".statement");
    }
    const count = shown === items.length ? `${shown}` : `${shown} of ${items.length}`;
    form.elements.count.value = [`${count} ${form.dataset.noun}`, ...unknown].join("; ");
  };
  const write = () => {
    const chosen = new URLSearchParams(fields.filter((field) => field.value).map((field) => [field.name, field.value]));
    unknown = [];
    history.replaceState(null, "", chosen.size ? `#${chosen}` : location.pathname + location.search);
    update();
  };
  const read = () => {
    const chosen = new URLSearchParams(location.hash.slice(1));
    unknown = [];
    for (const field of fields) {
      const asked = chosen.get(field.name) ?? "";
      field.value = asked;
      if (asked && field.value !== asked) {
        field.value = "";
        unknown.push(`there is no ${field.name} “${asked}”, so all are shown`);
      }
    }
    update();
  };
  form.addEventListener("input", write);
  form.addEventListener("submit", (event) => event.preventDefault());
  form.addEventListener("reset", () => setTimeout(write));
  if (asks()) read();
  window.addEventListener("hashchange", () => { if (asks()) read(); });
}
for (const form of document.querySelectorAll("form[data-filters]")) narrowing(form);

// A link to something folded or filtered out shows it first.
function reveal() {
  const target = document.getElementById(decodeURIComponent(location.hash.slice(1)));
  if (!target) return;
  if (target.hidden) for (const form of document.querySelectorAll("form[data-filters]")) form.reset();
  for (let at = target; at; at = at.parentElement) { if (at.tagName === "DETAILS") at.open = true; }
  setTimeout(() => target.scrollIntoView({ block: target.tagName === "TR" ? "center" : "start" }));
}
window.addEventListener("hashchange", reveal);
reveal();

// A figure opens in a window of its own size; Escape closes it, arrows scroll it.
const large = document.getElementById("large");
document.addEventListener("click", (event) => {
  const figure = event.target.closest("button.enlarge");
  if (!figure) return;
  const image = figure.querySelector("img");
  const shown = large.querySelector("img");
  shown.src = (matchMedia("(prefers-color-scheme: dark)").matches && figure.dataset.dark) || image.src;
  shown.alt = image.alt;
  shown.style.width = `${Math.max(1.6 * image.getAttribute("width"), innerWidth - 80)}px`;
  large.showModal();
});

// The list of all exhibits, except on the first page, which has it in its text.
const list = document.querySelector("[data-here]");
list?.replaceChildren(...CONTENTS.map(([address, title]) => {
  const link = Object.assign(document.createElement("a"), { href: address, textContent: title });
  if (address === list.dataset.here) link.ariaCurrent = "page";
  const item = document.createElement("li");
  item.append(link);
  return item;
}));

// The list of exhibits is folded on pages where it comes before the text.
if (innerWidth < 1080) for (const list of document.querySelectorAll("nav details")) list.open = false;

async function copy(text) {
  if (navigator.clipboard && window.isSecureContext) return navigator.clipboard.writeText(text);
  const field = document.createElement("textarea");
  field.value = text;
  document.body.append(field);
  field.select();
  document.execCommand("copy");
  field.remove();
}
for (const command of document.querySelectorAll(".command")) {
  const button = document.createElement("button");
  Object.assign(button, { type: "button", className: "copy", textContent: "copy", ariaLabel: "copy the command" });
  command.append(button);
}
document.addEventListener("click", async (event) => {
  if (!event.target.classList.contains("copy")) return;
  await copy(event.target.previousElementSibling.textContent);
  event.target.textContent = "copied";
  setTimeout(() => { event.target.textContent = "copy"; }, 1500);
});
