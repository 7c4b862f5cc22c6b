// This script does what the server cannot do: it switches between light and dark, keeps the runs that are chosen, copies
// commands, and replaces the page that is shown when the home has changed. No text of a run or store is read as HTML,
// because the server escapes all texts.

"use strict";

// ---- light and dark: before the page is drawn ----

const dark = matchMedia("(prefers-color-scheme: dark)");
const paint = () => {
  document.documentElement.dataset.theme = sessionStorage.getItem("theme") ?? (dark.matches ? "dark" : "light");
};
dark.addEventListener("change", paint);
paint();

const byId = (id) => document.getElementById(id);

// ---- updating the page when the home changes ----

// Change `old` into `made`. Elements that are in both are kept, and with them focus, scrolling and open details.
function morph(old, made) {
  if (old.nodeName !== made.nodeName || (old.id ?? "") !== (made.id ?? "")) return old.replaceWith(made);
  if (old.nodeType !== Node.ELEMENT_NODE) {
    if (old.nodeValue !== made.nodeValue) old.nodeValue = made.nodeValue;
    return;
  }
  for (const { name } of [...old.attributes]) {
    if (!made.hasAttribute(name) && !(name === "open" && old.nodeName === "DETAILS")) old.removeAttribute(name);
  }
  for (const { name, value } of made.attributes) if (old.getAttribute(name) !== value) old.setAttribute(name, value);
  const left = [...old.childNodes];
  const right = [...made.childNodes];
  right.forEach((child, i) => (i < left.length ? morph(left[i], child) : old.append(child)));
  left.slice(right.length).forEach((child) => child.remove());
  if (/^(INPUT|SELECT)$/.test(old.nodeName) && old !== document.activeElement) old.value = made.value;
}

let requesting = false, again = false;
async function refresh() {
  again = true;
  if (requesting) return;
  requesting = true;
  try {
    while (again) {
      again = false;
      const answer = await fetch(location.href, { cache: "no-store", credentials: "omit" });
      const made = new DOMParser().parseFromString(await answer.text(), "text/html");
      if (again || !made.getElementById("main")) continue;
      for (const id of ["main", "pulse"]) morph(byId(id), made.getElementById(id));
      mark();
    }
  } finally {
    requesting = false;
  }
}

// A hidden window needs no events, and a browser opens at most six streams to one server.
let events = null;
function listen() {
  events?.close();
  events = null;
  if (document.hidden) return;
  events = new EventSource("events");
  events.onmessage = (event) => event.data !== byId("main").dataset.version && refresh();
  events.onopen = () => lose(false);
  events.onerror = () => lose(true);
}

function lose(lost) {
  byId("lost").hidden = !lost;
  byId("pulse").classList.toggle("lost", lost);
}

// The address holds the filter, the order and the number of rows, so that the same page can be requested again.
function show(address) {
  history.replaceState(null, "", address);
  refresh();
}

// ---- chosen runs ----

const chosen = new Set(JSON.parse(sessionStorage.getItem("chosen") ?? "[]"));

function mark() {
  for (const box of document.querySelectorAll("input[data-run]")) {
    box.checked = chosen.has(box.dataset.run);
    box.closest("tr")?.classList.toggle("chosen", box.checked);
  }
  const bar = byId("chosen");
  bar.hidden = !chosen.size;
  document.body.classList.toggle("choosing", chosen.size > 0);
  bar.querySelector("p").textContent = `${chosen.size} ${chosen.size === 1 ? "run" : "runs"} chosen`;
  for (const a of bar.querySelectorAll("a")) a.href = `${a.dataset.to}?runs=${[...chosen].map(encodeURIComponent).join(",")}`;
}

function choose(names, on) {
  for (const name of names) chosen[on ? "add" : "delete"](name);
  sessionStorage.setItem("chosen", JSON.stringify([...chosen]));
  byId("announced").textContent = `${chosen.size} chosen`;
  mark();
}

// ---- clicks, input and keys ----

const doing = {
  async copy(button) {
    await navigator.clipboard.writeText(button.dataset.text);
    byId("announced").textContent = "Copied.";
    button.textContent = "Copied";
    setTimeout(() => (button.textContent = "Copy"), 1500);
  },
  all: (button) => choose(button.dataset.runs.split(","), true),
  clear() {
    choose([...chosen], false);
    byId("main").focus();
  },
};

document.addEventListener("click", (event) => {
  const at = event.target.closest("button, a[data-here]");
  if (!at) return;
  if (at.id === "theme") {
    sessionStorage.setItem("theme", document.documentElement.dataset.theme === "dark" ? "light" : "dark");
    paint();
  } else if (at.dataset.do) doing[at.dataset.do](at);
  else if (at.dataset.here !== undefined && !event.ctrlKey && !event.metaKey && !event.shiftKey) {
    event.preventDefault();
    show(at.href);
  }
});
document.addEventListener("input", (event) => {
  const form = event.target.closest("form[data-live]");
  if (form) show(`${form.action}?${new URLSearchParams(new FormData(form))}`);
  if (event.target.dataset.run) choose([event.target.dataset.run], event.target.checked);
});
document.addEventListener("keydown", (event) => {
  if (event.key !== "/" || event.ctrlKey || event.metaKey || event.altKey || /^(INPUT|SELECT|TEXTAREA)$/.test(event.target.nodeName)) return;
  event.preventDefault();
  if (byId("filter")) byId("filter").focus();
  else location.href = "runs#filter";
});
document.addEventListener("DOMContentLoaded", () => {
  mark();
  listen();
  if (location.hash === "#filter") byId("filter")?.focus();
  document.addEventListener("visibilitychange", listen);
});
