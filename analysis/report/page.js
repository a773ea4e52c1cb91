"use strict";

// A form with a search field narrows a list down to the items that hold every word of it.
function filtered(form, items, noun) {
  const update = () => {
    const words = form.elements.text.value.toLowerCase().split(/\s+/).filter(Boolean);
    const section = form.elements.section ? form.elements.section.value : "";
    const kind = form.elements.kind ? form.elements.kind.value : "";
    let shown = 0;
    for (const item of items) {
      const fits = words.every((word) => item.dataset.search.includes(word))
        && (!section || item.dataset.section === section) && (!kind || item.dataset.kind === kind);
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

const claimForm = document.getElementById("claim-filter");
const updateClaims = filtered(claimForm, [...document.querySelectorAll("#claim-table tbody tr")], "claims");
const recordForm = document.getElementById("record-filter");
const updateRecords = filtered(recordForm, [...document.querySelectorAll("#record-list > details")], "records");

// Tiles and sections of the summary choose what the table of claims shows.
for (const link of document.querySelectorAll("[data-show-verdict], [data-show-section]")) {
  link.addEventListener("click", () => {
    claimForm.reset();
    claimForm.elements.kind.value = link.dataset.showVerdict || "";
    claimForm.elements.section.value = link.dataset.showSection || "";
    setTimeout(updateClaims);
  });
}

// A link into something folded or filtered away shows it first.
function reveal() {
  const target = document.getElementById(decodeURIComponent(location.hash.slice(1)));
  if (!target) return;
  if (target.hidden && target.closest("#claim-table")) { claimForm.reset(); }
  if (target.hidden && target.closest("#record-list")) { recordForm.reset(); }
  for (let at = target; at; at = at.parentElement) { if (at.tagName === "DETAILS") at.open = true; }
  setTimeout(() => target.scrollIntoView({ block: target.tagName === "TR" ? "center" : "start" }));
}
window.addEventListener("hashchange", reveal);
reveal();

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
