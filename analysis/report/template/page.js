
"use strict";
(function () {
  const $ = (id) => document.getElementById(id);

  // Theme: the system's, until the reader chooses.
  const root = document.documentElement;
  const button = $("theme");
  const system = window.matchMedia("(prefers-color-scheme: dark)");
  const stored = () => { try { return localStorage.getItem("bench-theme"); } catch { return null; } };
  const isDark = () => (root.dataset.theme ? root.dataset.theme === "dark" : system.matches);
  const nameTheme = () => { button.textContent = isDark() ? "Light" : "Dark"; button.setAttribute("aria-label", "Use the " + (isDark() ? "light" : "dark") + " theme"); };
  if (stored() === "dark" || stored() === "light") root.dataset.theme = stored();
  button.hidden = false;
  button.addEventListener("click", () => {
    root.dataset.theme = isDark() ? "light" : "dark";
    try { localStorage.setItem("bench-theme", root.dataset.theme); } catch { /* a page from a file may not keep it */ }
    nameTheme();
  });
  system.addEventListener("change", nameTheme);
  nameTheme();

  // What is folded is unfolded on paper.
  let folded = [];
  addEventListener("beforeprint", () => { folded = [...document.querySelectorAll("details:not([open])")]; folded.forEach((d) => { d.open = true; }); });
  addEventListener("afterprint", () => { folded.forEach((d) => { d.open = false; }); });

  // Words of the figures' marks: one tip for pointer and keyboard instead of the browser's own.
  const tip = $("tip");
  let active = null;
  const say = (mark) => {
    if (active) active.classList.remove("active");
    active = mark;
    tip.hidden = !mark;
    if (!mark) return;
    mark.classList.add("active");
    tip.textContent = mark.dataset.tip;
    place();
  };
  const place = () => {
    if (!active) return;
    const box = active.getBoundingClientRect();
    const own = tip.getBoundingClientRect();
    const left = Math.min(Math.max(8, box.left + box.width / 2 - own.width / 2), root.clientWidth - own.width - 8);
    const above = box.top - own.height - 10;
    tip.style.left = Math.max(8, left) + "px";
    tip.style.top = (above < 8 ? box.bottom + 10 : above) + "px";
  };
  const distance = (mark, x, y) => {
    const box = mark.getBoundingClientRect();
    return Math.hypot(Math.max(box.left - x, 0, x - box.right), Math.max(box.top - y, 0, y - box.bottom));
  };
  document.querySelectorAll(".plot").forEach((plot) => {
    const marks = [...plot.querySelectorAll(".mark")];
    marks.forEach((mark) => {
      const title = mark.querySelector("title");
      mark.dataset.tip = title.textContent;
      title.remove();
    });
    if (!marks.length) { plot.removeAttribute("tabindex"); return; }
    // Later marks lie on top: of two equally near ones the last is meant.
    const nearest = (event) => {
      let best = null, least = event.pointerType === "mouse" ? 14 : 26;
      marks.forEach((mark) => { const d = distance(mark, event.clientX, event.clientY); if (d <= least) { best = mark; least = d; } });
      return best;
    };
    plot.addEventListener("pointermove", (event) => say(nearest(event)));
    plot.addEventListener("pointerdown", (event) => say(nearest(event)));
    plot.addEventListener("pointerleave", () => say(null));
    let at = -1;
    plot.addEventListener("focus", () => { if (plot.matches(":focus-visible")) { at = Math.max(at, 0); say(marks[at]); } });
    plot.addEventListener("blur", () => say(null));
    plot.addEventListener("keydown", (event) => {
      const step = { ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1 }[event.key];
      if (event.key === "Escape") say(null);
      if (!step) return;
      event.preventDefault();
      at = (at + step + marks.length) % marks.length;
      say(marks[at]);
    });
  });
  addEventListener("scroll", place, { passive: true });
  addEventListener("resize", place);

  // The table: all rows are in the data block; a page of them is in the document.
  const table = $("table");
  if (!table) return;
  const PAGE = 100;
  const data = JSON.parse($("data").textContent);
  const main = (cell) => (typeof cell === "string" ? cell : cell[0]);
  const headings = [...table.tHead.rows[0].cells];
  const numeric = headings.map((heading) => heading.classList.contains("number"));
  const all = data.rows.map((row) => ({ row, text: row.map((cell) => (typeof cell === "string" ? cell : cell.join(" "))).join(" ").toLowerCase() }));
  let view = all, sorted = -1, descending = false, page = 0;

  const key = (entry, column) => {
    const text = main(entry.row[column]);
    return numeric[column] ? parseFloat(text.replace(/,/g, "")) : text;
  };
  const compare = (a, b) => {
    const x = key(a, sorted), y = key(b, sorted);
    if (numeric[sorted]) {
      // What was not measured stands last, whichever way.
      if (Number.isNaN(x) || Number.isNaN(y)) return Number.isNaN(x) - Number.isNaN(y);
      return descending ? y - x : x - y;
    }
    const order = x.localeCompare(y, "en", { numeric: true });
    return descending ? -order : order;
  };
  const cellOf = (cell, column) => {
    const td = document.createElement("td");
    const text = main(cell);
    td.className = numeric[column] ? "number" : "text";
    if (column === data.efficiency && !Number.isNaN(parseFloat(text))) td.classList.add(parseFloat(text) >= data.guide ? "good" : "low");
    if (column === data.state) td.classList.add("state", text === "completed" ? "done" : "open");
    td.textContent = text;
    if (typeof cell !== "string") td.appendChild(document.createElement("small")).textContent = cell[1];
    return td;
  };
  const show = () => {
    const pages = Math.max(1, Math.ceil(view.length / PAGE));
    page = Math.min(Math.max(page, 0), pages - 1);
    const rows = view.slice(page * PAGE, (page + 1) * PAGE).map((entry) => {
      const tr = document.createElement("tr");
      tr.append(...entry.row.map(cellOf));
      return tr;
    });
    table.tBodies[0].replaceChildren(...rows);
    const of = view.length === all.length ? "" : " of " + all.length.toLocaleString("en");
    const part = pages > 1 ? "rows " + (page * PAGE + 1).toLocaleString("en") + "–" + (page * PAGE + rows.length).toLocaleString("en") + " of " : "";
    $("shown").textContent = part + view.length.toLocaleString("en") + of + (all.length === 1 ? " row" : " rows");
    $("pages").hidden = pages === 1;
    $("previous").disabled = page === 0;
    $("next").disabled = page === pages - 1;
  };
  const update = () => {
    const terms = $("filter").value.toLowerCase().split(/\s+/).filter(Boolean);
    view = all.filter((entry) => terms.every((term) => entry.text.includes(term)));
    if (sorted >= 0) view = [...view].sort(compare);
    headings.forEach((heading, column) => heading.setAttribute("aria-sort", column !== sorted ? "none" : descending ? "descending" : "ascending"));
    show();
  };
  headings.forEach((heading, column) => {
    const sort = document.createElement("button");
    sort.type = "button";
    sort.textContent = heading.textContent;
    heading.replaceChildren(sort);
    sort.addEventListener("click", () => {
      descending = sorted === column && !descending;
      sorted = column;
      page = 0;
      update();
    });
  });
  $("filter").addEventListener("input", () => { page = 0; update(); });
  $("previous").addEventListener("click", () => { page -= 1; show(); });
  $("next").addEventListener("click", () => { page += 1; show(); });
  $("controls").hidden = false;
  update();
})();

