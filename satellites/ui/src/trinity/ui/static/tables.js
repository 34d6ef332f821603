// Every table with rows to choose from is sorted by a click on a head, and filtered by a box above it.
"use strict";
(() => {
  const MANY = 3, ORDERS = ["ascending", "descending", "none"];
  const kept = new Map(); // of a table, by its place on the page: a live run's page renews its tables
  const value = (row, column) => {
    const cell = row.cells[column], text = cell ? cell.dataset.sort || cell.textContent.trim() : "";
    const number = /^[-+]?[\d,]*\.?\d+(e[-+]?\d+)?(?![\d:-])/i.exec(text.replace(/^−/, "-"));
    return number ? Number(number[0].replaceAll(",", "")) : text.toLowerCase();
  };
  const compare = (a, b) => {
    if (typeof a === typeof b) return a < b ? -1 : a > b ? 1 : 0;
    return typeof a === "number" ? -1 : 1; // numbers before words and empty cells
  };
  const arrange = (table, state) => {
    const body = table.tBodies[0], order = ORDERS.indexOf(state.order);
    const key = new Map(state.rows.map((row) => [row, value(row, state.column)]));
    const rows = order === 2 ? state.rows : [...state.rows].sort((a, b) => compare(key.get(a), key.get(b)) * (order ? -1 : 1));
    body.append(...rows);
    rows.forEach((row) => { row.hidden = !row.textContent.toLowerCase().includes(state.text.toLowerCase()); });
    [...table.tHead.rows[0].cells].forEach((head, column) => {
      if (column === state.column && order < 2) head.setAttribute("aria-sort", state.order);
      else head.removeAttribute("aria-sort");
    });
  };
  const dress = (table, place) => {
    const body = table.tBodies[0], wide = table.closest(".wide");
    if (wide.scrollWidth > wide.clientWidth) wide.tabIndex = 0;
    if (!body || !table.tHead || table.matches(".bars") || table.dataset.dressed) return;
    table.dataset.dressed = "yes";
    const state = { column: 0, order: "none", text: "", ...kept.get(place), rows: [...body.rows] };
    kept.set(place, state);
    if (state.rows.length < 2) return;
    [...table.tHead.rows[0].cells].forEach((head, column) => {
      if (!head.textContent.trim()) return;
      const button = document.createElement("button");
      button.type = "button";
      button.className = "sort";
      button.append(...head.childNodes);
      head.append(button);
      button.addEventListener("click", () => {
        state.order = state.column === column ? ORDERS[(ORDERS.indexOf(state.order) + 1) % 3] : ORDERS[0];
        state.column = column;
        arrange(table, state);
      });
    });
    if (state.rows.length > MANY) {
      const box = document.createElement("input");
      Object.assign(box, { type: "search", className: "filter", value: state.text, placeholder: document.body.dataset.filter });
      box.setAttribute("aria-label", document.body.dataset.filter);
      box.addEventListener("input", () => {
        state.text = box.value;
        arrange(table, state);
      });
      wide.before(box);
    }
    if (state.text || state.order !== "none") arrange(table, state);
  };
  const all = () => document.querySelectorAll("main .wide table").forEach(dress);
  all();
  ["htmx:oobAfterSwap", "htmx:afterSwap"].forEach((event) => document.addEventListener(event, all));
})();
