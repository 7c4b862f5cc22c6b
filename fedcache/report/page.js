"use strict";
(() => {
  const root = document.documentElement;
  const dark = window.matchMedia("(prefers-color-scheme: dark)");
  let chosen = null;
  const paint = () => { root.dataset.theme = chosen ?? (dark.matches ? "dark" : "light"); };
  dark.addEventListener("change", paint);
  paint();
  document.getElementById("theme").addEventListener("click", () => {
    chosen = root.dataset.theme === "dark" ? "light" : "dark";
    paint();
  });

  // One tooltip shows the words of a mark, for the mouse, for touch and for the arrow keys. Without a script the words stay in the <title> of the mark.
  const tip = document.getElementById("tip");
  const words = new Map();
  for (const title of document.querySelectorAll(".mark > title")) {
    words.set(title.parentNode, title.textContent);
    title.remove();
  }
  let lit = null;
  const hide = () => { tip.hidden = true; lit?.classList.remove("on"); lit = null; };
  const show = (mark, x, y) => {
    hide();
    lit = mark;
    mark.classList.add("on");
    tip.textContent = words.get(mark);
    tip.hidden = false;
    const box = tip.getBoundingClientRect();
    tip.style.left = `${Math.max(4, Math.min(x + 12, innerWidth - box.width - 4))}px`;
    tip.style.top = `${y + 18 + box.height > innerHeight ? y - box.height - 10 : y + 18}px`;
  };
  const markAt = (event) => event.target instanceof Element ? event.target.closest(".mark") : null;
  document.addEventListener("pointermove", (event) => {
    const mark = markAt(event);
    if (mark && words.has(mark)) show(mark, event.clientX, event.clientY);
    else if (event.pointerType === "mouse" && lit && document.activeElement?.contains(lit) !== true) hide();
  });
  document.addEventListener("pointerdown", (event) => {
    const mark = markAt(event);
    if (mark && words.has(mark)) show(mark, event.clientX, event.clientY); else hide();
  });
  addEventListener("scroll", hide, { passive: true, capture: true });
  for (const drawing of document.querySelectorAll(".drawing")) {
    const marks = [...drawing.querySelectorAll(".mark")].filter((m) => words.has(m));
    let at = -1;
    const go = (to) => {
      at = Math.max(0, Math.min(marks.length - 1, to));
      const box = marks[at].getBoundingClientRect();
      show(marks[at], box.x + box.width / 2, box.y + box.height / 2);
    };
    drawing.addEventListener("keydown", (event) => {
      const steps = { ArrowRight: at + 1, ArrowDown: at + 1, ArrowLeft: at - 1, ArrowUp: at - 1, Home: 0, End: marks.length - 1 };
      if (event.key === "Escape") { hide(); return; }
      if (!(event.key in steps) || !marks.length || event.ctrlKey || event.metaKey || event.altKey) return;
      event.preventDefault();
      go(steps[event.key]);
    });
    drawing.addEventListener("blur", hide);
  }

  // Columns can be sorted: numbers by size, words by the alphabet, missing values last.
  for (const table of document.querySelectorAll("table.sortable")) {
    const heads = [...table.tHead.rows[0].cells];
    heads.forEach((head, place) => head.querySelector("button").addEventListener("click", () => {
      const numbers = head.classList.contains("n");
      const now = head.getAttribute("aria-sort");
      const down = now ? now === "ascending" : numbers;
      heads.forEach((h) => h.removeAttribute("aria-sort"));
      head.setAttribute("aria-sort", down ? "descending" : "ascending");
      const value = (row) => row.cells[place].dataset.v;
      const order = (a, b) => numbers || (a !== "" && b !== "" && !isNaN(a) && !isNaN(b))
        ? Number(a) - Number(b) : a.localeCompare(b);
      const rows = [...table.tBodies[0].rows];
      rows.sort((p, q) => {
        const a = value(p), b = value(q);
        if (a === "" || b === "") return (a === "") - (b === "");
        return down ? order(b, a) : order(a, b);
      });
      table.tBodies[0].append(...rows);
    }));
  }

  // The marks of a run in all figures belong to its row. They are hidden if the row is filtered out or unticked, and
  // highlighted if the pointer is on the row or on one of the marks, or the keyboard focus is on the row.
  const parts = new Map();
  for (const part of document.querySelectorAll("svg [data-run]")) {
    const known = parts.get(part.dataset.run) ?? [];
    known.push(part);
    parts.set(part.dataset.run, known);
  }
  const rowOf = new Map([...document.querySelectorAll("tr[data-run]")].map((row) => [row.dataset.run, row]));
  let shining = null;
  const shine = (run) => {
    if (run === shining) return;
    for (const [name, on] of [[shining, false], [run, true]]) {
      if (name === null) continue;
      const row = rowOf.get(name);
      row?.classList.toggle("lit", on);
      row?.closest("section").classList.toggle("dim", on && (parts.get(name)?.length ?? 0) > 0);
      for (const part of parts.get(name) ?? []) part.classList.toggle("lit", on);
    }
    shining = run;
  };
  document.addEventListener("pointerover", (event) => {
    const at = event.target instanceof Element ? event.target.closest("[data-run]") : null;
    shine(at?.dataset.run ?? null);
  });
  document.addEventListener("focusin", (event) => shine(event.target.closest("tr[data-run]")?.dataset.run ?? null));
  for (const section of document.querySelectorAll("section.setting")) {
    const rows = [...section.querySelectorAll(".sortable tbody tr")];
    const heads = [...section.querySelectorAll(".sortable thead th")].map((h) => h.textContent);
    const words = section.querySelector("[data-filter]");
    const bys = [...section.querySelectorAll("select[data-by]")];
    const status = section.querySelector("[data-count]");
    const texts = new Map(rows.map((row) => [row, row.textContent.toLowerCase()]));
    const draw = () => {
      const terms = (words?.value ?? "").toLowerCase().split(/\s+/).filter(Boolean);
      let kept = 0;
      let drawn = 0;
      for (const row of rows) {
        const fits = terms.every((term) => texts.get(row).includes(term))
          && bys.every((by) => by.value === "" || row.cells[heads.indexOf(by.dataset.by)].dataset.v === by.value);
        row.hidden = !fits;
        kept += fits;
        if (!("run" in row.dataset)) continue;
        const on = fits && row.querySelector("input").checked;
        drawn += on;
        for (const part of parts.get(row.dataset.run) ?? []) part.classList.toggle("off", !on);
      }
      const all = kept === rows.length && drawn === rows.length;
      status.textContent = all ? "" : `${kept} of ${rows.length} rows, ${drawn} in figures`;
    };
    words?.addEventListener("input", draw);
    bys.forEach((by) => by.addEventListener("change", draw));
    const ticks = rows.flatMap((row) => [...row.querySelectorAll("th input")]);
    ticks.forEach((tick, i) => {
      tick.tabIndex = i ? -1 : 0;  // the key Tab stops at one box; the arrow keys move to the others
      tick.addEventListener("change", draw);
      tick.addEventListener("keydown", (event) => {
        const step = { ArrowDown: 1, ArrowUp: -1 }[event.key];
        if (!step) return;
        event.preventDefault();
        const there = [...section.querySelectorAll(".sortable tbody tr:not([hidden]) th input")];
        const next = there[there.indexOf(tick) + step];
        if (!next) return;
        tick.tabIndex = -1;
        next.tabIndex = 0;
        next.focus();
      });
    });
    for (const [name, on] of [["all", true], ["none", false]]) {
      section.querySelector(`[data-${name}]`)?.addEventListener("click", () => {
        for (const row of rows) if (!row.hidden) row.querySelector("input").checked = on;
        draw();
      });
    }
    for (const choice of section.querySelectorAll("[data-column]")) {
      choice.addEventListener("change", () => {
        for (const row of section.querySelector(".sortable").rows) row.cells[choice.dataset.column].hidden = !choice.checked;
      });
    }
  }
  document.addEventListener("pointerdown", (event) => {
    for (const open of document.querySelectorAll(".choose[open]")) if (!open.contains(event.target)) open.open = false;
  });
  document.addEventListener("keydown", (event) => {
    if (event.key === "Escape") for (const open of document.querySelectorAll(".choose[open]")) open.open = false;
  });

  // A drawing as a file of its own, with the colours of the current theme.
  const standalone = (figure) => {
    const svg = figure.querySelector("svg").cloneNode(true);
    const before = figure.querySelectorAll(".mark");
    svg.querySelectorAll(".mark").forEach((mark, i) => {
      const tooltip = words.get(before[i]);
      mark.classList.remove("on");
      if (tooltip === undefined) return;
      const title = document.createElementNS("http://www.w3.org/2000/svg", "title");
      title.textContent = tooltip;
      mark.append(title);
    });
    const style = getComputedStyle(root);
    const box = svg.viewBox.baseVal;
    svg.setAttribute("width", box.width);
    svg.setAttribute("height", box.height);
    svg.setAttribute("style", `background:${style.getPropertyValue("--paper").trim()};font-family:sans-serif`);
    const text = new XMLSerializer().serializeToString(svg);
    return { text: text.replace(/var\((--\w+)[^)]*\)/g, (_, name) => style.getPropertyValue(name).trim()), box };
  };
  const save = (name, blob) => {
    const link = document.createElement("a");
    link.href = URL.createObjectURL(blob);
    link.download = name;
    link.click();
    setTimeout(() => URL.revokeObjectURL(link.href), 10000);
  };
  const asPng = async (figure) => {
    const { text, box } = standalone(figure);
    const image = new Image();
    image.src = URL.createObjectURL(new Blob([text], { type: "image/svg+xml" }));
    await image.decode();
    const canvas = document.createElement("canvas");
    canvas.width = 3 * box.width;
    canvas.height = 3 * box.height;
    canvas.getContext("2d").drawImage(image, 0, 0, canvas.width, canvas.height);
    URL.revokeObjectURL(image.src);
    return new Promise((done) => canvas.toBlob(done, "image/png"));
  };
  for (const button of document.querySelectorAll("button[data-save]")) {
    button.addEventListener("click", async () => {
      const figure = button.closest("figure");
      const kind = button.dataset.save;
      const blob = kind === "svg" ? new Blob([standalone(figure).text], { type: "image/svg+xml" })
        : kind === "png" ? await asPng(figure)
        : new Blob([figure.querySelector("pre").textContent], { type: "text/csv" });
      save(`${figure.id}.${kind}`, blob);
    });
  }
})();
