"use strict";
(function () {
  const $ = (id) => document.getElementById(id);
  const all = (selector, within = document) => [...within.querySelectorAll(selector)];
  const make = (tag, text = "", className = "") => Object.assign(document.createElement(tag), { textContent: text, className });
  const makeButton = (text, className, act) => {
    const button = Object.assign(make("button", text, className), { type: "button" });
    button.addEventListener("click", act);
    return button;
  };

  // Errors are folded on narrow screens; in narrow tables, each value has the heading of its column.
  if (matchMedia("(max-width: 46rem)").matches) all(".alert details").forEach((fold) => { fold.open = false; });
  all("table.fold").forEach((own) => {
    const titles = [...own.tHead.rows[0].cells].map((heading) => heading.textContent);
    [...own.tBodies].flatMap((body) => [...body.rows]).forEach((row) => [...row.cells].forEach((cell, column) => {
      if (column) cell.dataset.label = titles[column];
    }));
  });

  // Long tables are folded after their first rows, and tables of sizes without the least important ones.
  const ROWS = 8;
  const fold = (own, hidden) => {
    if (!hidden.length) return;
    hidden.forEach((row) => row.classList.add("folded"));
    const kind = own.classList.contains("sizes") ? "size" : "row";
    const button = makeButton(`${hidden.length} more ${kind}${hidden.length > 1 ? "s" : ""}`, "quiet fold-button", () => {
      hidden.forEach((row) => row.classList.remove("folded"));
      button.remove();
    });
    own.after(button);
  };
  all("table.fold, table.sizes").forEach((own) => {
    const rows = [...own.tBodies].flatMap((body) => [...body.rows]);
    const isSizes = own.classList.contains("sizes");
    fold(own, isSizes ? rows.filter((row) => row.classList.contains("more")) : rows.length > ROWS + 2 ? rows.slice(ROWS) : []);
  });

  // Views: all groups that have a view show it.
  const views = all(".tabs").map((tabs) => ({ figures: all("figure", tabs.closest(".views")), buttons: all("button", tabs) }));
  const nameOf = (button) => button.textContent.toLowerCase();
  const view = (name) => views.filter(({ buttons }) => buttons.map(nameOf).includes(name)).forEach(({ figures, buttons }) => buttons.forEach((button, at) => {
    figures[at].classList.toggle("shown", nameOf(button) === name);
    button.setAttribute("aria-pressed", nameOf(button) === name);
  }));
  views.flatMap(({ buttons }) => buttons).forEach((button) => button.addEventListener("click", () => view(nameOf(button))));

  // What needs the data of all rows waits until the page is visible.
  const complete = () => {
    const data = JSON.parse($("data").textContent);

    // The runs of a cell, or one run: state, reason, evidence and folder.
    const runs = data.runs.map(([cell, shared, rest, attempt, state, failure, reason, rate, ...evidence]) => {
      const [name, ...texts] = [cell, state, failure, reason].map((place) => data.texts[place]);
      return { cell: name, run: name.slice(0, shared) + rest, attempt, texts, rate, evidence: evidence.map((place) => data.texts[place]) };
    });
    const describe = ({ run, attempt, texts: [state, failure, reason], rate, evidence }) => {
      const list = make("dl"), path = attempt && data.folders && `/attempt-${attempt}`;
      const folder = path && Object.assign(make("a", `runs/${run}${path}`), { href: `../runs/${encodeURIComponent(run)}${path}/` });
      const lines = [["Run", run], ["State", failure ? `${state} (${failure})` : state], ["Throughput", rate && `${rate} ${data.unit}`],
        ["Reason", reason], ...evidence.map((line) => ["Evidence", line]), ["Folder", folder]];
      lines.filter(([, value]) => value).forEach(([name, value]) => {
        list.append(make("dt", name), make("dd"));
        list.lastChild.append(value);
      });
      return list;
    };
    const main = (cell) => (typeof cell === "string" ? cell : cell[0]);
    const valuesOf = (row) => {
      const list = make("dl");
      row.forEach((cell, column) => {
        const text = [cell].flat().filter(Boolean).join(" ");
        if (text && text !== "–") list.append(make("dt", data.columns[column]), make("dd", text));
      });
      return list;
    };
    const showRuns = (cell, run) => {
      const found = runs.filter((one) => (run ? one.run === run : one.cell === cell));
      $("run-title").textContent = run || cell;
      const own = run ? [] : data.rows.filter((row) => main(row[0]) === cell).slice(0, 4).map(valuesOf);
      $("run-list").replaceChildren(...own, ...found.slice(0, 100).map(describe));
      $("run").showModal();
    };
    $("close").addEventListener("click", () => $("run").close());
    // A long name breaks after a dot or an underscore.
    const breaking = (element, text) => {
      element.append(...text.split(/(?<=\w[._])(?=[A-Za-z])/).flatMap((part) => [part, make("wbr")]));
      return element;
    };
    const named = (text, cell, run) => breaking(makeButton("", "name", () => showRuns(cell, run)), text);
    all(".runs tbody td:first-child").forEach((td) => td.replaceChildren(named(td.textContent, "", td.textContent)));

    // The table: all rows are in the data block; a page of them is in the document.
    const table = $("table");
    if (!table) return;
    $("controls").hidden = false;
    const PAGE = 20, PRINTED = 60;
    const headings = [...table.tHead.rows[0].cells];
    const names = headings.map((heading) => heading.dataset.column);
    const numeric = headings.map((heading) => heading.classList.contains("number"));
    // A row is found by its texts, by "KEY=VALUE" of its columns, and by numbers of ranks, GPUs and nodes.
    const words = (row) => {
      const found = row.slice(0, names.length).map((cell, column) => `${names[column]}=${main(cell).replace(/,/g, "")}`);
      const ranks = main(row[names.indexOf("gpus")] ?? "").replace(/,/g, ""), nodes = [row[names.indexOf("gpus")]].flat()[1]?.split(" ")[0];
      const sizes = [["ranks", ranks], ["gpus", ranks], ["nodes", nodes]].filter(([, amount]) => amount);
      found.push(...sizes.flatMap(([unit, amount]) => [`${unit}=${amount}`, `${amount}_${unit.slice(0, -1)}`]));
      return new Set(found.map((word) => word.toLowerCase()));
    };
    const rows = data.rows.map((row) => ({ row, words: words(row), text: row.flat().join(" ").toLowerCase() }));
    const fits = (entry, term) => (/=|_(rank|gpu|node)$/.test(term) && entry.words.has(term)) || entry.text.includes(term);
    const cellOfRun = new Map(runs.map((one) => [one.run, one.cell]));
    let matching = rows, sorted = -1, descending = false, page = 0;
    const compare = (a, b) => {
      const [x, y] = [a, b].map((entry) => main(entry.row[sorted]));
      if (!numeric[sorted]) return (descending ? -1 : 1) * x.localeCompare(y, "en", { numeric: true });
      const [p, q] = [x, y].map((text) => parseFloat(text.replace(/,/g, "")));
      // Values that were not measured are last in both directions.
      return Number.isNaN(p) || Number.isNaN(q) ? Number.isNaN(p) - Number.isNaN(q) : descending ? q - p : p - q;
    };
    const cellOf = (cell, column) => {
      const text = main(cell);
      const td = make("td", column ? text : "", headings[column].className);
      if (!column) td.append(named(text, text));
      if (names[column] === "state") td.classList.add("state", ...(text === "completed" ? [] : ["open"]));
      if (typeof cell !== "string") td.append(" ", breaking(make("small"), cell[1]));
      return td;
    };
    const show = (most = PAGE) => {
      const pages = Math.max(1, Math.ceil(matching.length / most)), first = most === PAGE ? page * PAGE : 0;
      const shown = matching.slice(first, first + most).map((entry) => {
        const tr = make("tr");
        tr.append(...entry.row.slice(0, headings.length).map(cellOf));
        return tr;
      });
      table.tBodies[0].replaceChildren(...shown);
      const text = (amount) => amount.toLocaleString("en");
      const part = pages > 1 ? `rows ${text(first + 1)}–${text(first + shown.length)} of ` : "";
      const of = matching.length === rows.length ? "" : ` of ${text(rows.length)}`;
      $("shown").textContent = `${part}${text(matching.length)}${of} ${rows.length === 1 ? "row" : "rows"}`;
      $("pages").hidden = pages === 1;
      $("previous").disabled = page === 0;
      $("next").disabled = page === pages - 1;
    };
    const update = () => {
      const wanted = $("filter").value.toLowerCase().replace(/(\d) (rank|gpu|node)s?\b/g, "$1_$2");
      const terms = wanted.split(/\s+/).filter(Boolean);
      // The name of a cell is not a part of other names.
      const name = rows.some((entry) => main(entry.row[0]) === $("filter").value) && $("filter").value;
      matching = rows.filter((entry) => (name ? main(entry.row[0]) === name : terms.every((term) => fits(entry, term))));
      page = 0;
      const cells = new Set(matching.map((entry) => main(entry.row[0])));
      const matches = (run) => !terms.length || cells.has(cellOfRun.get(run)) || (!name && terms.every((term) => run.toLowerCase().includes(term)));
      all(".runs tbody tr").forEach((tr) => { tr.hidden = !matches(tr.cells[0].textContent); });
      if (terms.length) all(".runs .fold-button").forEach((button) => button.click());
      if (sorted >= 0) matching.sort(compare);
      headings.forEach((heading, column) => heading.setAttribute("aria-sort", column !== sorted ? "none" : descending ? "descending" : "ascending"));
      show();
    };
    const sortBy = (column) => { descending = sorted === column && !descending; sorted = column; update(); };
    const titles = headings.map((heading) => heading.textContent);
    const nameColumns = (isSorted) => headings.forEach((heading, column) => {
      heading.replaceChildren(isSorted ? makeButton(titles[column], "", () => sortBy(column)) : titles[column]);
    });
    nameColumns(true);
    $("filter").addEventListener("input", update);
    $("previous").addEventListener("click", () => { page -= 1; show(); });
    $("next").addEventListener("click", () => { page += 1; show(); });
    addEventListener("beforeprint", () => { nameColumns(false); show(PRINTED); }); // no button is repeated on each page
    addEventListener("afterprint", () => { nameColumns(true); show(); });
    update();
  };
  requestAnimationFrame(() => setTimeout(complete));
})();
