"use strict";
// What the theme leaves out for readers without a mouse or a screen: a name of the search dialog, and keys that scroll
// code and tables which are wider than their column.
document$.subscribe(() => {
  document.querySelector(".md-search")?.setAttribute("aria-label", "Search");
  for (const wide of document.querySelectorAll(".md-typeset pre > code, .md-typeset__scrollwrap")) wide.tabIndex = 0;
});
