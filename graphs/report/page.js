// Tables of class `sortable` sort by a click on a column's head; those of class `filtered` get a
// text to filter by, and a box for failed rows only. The page is whole without any of it.
"use strict";

function cells(body, column) {
  return [...body.rows].map((row) => [row.cells[column].textContent, row]);
}

function compare(a, b) {
  const x = a === "not finite" ? Infinity : parseFloat(a);
  const y = b === "not finite" ? Infinity : parseFloat(b);
  return Number.isNaN(x) || Number.isNaN(y) ? a.localeCompare(b) : x - y;
}

for (const table of document.querySelectorAll("table.sortable")) {
  const body = table.tBodies[0];
  [...table.tHead.rows[0].cells].forEach((head, column) => {
    let down = false;
    head.addEventListener("click", () => {
      down = !down;
      const sign = down ? -1 : 1;
      const sorted = cells(body, column).sort(([a], [b]) => sign * compare(a, b));
      body.append(...sorted.map(([, row]) => row));
    });
  });
}

for (const table of document.querySelectorAll("table.filtered")) {
  const text = Object.assign(document.createElement("input"), {
    type: "search",
    placeholder: "filter: case, tap, remark",
  });
  const failed = Object.assign(document.createElement("input"), { type: "checkbox" });
  const label = document.createElement("label");
  label.append(failed, " failed only");
  const bar = document.createElement("div");
  bar.className = "filter";
  bar.append(text, label);
  table.parentElement.before(bar);
  bar.addEventListener("input", () => {
    const words = text.value.toLowerCase().split(" ").filter(Boolean);
    for (const row of table.tBodies[0].rows) {
      const content = row.textContent.toLowerCase();
      row.hidden =
        (failed.checked && row.className !== "bad") || !words.every((w) => content.includes(w));
    }
  });
}
