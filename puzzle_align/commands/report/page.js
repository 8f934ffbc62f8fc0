"use strict";
// The page is complete without this script, which reads values off curves, and sorts and filters
// the samples. "#sort=-score&filter=word" in the address does the latter two when it opens.

/** Shows the values at the pointer's step in the line below a chart. */
function follow(chart) {
  const svg = chart.querySelector("svg"), cursor = svg.querySelector(".cursor");
  const [left, right, first, last] = ["left", "right", "first", "last"].map((name) => Number(svg.dataset[name]));
  const curves = [...svg.querySelectorAll("path")].map((path) =>
    path.dataset.points.split(" ").filter(Boolean).map((point) => point.split(":").map(Number)));
  const [shown, ...values] = chart.querySelectorAll(".values > span");
  const nearest = (points, step) => points.reduce((best, point) =>
    Math.abs(point[0] - step) < Math.abs(best[0] - step) ? point : best);

  svg.addEventListener("pointermove", (event) => {
    const box = svg.getBoundingClientRect();
    const pointed = (event.clientX - box.left) / box.width * svg.viewBox.baseVal.width;
    const step = nearest(curves.flat(), first + (pointed - left) / (right - left) * (last - first))[0];
    const x = left + (step - first) / (last - first) * (right - left);
    cursor.setAttribute("x1", x);
    cursor.setAttribute("x2", x);
    shown.textContent = `step ${step}`;
    curves.forEach((points, n) => {
      if (points.length) values[n].lastChild.textContent = Number(nearest(points, step)[1].toPrecision(4));
    });
  });
}

/** Adds a button to each head of a table, which sorts by it, and a field that filters rows. */
function operate(table) {
  const heads = [...table.tHead.rows[0].cells], body = table.tBodies[0], rows = [...body.rows];
  const names = heads.map((head) => head.textContent);

  function sort(column, sign) {
    heads.forEach((head) => head.removeAttribute("aria-sort"));
    heads[column].setAttribute("aria-sort", sign > 0 ? "ascending" : "descending");
    body.append(...rows.sort((one, other) => {
      const [a, b] = [one, other].map((row) => row.cells[column]);
      const order = Number(a.dataset.value) - Number(b.dataset.value); // NaN for texts
      if (!isNaN(order)) return sign * order;
      const [s, t] = [a.textContent, b.textContent];
      return (s === "") - (t === "") || sign * s.localeCompare(t); // empty cells come last
    }));
  }
  heads.forEach((head, column) => {
    const button = document.createElement("button");
    button.textContent = names[column];
    button.onclick = () => sort(column, head.getAttribute("aria-sort") === "ascending" ? -1 : 1);
    head.replaceChildren(button);
  });

  const bar = document.createElement("label"), field = document.createElement("input");
  const count = document.createElement("output");
  bar.className = "filter";
  bar.append("Filter", field, count);
  table.parentElement.before(bar);
  field.type = "search";
  field.oninput = () => {
    const words = field.value.toLowerCase().split(/\s+/);
    for (const row of rows) row.hidden = !words.every((word) => row.textContent.toLowerCase().includes(word));
    count.textContent = `${rows.filter((row) => !row.hidden).length} of ${rows.length} samples`;
  };

  const asked = new URLSearchParams(location.hash.slice(1)), by = asked.get("sort") ?? "";
  const column = names.indexOf(by.replace(/^-/, ""));
  if (column >= 0) sort(column, by.startsWith("-") ? -1 : 1);
  field.value = asked.get("filter") ?? "";
  field.oninput();
}

document.querySelectorAll(".chart").forEach(follow);
document.querySelectorAll("#samples").forEach(operate);
