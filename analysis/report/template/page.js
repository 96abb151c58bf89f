
"use strict";
(function () {
  const $ = (id) => document.getElementById(id);
  const all = (selector, within = document) => [...within.querySelectorAll(selector)];
  const make = (tag, text = "", className = "") => {
    const element = document.createElement(tag);
    element.textContent = text;
    if (className) element.className = className;
    if (tag === "button") element.type = "button";
    return element;
  };
  const root = document.documentElement;
  const data = JSON.parse($("data").textContent);
  root.classList.add("js");

  // Theme: the system's, until the reader chooses.
  const button = $("theme");
  const system = window.matchMedia("(prefers-color-scheme: dark)");
  const isDark = () => (root.dataset.theme ? root.dataset.theme === "dark" : system.matches);
  const nameTheme = () => { button.textContent = isDark() ? "Light" : "Dark"; button.setAttribute("aria-label", "Use the " + (isDark() ? "light" : "dark") + " theme"); };
  button.addEventListener("click", () => { root.dataset.theme = isDark() ? "light" : "dark"; nameTheme(); });
  system.addEventListener("change", nameTheme);
  nameTheme();

  // What is folded is unfolded on paper.
  let folded = [];
  addEventListener("beforeprint", () => { folded = all("details:not([open])"); folded.forEach((d) => { d.open = true; }); });
  addEventListener("afterprint", () => { folded.forEach((d) => { d.open = false; }); });

  // The runs of a cell, or one run: state, reason, evidence and folder.
  const runs = data.runs.map(([cell, shared, rest, attempt, state, failure, reason, rate, ...evidence]) => {
    const [name, ...texts] = [cell, state, failure, reason].map((place) => data.texts[place]);
    return { cell: name, run: name.slice(0, shared) + rest, attempt, texts, rate, evidence: evidence.map((place) => data.texts[place]) };
  });
  const describe = ({ run, attempt, texts: [state, failure, reason], rate, evidence }) => {
    const list = make("dl");
    const add = (name, value) => { if (value) list.append(make("dt", name), make("dd", value)); };
    add("Run", run);
    add("State", failure ? state + " (" + failure + ")" : state);
    add("Throughput", rate && rate + " " + data.unit);
    add("Reason", reason);
    evidence.forEach((line) => add("Evidence", line));
    if (attempt && data.folders) {
      const link = make("a", "runs/" + run + "/attempt-" + attempt);
      link.href = "../runs/" + encodeURIComponent(run) + "/attempt-" + attempt + "/";
      list.append(make("dt", "Folder"), make("dd"));
      list.lastChild.append(link);
    }
    return list;
  };
  const showRuns = (cell, run) => {
    const found = runs.filter((one) => (run ? one.run === run : one.cell === cell));
    if (!found.length) return;
    $("run-title").textContent = run || cell;
    $("run-list").replaceChildren(...found.slice(0, 100).map(describe));
    $("run").showModal();
  };
  $("close").addEventListener("click", () => $("run").close());
  const named = (text, cell, run) => {
    const link = make("button", text, "name");
    link.addEventListener("click", () => showRuns(cell, run));
    return link;
  };
  all(".runs tbody td:first-child").forEach((td) => td.replaceChildren(named(td.textContent, "", td.textContent)));

  // Texts of the figures' marks: one tip for pointer and keyboard instead of the browser's own.
  const tip = $("tip");
  let active = null;
  const say = (mark) => {
    active?.classList.remove("active");
    active = mark;
    tip.hidden = !mark;
    mark?.classList.add("active");
    tip.textContent = mark?.dataset.tip;
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
  const open = (mark) => { if (mark?.dataset.cell) { say(null); showRuns(mark.dataset.cell, mark.dataset.run); } };
  all(".plot").forEach((plot) => {
    const every = all(".mark", plot);
    const marks = () => every.filter((mark) => !mark.closest("[hidden]"));
    every.forEach((mark) => {
      const title = mark.querySelector("title");
      mark.dataset.tip = title.textContent;
      title.remove();
    });
    if (!every.length) return plot.removeAttribute("tabindex");
    // Later marks lie on top: of two equally near ones the last is meant.
    const nearest = (event) => {
      let best = null, least = event.pointerType === "mouse" ? 14 : 26;
      marks().forEach((mark) => { const d = distance(mark, event.clientX, event.clientY); if (d <= least) { best = mark; least = d; } });
      return best;
    };
    plot.addEventListener("pointermove", (event) => say(nearest(event)));
    plot.addEventListener("pointerdown", (event) => say(nearest(event)));
    plot.addEventListener("pointerleave", () => say(null));
    plot.addEventListener("click", (event) => open(nearest(event)));
    let at = -1;
    plot.addEventListener("focus", () => { if (plot.matches(":focus-visible")) { at = Math.max(at, 0); say(marks()[at] || null); } });
    plot.addEventListener("blur", () => say(null));
    plot.addEventListener("keydown", (event) => {
      const step = { ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1 }[event.key];
      if (event.key === "Escape") say(null);
      // Else the same key press would close the dialog, whose button has the focus then.
      if (event.key === "Enter") { event.preventDefault(); open(active); }
      const shown = marks();
      if (!step || !shown.length) return;
      event.preventDefault();
      at = (at + step + shown.length) % shown.length;
      say(shown[at]);
    });
  });
  addEventListener("scroll", place, { passive: true });
  addEventListener("resize", place);

  // Views of one group, and legends that hide and show what they explain.
  all(".views").forEach((group) => {
    const figures = all("figure", group);
    figures[0].classList.add("shown");
    if (figures.length === 1) return;
    const tabs = make("div", "", "tabs");
    tabs.setAttribute("role", "group");
    tabs.setAttribute("aria-label", "Values shown");
    const buttons = figures.map((figure) => make("button", figure.dataset.view, "quiet"));
    const choose = (chosen) => {
      figures.forEach((figure, at) => figure.classList.toggle("shown", at === chosen));
      buttons.forEach((tab, at) => tab.setAttribute("aria-pressed", at === chosen));
    };
    buttons.forEach((tab, at) => tab.addEventListener("click", () => choose(at)));
    choose(0);
    tabs.append(...buttons);
    group.querySelector(".group-head").append(tabs);
  });
  all(".legend li[data-key]").forEach((entry) => {
    const parts = all(".plot [data-key]", entry.closest("figure")).filter((part) => part.dataset.key === entry.dataset.key);
    const toggle = make("button");
    toggle.append(...entry.childNodes);
    toggle.setAttribute("aria-pressed", "true");
    toggle.addEventListener("click", () => {
      const shown = toggle.getAttribute("aria-pressed") === "false";
      toggle.setAttribute("aria-pressed", shown);
      parts.forEach((part) => part.toggleAttribute("hidden", !shown));
    });
    entry.replaceChildren(toggle);
  });

  // The table: all rows are in the data block; a page of them is in the document.
  const table = $("table");
  $("controls").hidden = false;
  if (!table) return $("filter").parentElement.remove();
  const PAGE = 100;
  const main = (cell) => (typeof cell === "string" ? cell : cell[0]);
  const headings = [...table.tHead.rows[0].cells];
  const numeric = headings.map((heading) => heading.classList.contains("number"));
  const classes = headings.map((heading, column) => (numeric[column] ? "" : "text ") + heading.className);
  const rows = data.rows.map((row) => ({ row, text: row.map((cell) => (typeof cell === "string" ? cell : cell.join(" "))).join(" ").toLowerCase() }));
  let view = rows, sorted = -1, descending = false, page = 0;

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
    const text = main(cell);
    const td = make("td", column ? text : "", classes[column]);
    if (!column) td.append(named(text, text));
    if (column === data.efficiency && !Number.isNaN(parseFloat(text))) td.classList.add(parseFloat(text) >= data.guide ? "good" : "low");
    if (column === data.state) td.classList.add("state", text === "completed" ? "done" : "open");
    if (typeof cell !== "string") td.append(make("small", cell[1]));
    return td;
  };
  const show = () => {
    const pages = Math.max(1, Math.ceil(view.length / PAGE));
    page = Math.min(Math.max(page, 0), pages - 1);
    const shown = view.slice(page * PAGE, (page + 1) * PAGE).map((entry) => {
      const tr = make("tr");
      tr.append(...entry.row.map(cellOf));
      return tr;
    });
    table.tBodies[0].replaceChildren(...shown);
    const text = (amount) => amount.toLocaleString("en");
    const of = view.length === rows.length ? "" : " of " + text(rows.length);
    const part = pages > 1 ? "rows " + text(page * PAGE + 1) + "–" + text(page * PAGE + shown.length) + " of " : "";
    $("shown").textContent = part + text(view.length) + of + (rows.length === 1 ? " row" : " rows");
    $("pages").hidden = pages === 1;
    $("previous").disabled = page === 0;
    $("next").disabled = page === pages - 1;
  };
  // Fades the marks of cells that the filter leaves out, and hides their runs.
  const fade = (matches) => {
    all(".plot").forEach((plot) => {
      const marks = all(".mark[data-cell]", plot);
      marks.forEach((mark) => mark.classList.toggle("faded", !matches(mark.dataset.cell, mark.dataset.run)));
      all("[data-key]", plot).filter((part) => !part.querySelector(".mark")).forEach((part) => {
        const own = marks.filter((mark) => mark.closest("[data-key]")?.dataset.key === part.dataset.key);
        part.classList.toggle("faded", own.length > 0 && own.every((mark) => mark.classList.contains("faded")));
      });
    });
    const cells = new Map(runs.map((one) => [one.run, one.cell]));
    all(".runs tbody tr").forEach((tr) => { tr.hidden = !matches(cells.get(tr.cells[0].textContent), tr.cells[0].textContent); });
  };
  const update = () => {
    const terms = $("filter").value.toLowerCase().split(/\s+/).filter(Boolean);
    view = rows.filter((entry) => terms.every((term) => entry.text.includes(term)));
    page = 0;
    const cells = new Set(view.map((entry) => main(entry.row[0])));
    fade((cell, run) => !terms.length || cells.has(cell) || (run && terms.every((term) => run.toLowerCase().includes(term))));
    if (sorted >= 0) view = [...view].sort(compare);
    headings.forEach((heading, column) => heading.setAttribute("aria-sort", column !== sorted ? "none" : descending ? "descending" : "ascending"));
    show();
  };
  headings.forEach((heading, column) => {
    const sort = make("button", heading.textContent);
    heading.replaceChildren(sort);
    sort.addEventListener("click", () => { descending = sorted === column && !descending; sorted = column; update(); });
  });
  $("filter").addEventListener("input", update);
  $("previous").addEventListener("click", () => { page -= 1; show(); });
  $("next").addEventListener("click", () => { page += 1; show(); });
  update();
})();

