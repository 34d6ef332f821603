// j and k move through the rows of the page's tables, Enter opens one, / filters, g goes to a step, u one level up.
"use strict";
(() => {
  const rows = () => [...document.querySelectorAll("main tbody tr")].filter((row) => !row.hidden && row.querySelector("a"));
  const link = (row) => row.querySelector("a");
  const move = (by) => {
    const all = rows();
    if (!all.length) return;
    const now = all.findIndex((row) => row.contains(document.activeElement));
    const next = all[Math.min(all.length - 1, Math.max(0, now < 0 ? 0 : now + by))];
    link(next).focus();
    next.scrollIntoView({ block: "nearest" });
  };
  const focus = (selector) => {
    const box = document.querySelector(selector);
    if (box) box.focus();
    return box;
  };
  const up = () => {
    const crumbs = [...document.querySelectorAll("header nav a")];
    const above = crumbs.filter((crumb) => crumb.pathname !== location.pathname).pop();
    if (above) location.assign(above.href);
  };
  const commands = { j: () => move(1), k: () => move(-1), "/": () => focus(".filter"), g: () => focus("header input"), u: up };

  document.addEventListener("keydown", (event) => {
    if (event.target.matches("input, select, textarea")) {
      if (event.key === "Escape") event.target.blur();
      return;
    }
    if (event.ctrlKey || event.metaKey || event.altKey || !commands[event.key]) return;
    event.preventDefault();
    commands[event.key]();
  });

  // A live run's page is renewed under the reader: the row stays the chosen one.
  let chosen = null;
  document.addEventListener("htmx:beforeSwap", () => {
    chosen = document.activeElement.getAttribute("href");
  });
  document.addEventListener("htmx:afterSwap", () => {
    const same = chosen && [...document.querySelectorAll("main a")].find((one) => one.getAttribute("href") === chosen);
    if (same) same.focus({ preventScroll: true });
  });
})();
