"use strict";

// A form with a search field narrows a list down to the items that hold every word of it.
function filtered(form, items, noun) {
  const update = () => {
    const words = form.elements.text.value.toLowerCase().split(/\s+/).filter(Boolean);
    const kind = form.elements.kind ? form.elements.kind.value : "";
    let shown = 0;
    for (const item of items) {
      const fits = words.every((word) => item.dataset.search.includes(word))
        && (!kind || item.dataset.kind === kind);
      item.hidden = !fits;
      shown += fits ? 1 : 0;
    }
    form.elements.count.value = shown === items.length ? `${shown} ${noun}` : `${shown} of ${items.length} ${noun}`;
  };
  form.addEventListener("input", update);
  form.addEventListener("submit", (event) => event.preventDefault());
  form.addEventListener("reset", () => setTimeout(update));
  return update;
}

for (const form of document.querySelectorAll("form[data-filters]")) {
  filtered(form, [...document.querySelectorAll(form.dataset.filters)], form.dataset.noun);
}

// A link into something folded or filtered away shows it first.
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
  shown.src = image.src;
  shown.alt = image.alt;
  shown.style.width = `${Math.max(1.6 * image.naturalWidth, innerWidth - 80)}px`;
  large.showModal();
});

// The list of exhibits is folded where it would stand before the text.
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
document.addEventListener("click", async (event) => {
  if (!event.target.classList.contains("copy")) return;
  await copy(event.target.previousElementSibling.textContent);
  event.target.textContent = "copied";
  setTimeout(() => { event.target.textContent = "copy"; }, 1500);
});
