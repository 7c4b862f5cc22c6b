// What each address of the page shows, from what is known; the script `page.js` asks for what is not.

import { ago, bar, bytes, command, commands, count, curve, duration, facts, h, notice, percent, scroll, settings, share, tag } from "./draw.js";

const short = (name) => (/^[0-9a-f]{16}$/.test(name) ? name.slice(0, 8) : name);
const link = (to, text, more = {}) => h("a", { href: `#/${to}`, ...more }, text);
const held = (run) => (run.hold_out ? `hold_out=${run.hold_out}` : "");
const runLink = (run) => link(`run/${encodeURIComponent(run.name)}`, run.method ?? short(run.name));
const finished = (s) => [...s.runs.values()].filter((r) => r.state === "finished");
const loading = () => h("p", { class: "note" }, "Reading …");

// ---- overview ----

export function overview(s) {
  const runs = [...s.runs.values()], done = finished(s), atWork = runs.filter((r) => r.state === "running");
  const grids = s.grids.filter((g) => g.state === "running");
  const head = [h("h1", {}, "This home"), h("p", { class: "lead" }, h("code", {}, s.home))];
  if (!runs.length && !s.stores.length && !s.grids.length && !s.waiting) return [head, firstSteps()];
  const lost = runs.filter((r) => r.state === "damaged");
  const latest = done.sort((a, b) => b.changed - a.changed).slice(0, 8);
  return [
    head,
    facts([["stores", String(s.stores.length)], ["finished runs", done.length.toLocaleString("en")], ["running", String(atWork.length)],
      ["stopped", String(runs.filter((r) => r.state === "stopped").length)], ["grids", String(s.grids.length)],
      ["damaged", lost.length ? String(lost.length) : ""]]),
    h("h2", {}, "At work now"),
    grids.length + atWork.length
      ? h("ul", { class: "cards" }, grids.map((g) => gridCard(g)), atWork.slice(0, grids.length ? 6 : 12).map(runCard))
      : h("p", { class: "note" }, "Nothing is being trained."),
    atWork.length > 12 && h("p", {}, link("runs", `All ${atWork.length} runs at work`)),
    latest.length > 0 && [h("h2", {}, "Latest results"), runTable(s, latest, { sortable: false, label: "Latest results" }),
      done.length > latest.length && h("p", {}, link("runs", `All ${count(runs.length, "run")}`))],
    s.stores.length > 0 && [h("h2", {}, "Stores"), storeTable(s)],
    !done.length && !atWork.length && s.stores.length > 0 && [h("h2", {}, "Next"),
      command("fedcache train --method fed3r", "Train on what was extracted")],
  ];
}

const firstSteps = () => [
  h("div", { class: "card" }, h("h2", {}, "Nothing is here yet"),
    h("p", {}, "Everything is made on the command line; this page shows it as it comes."),
    command("fedcache demo", "See the whole of it on offline data"),
    command("fedcache extract --dataset folder:IMAGES --backbones efficientnet-lite0", "Extract features of your own images"),
    command("fedcache grid --method fedavg,fed3r --sweep lr=0.1,0.01", "Train a grid on them")),
];

const runCard = (r) => h("li", { class: "card" }, h("h3", {}, runLink(r), held(r) && ` ${held(r)}`, " ", h("span", { class: "note" }, r.dataset ?? "")),
  bar(r.done, r.total, `Rounds of ${r.method}`), h("p", { class: "note" }, progressWords(r)));

const gridCard = (g) => h("li", { class: "card" },
  h("h3", {}, link(`grid/${g.name}`, `Grid of ${g.methods.join(", ")}`)), bar(g.share * g.of, g.of, "Points of the grid"),
  h("p", { class: "note" }, gridWords(g)));

function progressWords(r) {
  const parts = [`${r.done.toLocaleString("en")} of ${r.total.toLocaleString("en")} rounds`];
  if (r.accuracy !== null && r.accuracy !== undefined) parts.push(`accuracy ${percent(r.accuracy)} %${r.at_round ? ` in round ${r.at_round}` : ""}`);
  if (r.sent) parts.push(`${bytes(r.sent)} up`);
  if (r.left !== null && r.left !== undefined) parts.push(`${duration(r.left)} left`);
  return parts.join(", ");
}

function gridWords(g) {
  const parts = [`${g.done} of ${count(g.of, "point")} done`];
  if (g.failed) parts.push(`${g.failed} failed`);
  if (g.pruned) parts.push(`${g.pruned} pruned`);
  if (g.running) parts.push(`${g.running} running`);
  if (g.best) parts.push(`highest ${percent(g.best.choice)} % (${pointWords(g.best)})`);
  if (g.state === "running" && g.left !== null) parts.push(`about ${duration(g.left)} left`);
  return parts.join(", ");
}

const pointWords = (p) => [p.method, ...Object.entries(p.sweep).map(([k, v]) => `${k}=${v}`)].join(" ");

// ---- runs ----

const COLUMNS = [
  ["method", "run", false, ""], ["dataset", "dataset", false, "wide"], ["backbones", "backbones", false, "wide"],
  ["partition", "partition", false, "wide"], ["accuracy", "accuracy %", true, ""], ["validation", "validation %", true, "wide"],
  ["sent", "bytes up", true, "wide"], ["seconds", "time", true, "wide"], ["changed", "when", true, "wide"], ["state", "state", false, ""],
];

export function runsPage(s) {
  const every = [...s.runs.values()];
  const states = ["finished", "running", "stopped", "damaged"].filter((w) => every.some((r) => r.state === w));
  const shown = sorted(s, every.filter((r) => matches(r, s.filter) && (!s.state || r.state === s.state)));
  if (!every.length) return [h("h1", {}, "Runs"), s.waiting ? loading() : command("fedcache train --method fed3r", "There is no run yet")];
  const choosable = shown.filter((r) => r.state === "finished");
  return [
    h("h1", {}, "Runs"),
    h("div", { class: "tools" },
      h("label", {}, "Filter", h("input", { type: "search", id: "filter", value: s.filter, placeholder: "method, setting, dataset …" })),
      h("label", {}, "State", h("select", { id: "state" }, h("option", { value: "", selected: !s.state }, "all"),
        states.map((w) => h("option", { value: w, selected: s.state === w }, w)))),
      h("span", { class: "note", role: "status" }, `${count(shown.length, "run")}${shown.length < every.length ? ` of ${every.length.toLocaleString("en")}` : ""}${s.waiting ? `, ${s.waiting.toLocaleString("en")} more being read` : ""}`),
      choosable.length > 1 && choosable.length <= 1000 && h("button", { type: "button", "data-do": "choose-all" }, `Choose all ${choosable.length} finished`)),
    runTable(s, shown.slice(0, s.most), { sortable: true, label: "Runs" }),
    shown.length > s.most && h("p", {}, h("button", { type: "button", "data-do": "more" }, `Show ${Math.min(500, shown.length - s.most)} more`)),
  ];
}

export const matches = (r, filter) => filter.toLowerCase().split(/\s+/).every((word) => !word ||
  [r.name, r.method, r.dataset, r.backbones, r.partition, held(r), r.state, `rounds=${r.rounds}`, ...Object.entries(r.set ?? {}).map(([k, v]) => `${k}=${v}`)].some((v) => String(v ?? "").toLowerCase().includes(word)));

export function sorted(s, runs) {
  const [key, down] = s.sort;
  const worth = (r) => (key === "sent" && r.state !== "finished" ? null : r[key]);
  return runs.sort((a, b) => {
    const x = worth(a), y = worth(b);
    if (x === y) return a.name < b.name ? -1 : 1;
    if (x === null || x === undefined) return 1;
    if (y === null || y === undefined) return -1;
    return (x < y ? -1 : 1) * (down ? -1 : 1);
  });
}

// What tells the runs of a method apart: the settings that are not the same in all of them.
function differing(runs) {
  const seen = new Map();
  for (const r of runs) {
    const mine = seen.get(r.method) ?? seen.set(r.method, new Map()).get(r.method);
    for (const [k, v] of Object.entries({ rounds: String(r.rounds), ...r.set })) (mine.get(k) ?? mine.set(k, new Set()).get(k)).add(v);
  }
  return (r) => [held(r), ...Object.entries({ rounds: String(r.rounds), ...r.set }).filter(([k]) => seen.get(r.method)?.get(k)?.size > 1)
    .slice(0, 4).map(([k, v]) => `${k}=${v}`)].filter(Boolean).join(" ");
}

function runTable(s, runs, { sortable, label }) {
  const words = differing([...s.runs.values()]);
  const [key, down] = s.sort;
  const head = COLUMNS.map(([name, title, right, wide]) => h("th", { scope: "col", class: [right && "num", wide].filter(Boolean).join(" ") || null,
    "aria-sort": sortable && key === name ? (down ? "descending" : "ascending") : null },
  sortable ? h("button", { type: "button", "data-do": "sort", "data-key": name }, title) : title));
  return scroll(label, h("table", {}, h("thead", {}, h("tr", {}, h("th", { scope: "col" }, h("span", { class: "hidden" }, "Choose")), head)),
    h("tbody", {}, runs.map((r) => runRow(s, r, words(r))))));
}

function runRow(s, r, words) {
  const some = (text, cls) => h("td", { class: cls }, text ?? "");
  const std = r.seeds > 1 && r.std ? ` ± ${percent(r.std)}` : "";
  const accuracy = r.accuracy === null || r.accuracy === undefined ? "" : percent(r.accuracy) + (r.state === "finished" ? std : "");
  return h("tr", { class: s.chosen.has(r.name) ? "chosen" : null },
    h("td", {}, r.state === "finished" && chooser(s, r)),
    h("th", { scope: "row" }, runLink(r), words && ` ${words}`, " ", h("span", { class: words ? "note wide" : "note" }, short(r.name)), r.claimed && h("span", { class: "note" }, " (as the sites claim)")),
    some(r.dataset, "wide"), some(r.backbones, "wide"), some(String(r.partition ?? ""), "wide"),
    some(accuracy, "num"), some(percent(r.validation), "num wide"), some(bytes(r.sent), "num wide"),
    some(r.state === "running" && r.left !== null ? `${duration(r.left)} left` : duration(r.seconds), "num wide"), some(ago(r.changed, s.now), "num wide"),
    h("td", {}, tag(r.state), r.state === "running" && bar(r.done, r.total, `Rounds of ${r.method}`)));
}

const chooser = (s, r) => h("input", { type: "checkbox", id: `choose-${r.name}`, "data-do": "choose", "data-run": r.name, checked: s.chosen.has(r.name),
  "aria-label": `Choose ${[r.method, held(r), short(r.name)].filter(Boolean).join(" ")}` });

export function runPage(s, name) {
  const r = s.runs.get(name), d = s.details;
  if (!r && !d) return [h("h1", {}, short(name)), loading()];
  if (!r) return [h("h1", {}, short(name)), notice(d.problem ?? "There is no such run.", "")];
  const back = h("p", { class: "note" }, link("runs", "Runs"), ` / ${r.name}`);
  const head = h("h1", {}, `${[r.method ?? short(name), held(r)].filter(Boolean).join(" ")} `, tag(r.state));
  if (r.state === "damaged") return [back, head, notice(r.problem, r.hint)];
  const open = r.state !== "finished";
  const seeds = (d?.per_seed ?? []).filter(([, a]) => a !== null);
  return [
    back, head,
    h("p", { class: "lead" }, d?.setting_name ?? [r.dataset, r.partition].filter(Boolean).join(", "), r.backbones ? ` on ${r.backbones}` : ""),
    d?.problem && notice(d.problem, d.hint),
    open && bar(r.done, r.total, "Rounds"),
    open && h("p", { class: "note", role: "status" }, r.done ? progressWords(r) : `0 of ${r.total} rounds; a run keeps its state after two seconds at the earliest, and shows here from then on`),
    r.state === "stopped" && h("p", { class: "notice" }, "The process that trained it is gone. What it kept is here, and the command below goes on from there."),
    facts([["accuracy %", r.accuracy === null ? "" : percent(r.accuracy) + (r.std && r.seeds > 1 ? ` ± ${percent(r.std)}` : "")], ["validation %", percent(r.validation)],
      ["macro F1 %", percent(d?.macro_f1)], ["worst 10 % of clients %", percent(d?.fairness?.worst10)], ["clients", r.clients ? r.clients.toLocaleString("en") : ""],
      ["rounds", String(r.rounds)], ["seeds", String(r.seeds)], ["bytes up", bytes(r.sent)], ["bytes down", bytes(r.received)],
      ["training", duration(r.seconds)], ["time left", open ? duration(r.left) : ""]]),
    r.state === "finished" && h("p", { class: "tools" }, chooser(s, r), h("label", { for: `choose-${r.name}` }, "Choose it for a comparison or a report")),
    h("div", { class: "two" },
      h("div", {}, h("h2", {}, "Accuracy by round"), (d && curve(d.curves, r.rounds, "Accuracy")) ?? h("p", { class: "note" }, d ? "No round was scored yet (--eval-every 1 scores each)." : "Reading …"),
        d?.validation_curves && Object.keys(d.validation_curves).length > 0 && curve(d.validation_curves, r.rounds, "Validation accuracy"),
        seeds.length > 1 && [h("h2", {}, "Seeds"), facts(seeds.map(([seed, a]) => [`seed ${seed}`, percent(a)]), true)]),
      h("div", {}, h("h2", {}, "Commands"), commands(d?.commands), h("h2", {}, "Settings"),
        d ? settings("Settings of the method", d.settings) : loading(),
        d && Object.keys(d.options ?? {}).length > 0 && h("details", {}, h("summary", {}, "All options"), settings("All options", d.options)))),
  ];
}

// ---- grids ----

export const gridsPage = (s) => [h("h1", {}, "Grids"), s.grids.length
  ? scroll("Grids", h("table", {},
    h("thead", {}, h("tr", {}, ["grid", "points", "highest %", "begun", "state"].map((w, i) =>
      h("th", { scope: "col", class: [i === 2 && "num", i === 3 && "wide"].filter(Boolean).join(" ") || null }, w)))),
    h("tbody", {}, s.grids.map((g) => h("tr", {},
      h("th", { scope: "row" }, link(`grid/${g.name}`, g.methods.join(", ") || g.name), h("span", { class: "note" }, g.keys.length ? ` over ${g.keys.join(", ")}` : "")),
      g.state === "damaged" ? h("td", {}) : h("td", {}, `${g.done} of ${g.of}`, bar(g.share * g.of, g.of, "Points")), h("td", { class: "num" }, g.best ? percent(g.best.choice) : ""),
      h("td", { class: "wide" }, ago(g.started, s.now)), h("td", {}, tag(g.state)))))))
  : command("fedcache grid --method fedavg,fed3r --sweep lr=0.1,0.01", "There is no grid yet")];

export function gridPage(s, name) {
  const g = s.details, line = s.grids.find((one) => one.name === name);
  if (!g) return [h("h1", {}, "Grid"), loading()];
  if (!g.points) return [h("h1", {}, "Grid"), notice(g.problem ?? "There is no such grid.", "")];
  const done = g.points.filter((p) => p.state === "finished");
  const known = g.points.filter((p) => p.accuracy !== null && p.accuracy !== undefined);
  const byValidation = known.length > 0 && known.every((p) => p.validation !== null && p.validation !== undefined);
  const ranked = [...g.points].sort((a, b) => (b.choice ?? -1) - (a.choice ?? -1) || a.number - b.number);
  const top = ranked[0]?.choice !== null && ranked[0]?.state === "finished" ? ranked[0] : null;
  return [
    h("p", { class: "note" }, link("grids", "Grids"), ` / ${g.name}`),
    h("h1", {}, `${g.methods.join(", ")}${g.keys.length ? ` over ${g.keys.join(", ")}` : ""} `, tag(g.state)),
    bar(line ? line.share * line.of : done.length, g.of, "Points"),
    h("p", { class: "note", role: "status" }, line ? gridWords(line) : `${done.length} of ${count(g.of, "point")} done`),
    g.problem && h("div", { class: "notice" }, h("p", {}, g.problem), h("p", {}, "The same command goes on: finished points are not trained again.")),
    !g.here && h("p", { class: "notice" }, "Its runs are in another directory (--runs), which this page does not show."),
    top && h("p", {}, "Highest ", byValidation ? "validation" : "test", " accuracy: ", link(`run/${top.run}`, pointWords(top)), ` ${percent(top.choice)} %`,
      byValidation ? `, ${percent(top.accuracy)} % on test rows.` : " (on test rows, which is no choice: --validation 0.2 keeps rows to choose by)."),
    matrix(g, top, byValidation),
    h("h2", {}, "Points"),
    done.length > 1 && h("p", {}, h("button", { type: "button", "data-do": "choose-points" }, `Choose all ${done.length} finished`)),
    scroll("Points", h("table", {}, h("thead", {}, h("tr", {}, h("th", { scope: "col" }, h("span", { class: "hidden" }, "Choose")), h("th", { scope: "col" }, "point"),
      h("th", { scope: "col", class: "num" }, "accuracy %"), byValidation && h("th", { scope: "col", class: "num" }, "validation %"),
      h("th", { scope: "col", class: "num wide" }, "bytes up"), h("th", { scope: "col", class: "num wide" }, "time"), h("th", { scope: "col" }, "state"))),
    h("tbody", {}, ranked.slice(0, s.most).map((p) => h("tr", { class: s.chosen.has(p.run) ? "chosen" : null },
      h("td", {}, p.state === "finished" && s.runs.has(p.run) && chooser(s, s.runs.get(p.run))),
      h("th", { scope: "row" }, p.run && p.state !== "gone" ? link(`run/${p.run}`, pointWords(p)) : pointWords(p), p.problem && h("p", { class: "note" }, p.problem)),
      h("td", { class: "num" }, percent(p.accuracy), p.state === "finished" && p.std ? ` ± ${percent(p.std)}` : ""),
      byValidation && h("td", { class: "num" }, percent(p.validation)), h("td", { class: "num wide" }, bytes(p.sent)),
      h("td", { class: "num wide" }, p.state === "running" && p.left !== null ? `${duration(p.left)} left` : duration(p.seconds)),
      h("td", {}, tag(p.state), p.state === "running" && bar(p.done, p.total, `Rounds of ${pointWords(p)}`))))))),
    ranked.length > s.most && h("p", {}, h("button", { type: "button", "data-do": "more" }, "Show more")),
    h("h2", {}, "Command"), command(g.command, "Make it again, or go on: finished points are taken as they are"),
  ];
}

// Two things that vary make a table of their own: methods and a key, or two keys.
function matrix(g, top, byValidation) {
  const ways = [...(g.methods.length > 1 ? ["method"] : []), ...g.keys];
  if (ways.length < 1 || ways.length > 2 || g.points.length > 400 || g.points.length < 2) return null;
  const [across, down] = ways.length === 2 ? [ways[1], ways[0]] : [ways[0], null];
  const at = (p, way) => (way === "method" ? p.method : p.sweep[way]);
  const columns = [...new Set(g.points.map((p) => at(p, across)))], rows = down ? [...new Set(g.points.map((p) => at(p, down)))] : [""];
  if (columns.length > 30) return null;
  const known = g.points.map((p) => p.choice).filter((v) => v !== null && v !== undefined);
  const low = Math.min(...known), span = Math.max(...known) - low;
  const shade = (v) => `h${span > 0 ? Math.min(4, Math.floor((5 * (v - low)) / span)) : 2}`;
  const cell = (p) => {
    if (!p) return h("td", {}, "");
    if (p.state === "finished") {
      const text = percent(p.choice);
      return h("td", { class: [shade(p.choice), p === top && "top"].filter(Boolean).join(" ") }, link(`run/${p.run}`, text, { "aria-label": `${pointWords(p)}: ${text} %` }));
    }
    if (p.state === "running") {
      const now = byValidation ? p.validation : p.accuracy;
      const text = now !== null && now !== undefined ? `${percent(now)} …` : `${p.done} of ${p.total}`;
      return h("td", { class: "running" }, link(`run/${p.run}`, text, { "aria-label": `${pointWords(p)}: running, ${text}` }));
    }
    return h("td", { class: p.state }, p.state);
  };
  return [h("h2", {}, `${byValidation ? "Validation" : "Test"} accuracy in %${g.state === "running" ? ", as it fills" : ""}`),
    scroll("Accuracy of the points", h("table", { class: "heat" }, h("thead", {}, h("tr", {}, h("th", { scope: "col" }, down ? `${down} \\ ${across}` : across),
      columns.map((c) => h("th", { scope: "col" }, c)))),
    h("tbody", {}, rows.map((r) => h("tr", {}, h("th", { scope: "row" }, down ? r : "accuracy"),
      columns.map((c) => cell(g.points.find((p) => at(p, across) === c && (!down || at(p, down) === r)))))))))];
}

// ---- stores ----

export const storesPage = (s) => [h("h1", {}, "Stores"), s.stores.length ? storeTable(s)
  : command("fedcache extract --dataset folder:IMAGES --backbones efficientnet-lite0", "There is no store yet")];

const storeTable = (s) => scroll("Stores", h("table", {},
  h("thead", {}, h("tr", {}, h("th", { scope: "col" }, "store"), h("th", { scope: "col", class: "num" }, "rows"), h("th", { scope: "col" }, "features"),
    h("th", { scope: "col", class: "wide" }, "partitions"), h("th", { scope: "col", class: "num wide" }, "size"))),
  h("tbody", {}, s.stores.map((one) => h("tr", {}, h("th", { scope: "row" }, link(`store/${encodeURIComponent(one.name)}`, one.name)),
    one.problem ? h("td", { colspan: 4 }, tag("damaged"), " ", one.problem) : [
      h("td", { class: "num" }, one.ok.toLocaleString("en")),
      h("td", {}, one.arrays.join(", "), one.unfinished.map((u) => [h("p", { class: "note" }, `${u.name}: ${u.kept} of ${u.chunks} chunks`), bar(u.kept, u.chunks, `Chunks of ${u.name}`)])),
      h("td", { class: "wide" }, one.partitions.join(", ")), h("td", { class: "num wide" }, bytes(one.bytes))])))));

export function storePage(s, name) {
  const d = s.details;
  const back = h("p", { class: "note" }, link("stores", "Stores"), ` / ${name}`);
  if (!d) return [back, h("h1", {}, name), loading()];
  if (d.problem) return [back, h("h1", {}, name), notice(d.problem, d.hint)];
  const most = Math.max(...d.classes.map(([, n]) => n), 1);
  return [
    back, h("h1", {}, d.dataset.slug), h("p", { class: "lead" }, h("code", {}, d.path)),
    facts([[`readable ${d.holds}`, `${d.ok.toLocaleString("en")} of ${d.rows.toLocaleString("en")}`], ["classes", String(d.classes.length)], ...Object.entries(d.splits).filter(([, n]) => n)
      .map(([k, n]) => [k, n.toLocaleString("en")]), ["domains", d.domains.join(", ")], ["partitions", d.partitions.join(", ")], ["text features", d.text.join(", ")],
    ["groups", Object.entries(d.groups).map(([k, n]) => `${k} (${n})`).join(", ")], ["no longer in the dataset", d.vanished ? String(d.vanished) : ""]]),
    d.unreadable.length > 0 && h("details", {}, h("summary", {}, `${count(d.unreadable.length, "row")} could not be read`),
      h("ul", {}, d.unreadable.map((e) => h("li", {}, `row ${e.row} (${e.name}): ${e.reason}`)))),
    d.unfinished.map((u) => [h("p", { class: "note" }, `${u.name}: ${u.kept} of ${u.chunks} chunks; the same extract command goes on`), bar(u.kept, u.chunks, `Chunks of ${u.name}`)]),
    h("div", { class: "two" },
      h("div", {}, h("h2", {}, "Feature arrays"), scroll("Feature arrays", h("table", {}, h("thead", {}, h("tr", {}, ["array", "shape", "dtype"].map((w) => h("th", { scope: "col" }, w)))),
        h("tbody", {}, d.arrays.map((a) => h("tr", {}, h("th", { scope: "row" }, a.name), h("td", {}, a.shape.join(" × ")), h("td", {}, a.dtype)))))),
      d.arrays.map((a) => h("details", {}, h("summary", {}, `How ${a.name} was made`), settings(`How ${a.name} was made`, { ...a.recipe, ...a.how }))),
      h("h2", {}, "Images"), thumbnails(s)),
      h("div", {}, h("h2", {}, "Commands"), commands(d.commands), h("h2", {}, "Classes"),
        scroll("Classes", h("table", {}, h("thead", {}, h("tr", {}, h("th", { scope: "col" }, "class"), h("th", { scope: "col", class: "num" }, "rows"), h("th", { scope: "col" }, h("span", { class: "hidden" }, "share")))),
          h("tbody", {}, d.classes.slice(0, s.most).map(([c, n]) => h("tr", {}, h("th", { scope: "row" }, c), h("td", { class: "num" }, n.toLocaleString("en")), h("td", {}, share(n, most))))))))),
  ];
}

function thumbnails(s) {
  const p = s.pictures;
  if (!p) return [h("p", { class: "note" }, "They are read from where the dataset lies, and only when you ask. Images may be personal data."),
    h("button", { type: "button", "data-do": "pictures", "data-start": 0 }, "Show thumbnails")];
  if (p === "asked") return h("p", { class: "note", role: "status" }, "Reading images …");
  if (p.problem) return notice(p.problem, p.hint);
  const last = p.start + p.page;
  return [h("p", { class: "note", role: "status" }, `${p.start + 1} to ${Math.min(last, p.of)} of ${p.of.toLocaleString("en")} images`),
    h("ul", { class: "pictures" }, p.images.map((i) => h("li", {}, h("img", { src: i.uri, alt: `${i.class}, row ${i.row}`, width: 64, height: 64 }), `${i.class} (${i.split})`))),
    h("p", { class: "tools" }, h("button", { type: "button", "data-do": "pictures", "data-start": p.start - p.page, disabled: p.start === 0 }, "Earlier"),
      h("button", { type: "button", "data-do": "pictures", "data-start": last, disabled: last >= p.of }, "Later"))];
}

// ---- compare and report ----

const choices = (id, words, options, value) => h("label", {}, words, h("select", { id }, options.map((o) => h("option", { value: o, selected: o === value }, o))));

export function comparePage(s) {
  const d = s.details;
  return [
    h("h1", {}, "Comparison"),
    h("div", { class: "tools" }, choices("over", "Pair values over", ["seeds", "clients", "settings"], s.over),
      choices("metric", "Score", ["accuracy", "client_mean", "pooled", "macro_f1"], s.metric)),
    !d ? h("p", { class: "note", role: "status" }, "Comparing …") : d.problem ? notice(d.problem, d.hint) : [
      d.said.map((line) => h("p", { class: "notice" }, line)),
      d.tables.map((t) => [h("h2", {}, t.setting), t.sheets.map((sheet, i) => scroll(i ? "Differences" : "Values", sheetTable(sheet))),
        h("p", { class: "note" }, t.caption.charAt(0).toUpperCase() + t.caption.slice(1)), t.notes.map((n) => h("p", { class: "note" }, n))]),
      d.left_out.map(([, line, hint]) => h("p", { class: "notice" }, line, " ", hint)),
      h("h2", {}, "Command"), command(d.command)],
  ];
}

const sheetTable = (sheet) => h("table", {}, h("thead", {}, h("tr", {}, sheet.columns.map((c, i) => h("th", { scope: "col", class: i ? "num" : null }, c)))),
  h("tbody", {}, sheet.rows.map((row, r) => h("tr", {}, row.map((cell, i) => h(i ? "td" : "th", { scope: i ? null : "row",
    class: [i && "num", sheet.best.includes(r) && i < 2 && "best"].filter(Boolean).join(" ") || null }, cell, i === 1 && sheet.alike.includes(r) ? " †" : ""))))));

export function reportPage(s) {
  const d = s.details;
  if (!d || d.state === "working") return [h("h1", {}, "Report"), h("p", { class: "note", role: "status" }, d ? `Writing the report: ${d.what}${d.total ? `, ${d.done} of ${d.total}` : ""} …` : "Asking …"),
    d?.total ? bar(d.done, d.total, d.what) : null, d && command(d.command, "The same by hand")];
  if (d.problem) return [h("h1", {}, "Report"), notice(d.problem, d.hint)];
  return [h("h1", {}, "Report"),
    h("p", { class: "tools" }, h("a", { class: "button main", href: `report/${d.id}.html`, target: "_blank", rel: "noopener" }, "Open in a window of its own"),
      h("a", { class: "button", href: `report/${d.id}.html`, download: "report.html" }, "Save"), h("span", { class: "note" }, `${count(d.runs, "run")}, ${bytes(d.bytes)}${d.left_out ? `, ${d.left_out} left out` : ""}`)),
    h("iframe", { id: `report-${d.id}`, src: `report/${d.id}.html`, title: "The report", class: "report" }),
    command(d.command, "The same by hand")];
}
