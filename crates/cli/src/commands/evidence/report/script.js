// Sorts tables by their headings, narrows them to what is typed, and saves the data. Without it the page can still be read.
"use strict";
const announce = document.querySelector("#announce");
const value = (row, column) => row.cells[column].dataset.v ?? row.cells[column].textContent;

for (const table of document.querySelectorAll("table.sortable")) {
  const heads = [...table.tHead.rows[0].cells];
  heads.forEach((head, column) => {
    head.querySelector("button").addEventListener("click", () => {
      const down = head.getAttribute("aria-sort") === "ascending";
      const rows = [...table.tBodies[0].rows];
      const numbers = head.classList.contains("number");
      // Cells without a number come last in both orders.
      const missing = (row) => numbers && value(row, column) === "";
      rows.sort((a, b) => {
        if (missing(a) !== missing(b)) return missing(a) ? 1 : -1;
        const [x, y] = [value(a, column), value(b, column)];
        const order = numbers ? Number(x) - Number(y) : x.localeCompare(y);
        return down ? -order : order;
      });
      heads.forEach((other) => other.removeAttribute("aria-sort"));
      head.setAttribute("aria-sort", down ? "descending" : "ascending");
      table.tBodies[0].append(...rows);
      announce.textContent = `Sorted by ${head.textContent}, ${down ? "descending" : "ascending"}`;
    });
  });
}

const filter = document.querySelector("#filter");
filter.addEventListener("input", () => {
  const words = filter.value.toLowerCase().split(/\s+/).filter(Boolean);
  let shown = 0;
  for (const row of document.querySelectorAll("table.sortable tbody tr")) {
    const text = row.textContent.toLowerCase();
    row.hidden = !words.every((word) => text.includes(word));
    shown += row.hidden ? 0 : 1;
  }
  announce.textContent = `${shown} rows`;
});

document.querySelector("#save").addEventListener("click", () => {
  const blob = new Blob([document.querySelector("#data").textContent], { type: "application/json" });
  const link = document.createElement("a");
  link.href = URL.createObjectURL(blob);
  link.download = "warpsmith-evidence.json";
  link.click();
  URL.revokeObjectURL(link.href);
});
