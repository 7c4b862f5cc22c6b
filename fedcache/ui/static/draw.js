// Elements, words and drawings of the page. Nothing here asks the server, and no text is ever read as HTML.

const SVG = "http://www.w3.org/2000/svg";
const DRAWN = new Set(["svg", "g", "path", "line", "text", "circle", "title"]);

export function h(tag, attributes, ...children) {
  const made = DRAWN.has(tag) ? document.createElementNS(SVG, tag) : document.createElement(tag);
  for (const [name, value] of Object.entries(attributes ?? {})) {
    if (value === true) made.setAttribute(name, "");
    else if (value !== false && value !== null && value !== undefined) made.setAttribute(name, value);
  }
  for (const child of children.flat(9)) {
    if (child !== null && child !== undefined && child !== false) made.append(child);
  }
  return made;
}

// Make `old` what `made` is, and keep every element that stays: focus, scrolling and open details stay with it.
export function morph(old, made) {
  if (old.nodeType !== made.nodeType || old.nodeName !== made.nodeName || (old.id ?? "") !== (made.id ?? "")) {
    old.replaceWith(made);
    return;
  }
  if (old.nodeType !== Node.ELEMENT_NODE) {
    if (old.nodeValue !== made.nodeValue) old.nodeValue = made.nodeValue;
    return;
  }
  for (const { name } of [...old.attributes]) {
    if (!made.hasAttribute(name) && name !== "style" && !(name === "open" && old.nodeName === "DETAILS")) old.removeAttribute(name);
  }
  for (const { name, value } of [...made.attributes]) if (old.getAttribute(name) !== value) old.setAttribute(name, value);
  if (old.nodeName === "INPUT") {
    if (old.type === "checkbox") {
      old.checked = made.hasAttribute("checked");
      old.indeterminate = made.hasAttribute("data-some");
    } else if (old !== document.activeElement) old.value = made.getAttribute("value") ?? "";
  }
  const left = [...old.childNodes];
  const right = [...made.childNodes];
  right.forEach((child, i) => (i < left.length ? morph(left[i], child) : old.append(child)));
  left.slice(right.length).forEach((child) => child.remove());
}

// ---- words ----

export const percent = (x) => (x === null || x === undefined ? "" : (100 * x).toFixed(2));

export function bytes(count) {
  if (count === null || count === undefined) return "";
  let value = count;
  for (const unit of ["B", "kB", "MB", "GB", "TB"]) {
    if (value < 1000 || unit === "TB") return unit === "B" ? `${count} B` : `${value.toFixed(1)} ${unit}`;
    value /= 1000;
  }
}

export function duration(seconds) {
  if (seconds === null || seconds === undefined) return "";
  if (seconds < 10) return `${seconds.toFixed(1)} s`;
  if (seconds < 90) return `${Math.round(seconds)} s`;
  const minutes = Math.round(seconds / 60);
  return minutes < 60 ? `${minutes} min` : `${Math.floor(minutes / 60)} h ${minutes % 60} min`;
}

export function ago(then, now) {
  const s = Math.max(0, now - then);
  if (s < 60) return "just now";
  if (s < 3600) return `${Math.floor(s / 60)} min ago`;
  if (s < 86400) return `${Math.floor(s / 3600)} h ago`;
  return new Date(then * 1000).toISOString().slice(0, 10);
}

export const count = (n, one, many = `${one}s`) => `${n.toLocaleString("en")} ${n === 1 ? one : many}`;

// ---- parts ----

export const tag = (state) => h("span", { class: `tag ${state}` }, state);

export function bar(done, total, label) {
  const share = total ? Math.min(100, (100 * done) / total) : 0;
  return h("div", { class: total > 0 && done >= total ? "bar done" : "bar", role: "progressbar", "aria-label": label, "aria-valuemin": 0,
    "aria-valuemax": total, "aria-valuenow": done, "data-share": share }, h("span", {}));
}

// A length beside a figure that says the same, so it is left out for who does not see it.
export const share = (part, of) => h("div", { class: "bar", "aria-hidden": "true", "data-share": (100 * part) / Math.max(1, of) }, h("span", {}));

// By the object model once it stands in the page: the policy refuses attributes of style.
export function setWidths(root) {
  for (const one of root.querySelectorAll(".bar")) one.firstChild.style.width = `${one.dataset.share}%`;
}

export const facts = (pairs, small = false) =>
  h("dl", { class: small ? "facts small" : "facts" }, pairs.filter(([, v]) => v !== "" && v !== null && v !== undefined)
    .map(([k, v]) => h("div", {}, h("dt", {}, k), h("dd", {}, v))));

export function command(line, title = "") {
  return [title && h("p", { class: "command-title" }, title), h("div", { class: "command" }, h("code", {}, line.split(" ").flatMap((word, i) => [i ? " " : null, h("span", { class: "word" }, word)])),
    h("button", { type: "button", "data-do": "copy", "data-text": line, "aria-label": `Copy: ${line}` }, "Copy"))];
}

export const commands = (pairs) => (pairs ?? []).map(([title, line]) => command(line, title));

export const notice = (problem, hint) =>
  h("div", { class: "notice bad" }, h("p", {}, problem), hint && h("p", {}, hint));

export const scroll = (label, table) => h("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": label }, table);

export const settings = (label, table) => scroll(label, h("table", { class: "plain" }, h("tbody", {},
  Object.entries(table).map(([k, v]) => h("tr", {}, h("th", { scope: "row" }, k), h("td", {}, v))))));

// ---- the curve of a run ----

const HIGH = 240, LEFT = 46, RIGHT = 12, TOP = 10, BOTTOM = 34;

export function curve(curves, rounds, words) {
  const seeds = Object.entries(curves).filter(([, points]) => points.length);
  const values = seeds.flatMap(([, points]) => points.map(([, a]) => a));
  if (!values.length) return null;
  // As wide as it is shown, so that its letters are never made smaller.
  const WIDE = Math.max(280, Math.min(700, document.documentElement.clientWidth - 32));
  let low = Math.min(...values), high = Math.max(...values);
  const room = Math.max(0.005, 0.08 * (high - low));
  low = Math.max(0, low - room);
  high = Math.min(1, high + room);
  const x = (r) => LEFT + ((WIDE - LEFT - RIGHT) * (rounds > 1 ? (r - 1) / (rounds - 1) : 0.5));
  const y = (a) => TOP + (HIGH - TOP - BOTTOM) * (1 - (a - low) / (high - low));
  const step = [0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5].find((s) => (high - low) / s <= 5) ?? 1;
  const ticks = [];
  for (let t = Math.ceil(low / step) * step; t <= high + 1e-9; t += step) ticks.push(t);
  const rings = [...new Set(rounds > 4 ? [1, ...(WIDE > 500 ? [0.25, 0.5, 0.75] : [0.5]).map((s) => Math.round(rounds * s)), rounds] : [1, rounds])];
  const ends = seeds.map(([seed, points]) => `seed ${seed}: ${percent(points.at(-1)[1])} % in round ${points.at(-1)[0]}`);
  const drawing = h("svg", { viewBox: `0 0 ${WIDE} ${HIGH}`, width: WIDE, height: HIGH, role: "img", "aria-label": `${words}. ${ends.slice(0, 5).join("; ")}` },
    ticks.map((t) => [
      h("line", { x1: LEFT, x2: WIDE - RIGHT, y1: y(t), y2: y(t), stroke: "var(--line)" }),
      h("text", { x: LEFT - 6, y: y(t) + 4, "text-anchor": "end" }, (100 * t).toFixed(step < 0.01 ? 1 : 0)),
    ]),
    rings.map((r) => h("text", { x: x(r), y: HIGH - 18, "text-anchor": "middle" }, String(r))),
    h("text", { x: (LEFT + WIDE - RIGHT) / 2, y: HIGH - 3, "text-anchor": "middle" }, "round"),
    seeds.map(([, points]) => (points.length > 1
      ? h("path", { d: points.map(([r, a], i) => `${i ? "L" : "M"}${x(r).toFixed(1)} ${y(a).toFixed(1)}`).join(""),
          fill: "none", stroke: "var(--blue)", "stroke-width": 1.8, "stroke-opacity": seeds.length > 1 ? 0.7 : 1 })
      : h("circle", { cx: x(points[0][0]), cy: y(points[0][1]), r: 4, fill: "var(--blue)" }))));
  return h("figure", {}, drawing, h("figcaption", {}, `${words} in %, ${seeds.length > 1 ? "a line per seed" : ends[0]}.`));
}
