// The page: what is known of the home, the address, and the server, which is asked again and again for what changed.

import { h, morph, setWidths } from "./draw.js";
import * as views from "./views.js";

const s = {
  version: 0, runs: new Map(), stores: [], grids: [], waiting: 0, home: "", now: Date.now() / 1000,
  chosen: new Set(JSON.parse(sessionStorage.getItem("chosen") ?? "[]")),
  details: null, pictures: null, filter: "", state: "", sort: ["changed", true], most: 200, over: "seeds", metric: "accuracy",
};
let loaded = false, lost = false, asked = "", timer = null;
const main = document.getElementById("main");

const route = () => {
  const [page = "", ...rest] = location.hash.replace(/^#\/?/, "").split("/");
  return { page, name: decodeURIComponent(rest.join("/")) };
};

async function get(path) {
  const answer = await fetch(path, { cache: "no-store", credentials: "omit" });
  if (answer.status === 403) throw new Error("refused");
  return answer.json();
}

// ---- the home, as it changes ----

async function poll() {
  clearTimeout(timer);
  try {
    const found = await get(`api/changes?since=${s.version}`);
    for (const run of found.runs) s.runs.set(run.name, run);
    for (const name of found.gone) {
      s.runs.delete(name);
      s.chosen.delete(name);
    }
    const changed = found.runs.length + found.gone.length > 0;
    s.version = found.version;
    s.stores = found.stores;
    s.grids = found.grids;
    s.waiting = found.waiting;
    s.home = found.home;
    s.now = found.now;
    lost = false;
    loaded = loaded || !found.more;
    if (loaded) {
      await refresh(changed);
      render();
    }
    const busy = found.more || found.waiting > 0;
    timer = setTimeout(poll, busy ? 20 : document.hidden ? 10000 : 1000);
  } catch (error) {
    lost = true;
    render();
    timer = setTimeout(poll, 3000);
  }
}

// What the present page needs besides: asked when the page is opened, and again when what it shows may have changed.
async function refresh(changed) {
  const { page, name } = route(), key = location.hash;
  const run = s.runs.get(name);
  const known = { run: run !== undefined, grid: s.grids.some((g) => g.name === name), store: s.stores.some((one) => one.name === name) };
  if (known[page] === false) {
    s.details = s.waiting ? null : { problem: "There is nothing of that name here.", hint: "" };
    asked = "";
    return;
  }
  let path = null;
  if (page === "run" && (asked !== key || changed)) path = `api/run/${encodeURIComponent(name)}`;
  if (page === "grid" && (asked !== key || changed || s.details?.state === "running")) path = `api/grid/${encodeURIComponent(name)}`;
  if (page === "store" && (asked !== key || s.details?.unfinished?.length)) path = `api/store/${encodeURIComponent(name)}`;
  if (page === "compare" && asked !== key + s.over + s.metric) path = `api/compare?runs=${name}&over=${s.over}&metric=${s.metric}`;
  if (page === "report" && (asked !== key || s.details?.state === "working")) path = `api/report?runs=${name}`;
  if (page === "run" && asked === key && run && s.details?.seen === JSON.stringify(run)) path = null;
  if (path === null) return;
  const found = await get(path);
  if (key !== location.hash) return;
  asked = page === "compare" ? key + s.over + s.metric : key;
  s.details = found;
  if (page === "run") s.details.seen = JSON.stringify(run);
}

// ---- drawing ----

function view() {
  const { page, name } = route();
  if (!loaded) return h("p", { class: "note", role: "status" }, lost ? "" : "Reading the home …");
  switch (page) {
    case "": return views.overview(s);
    case "runs": return views.runsPage(s);
    case "run": return views.runPage(s, name);
    case "grids": return views.gridsPage(s);
    case "grid": return views.gridPage(s, name);
    case "stores": return views.storesPage(s);
    case "store": return views.storePage(s, name);
    case "compare": return views.comparePage(s);
    case "report": return views.reportPage(s);
    default: return h("p", { class: "notice" }, "There is no such page.");
  }
}

function render() {
  const made = h("main", { id: "main", tabindex: "-1" },
    lost && h("div", { class: "notice bad" }, h("p", {}, "The server does not answer: it was ended, or the address is of an earlier one."), h("p", {}, "fedcache ui")),
    view());
  morph(main, made);
  setWidths(main);
  const names = [...s.chosen].filter((n) => s.runs.has(n));
  const bar = document.getElementById("chosen");
  const list = names.map(encodeURIComponent).join(",");
  morph(bar, h("aside", { id: "chosen", "aria-label": "Chosen runs", hidden: !names.length }, h("div", {},
    h("p", {}, `${names.length} ${names.length === 1 ? "run" : "runs"} chosen`),
    h("a", { class: "button main", href: `#/compare/${list}` }, "Compare"), h("a", { class: "button main", href: `#/report/${list}` }, "Report"),
    h("button", { type: "button", "data-do": "clear" }, "Clear"))));
  document.body.classList.toggle("choosing", names.length > 0);
  const { page } = route();
  const part = { run: "runs", grid: "grids", store: "stores" }[page] ?? page;
  for (const a of document.querySelectorAll("nav a")) {
    if (a.hash === `#/${part}`) a.setAttribute("aria-current", "page");
    else a.removeAttribute("aria-current");
  }
  const atWork = [...s.runs.values()].filter((r) => r.state === "running").length;
  document.getElementById("pulse").className = `pulse ${lost ? "lost" : loaded ? "live" : ""}`;
  document.getElementById("pulse-words").textContent = lost ? "no answer" : !loaded ? "connecting" : s.waiting ? `reading, ${s.waiting} to go` : atWork ? `live, ${atWork} running` : "live";
  const heading = main.querySelector("h1")?.textContent.trim();
  document.title = heading && page ? `${heading} - fedcache` : "fedcache";
}

// ---- what a person does ----

async function open() {
  asked = "";
  s.details = null;
  s.pictures = null;
  s.most = 200;
  render();
  main.focus({ preventScroll: true });
  scrollTo(0, 0);
  try {
    if (loaded) await refresh(true);
  } catch {
    lost = true;
  }
  render();
}

function say(words) {
  document.getElementById("said").textContent = words;
}

async function copy(button) {
  try {
    await navigator.clipboard.writeText(button.dataset.text);
  } catch {
    const area = h("textarea", {}, button.dataset.text);
    document.body.append(area);
    area.select();
    document.execCommand("copy");
    area.remove();
    button.focus();
  }
  say("Copied.");
  button.textContent = "Copied";
  setTimeout(() => (button.textContent = "Copy"), 1500);
}

function choose(names, on) {
  for (const name of names) s.chosen[on ? "add" : "delete"](name);
  sessionStorage.setItem("chosen", JSON.stringify([...s.chosen]));
  say(`${s.chosen.size} chosen`);
  render();
}

const doing = {
  copy,
  sort(button) {
    const key = button.dataset.key;
    s.sort = [key, s.sort[0] === key ? !s.sort[1] : !["method", "dataset", "backbones", "partition", "state"].includes(key)];
    render();
  },
  more() {
    s.most += 500;
    render();
  },
  choose: (box) => choose([box.dataset.run], box.checked),
  clear() {
    choose([...s.chosen], false);
    main.focus();
  },
  "choose-all": () => choose(views.sorted(s, [...s.runs.values()].filter((r) => views.matches(r, s.filter) && r.state === "finished")).map((r) => r.name), true),
  "choose-points": () => choose(s.details.points.filter((p) => p.state === "finished").map((p) => p.run), true),
  async pictures(button) {
    const key = location.hash;
    s.pictures = "asked";
    render();
    const found = await get(`api/store/${encodeURIComponent(route().name)}/images?start=${Math.max(0, Number(button.dataset.start))}`);
    if (key !== location.hash) return;
    s.pictures = found;
    render();
  },
};

document.addEventListener("click", (event) => {
  const button = event.target.closest("[data-do]");
  if (button) doing[button.dataset.do](button);
  if (event.target.closest("#skip")) {
    event.preventDefault();
    main.focus();
  }
});
document.addEventListener("input", (event) => {
  if (event.target.id === "filter") {
    s.filter = event.target.value;
    s.most = 200;
    render();
  }
});
document.addEventListener("change", async (event) => {
  if (!["state", "over", "metric"].includes(event.target.id)) return;
  s[event.target.id] = event.target.value;
  if (event.target.id !== "state") s.details = null;
  render();
  if (event.target.id !== "state") {
    await refresh(true);
    render();
  }
});
document.addEventListener("keydown", (event) => {
  if (event.key !== "/" || event.ctrlKey || event.metaKey || event.altKey || /^(INPUT|SELECT|TEXTAREA)$/.test(event.target.nodeName)) return;
  event.preventDefault();
  if (route().page !== "runs") location.hash = "#/runs";
  setTimeout(() => document.getElementById("filter")?.focus(), 50);
});
document.addEventListener("visibilitychange", () => !document.hidden && poll());
addEventListener("hashchange", open);
addEventListener("resize", () => loaded && render());

// ---- light and dark ----

const dark = matchMedia("(prefers-color-scheme: dark)");
let theme = sessionStorage.getItem("theme");
function paint() {
  const now = theme ?? (dark.matches ? "dark" : "light");
  document.documentElement.dataset.theme = now;
  document.getElementById("theme").textContent = now === "dark" ? "Light" : "Dark";
}
document.getElementById("theme").addEventListener("click", () => {
  theme = document.documentElement.dataset.theme === "dark" ? "light" : "dark";
  sessionStorage.setItem("theme", theme);
  paint();
});
dark.addEventListener("change", paint);
paint();
render();
poll();
