"use strict";
// The page over rows.json. Text of records goes in as text nodes only, so that a name is never markup.

const KEYS = ["schedule", "model", "num_devices"];
const COLOURS = ["#0072B2", "#E69F00", "#009E73", "#D55E00", "#CC79A7", "#56B4E9", "#666666"];
const KINDS = { F: "#0072B2", B: "#E69F00", I: "#56B4E9", W: "#009E73", R: "#CFCFCF", S: "#CC79A7" };
const FOLLOW_MS = 2000;
const SVG = "http://www.w3.org/2000/svg";
const at = (id) => document.getElementById(id);
let rows = [];
let seen = "";

function node(name, attributes = {}, text = "") {
  const made = document.createElementNS(SVG, name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  if (text !== "") made.textContent = text;
  return made;
}

// --- the selection: kept in the link ---

function selection() {
  const asked = new URLSearchParams(location.hash.slice(1));
  return { run: asked.get("run"), metric: asked.get("metric") || "tokens_per_s",
    picked: Object.fromEntries(KEYS.map((key) => [key, new Set(asked.getAll(key))])) };
}

function keep({ run, metric, picked }) {
  const asked = new URLSearchParams();
  for (const key of KEYS) for (const value of picked[key]) asked.append(key, value);
  asked.set("metric", metric);
  if (run) asked.set("run", run);
  location.hash = asked.toString();
}

const chosen = (row, picked) => KEYS.every((key) => !picked[key].size || picked[key].has(String(row[key])));

function drawFilters({ picked, metric }) {
  at("metric").value = metric;
  for (const key of KEYS) {
    const values = [...new Set([...rows.map((row) => String(row[key])), ...picked[key]])];
    values.sort((a, b) => a.localeCompare(b, "en", { numeric: true }));
    at(`pick-${key}`).replaceChildren(...values.map((value) => {
      const label = document.createElement("label"), box = document.createElement("input");
      Object.assign(box, { type: "checkbox", checked: picked[key].has(value) });
      box.addEventListener("change", () => {
        const now = selection();
        now.picked[key][box.checked ? "add" : "delete"](value);
        keep(now);
      });
      label.append(box, ` ${value}`);
      return label;
    }));
  }
}

// --- the charts ---

const number = (value) => (typeof value === "number" && Number.isFinite(value) ? value : null);
const short = (value) => (value === null ? "none" : Number(value.toPrecision(4)).toLocaleString("en"));
const where = (row) => row.contender || row.backend || row.mode;

function median(sorted) {
  const middle = sorted.length >> 1;
  return sorted.length % 2 ? sorted[middle] : (sorted[middle - 1] + sorted[middle]) / 2;
}

function grouped(found, metric) {
  const groups = new Map();
  for (const row of found) {
    const value = number(row[metric]);
    if (value === null) continue;
    const parts = [row.schedule, row.model, `${row.num_devices} devices x ${row.num_microbatches}`, row.cluster,
      row.workload, row.cost, where(row), row.evidence];
    const key = JSON.stringify(parts);
    if (!groups.has(key)) groups.set(key, { label: parts.join(", "), rows: [], values: [] });
    groups.get(key).rows.push(row);
    groups.get(key).values.push(value);
  }
  for (const group of groups.values()) {
    group.values.sort((a, b) => a - b);
    group.median = median(group.values);
  }
  return [...groups.values()].sort((a, b) => b.median - a.median).slice(0, 60);
}

function clickable(mark, words, row) {
  mark.classList.add("mark");
  mark.setAttribute("tabindex", "0");
  mark.setAttribute("data-run", row.run_id);
  const show = () => { at("tip").textContent = words; at("tip").hidden = false; };
  mark.addEventListener("mouseenter", show);
  mark.addEventListener("focus", show);
  mark.addEventListener("mouseleave", () => { at("tip").hidden = true; });
  const open = () => keep({ ...selection(), run: row.run_id });
  mark.addEventListener("click", open);
  mark.addEventListener("keydown", (event) => { if (event.key === "Enter") open(); });
  return mark;
}

function colour(schedule) {
  const names = [...new Set(rows.map((row) => row.schedule))].sort();
  return COLOURS[names.indexOf(schedule) % COLOURS.length];
}

function drawBars(found, metric) {
  const groups = grouped(found, metric), top = Math.max(...groups.map((group) => group.values.at(-1)), 1e-300);
  const picture = node("svg", { viewBox: `0 0 1000 ${groups.length * 22 + 4}`, role: "img", "aria-label": metric });
  groups.forEach((group, place) => {
    const y = place * 22 + 2, to = (value) => 520 + Math.max(0, value / top) * 390;
    const low = group.values[0], high = group.values.at(-1), count = group.values.length;
    const range = count > 1 ? `, ${count} runs from ${short(low)} to ${short(high)}` : ", one run";
    const words = `${group.label}: ${short(group.median)}${range}`;
    const label = group.label.length > 84 ? `${group.label.slice(0, 83)}...` : group.label;
    picture.append(node("text", { x: 0, y: y + 13, "font-size": 11 }, label));
    const bar = node("rect", { x: 520, y, width: Math.max(1, to(group.median) - 520), height: 17, class: "bar",
      fill: colour(group.rows[0].schedule), "fill-opacity": group.rows[0].evidence === "measured" ? 1 : 0.55 });
    picture.append(clickable(bar, words, group.rows[0]));
    if (count > 1) {
      const middle = y + 8.5;
      picture.append(node("path", { class: "interval", stroke: "black", fill: "none",
        d: `M${to(low)} ${middle - 4}v8M${to(low)} ${middle}H${to(high)}M${to(high)} ${middle - 4}v8` }));
    }
    picture.append(node("text", { x: to(high) + 6, y: y + 13, "font-size": 11 }, short(group.median)));
  });
  at("bars").replaceChildren(groups.length ? picture : "No run of the selection has this number.");
}

function drawScatter(found) {
  const points = found.filter((row) => number(row.bubble_makespan) !== null && number(row.peak_memory_bytes) !== null);
  const top = Math.max(...points.map((row) => row.peak_memory_bytes), 1) / 2 ** 30;
  const picture = node("svg", { viewBox: "0 0 1000 330", role: "img", "aria-label": "bubble against memory" });
  picture.append(node("path", { d: "M60 10V290H980", stroke: "black", fill: "none" }));
  for (const part of [0, 0.25, 0.5, 0.75, 1]) {
    picture.append(node("text", { x: 55 + part * 900, y: 304, "font-size": 11 }, short(part * top)));
    picture.append(node("text", { x: 25, y: 294 - part * 270, "font-size": 11 }, String(part)));
  }
  picture.append(node("text", { x: 430, y: 324, "font-size": 11 }, "peak memory of a device, GiB"));
  for (const row of points.slice(0, 5000)) {
    const gib = row.peak_memory_bytes / 2 ** 30;
    const words = `${row.schedule}, ${row.model}, ${row.num_devices} devices, ${where(row)}, ${row.evidence}: ` +
      `bubble ${short(row.bubble_makespan)}, ${short(gib)} GiB`;
    const dot = node("circle", { cx: 60 + (gib / top) * 900, cy: 290 - row.bubble_makespan * 270, r: 5, class: "dot",
      fill: colour(row.schedule), "fill-opacity": 0.7 });
    picture.append(clickable(dot, words, row));
  }
  at("scatter").replaceChildren(points.length ? picture : "No run of the selection has both.");
}

function drawVerdicts(found) {
  at("verdicts").tBodies[0].replaceChildren(...found.filter((row) => row.status !== "ok").slice(0, 500).map((row) => {
    const line = document.createElement("tr");
    for (const key of ["schedule", "model", "num_devices", "status", "reason"]) {
      line.insertCell().textContent = row[key] ?? "";
    }
    return line;
  }));
}

// --- one run ---

async function drawRun(run) {
  const row = rows.find((each) => each.run_id === run);
  at("run").hidden = !row;
  if (!row) return;
  at("command").textContent = row.command;
  at("verdict").textContent = `${row.status}${row.reason ? `: ${row.reason}` : ""}; evidence: ${row.evidence}`;
  const spans = row.has_timeline ? await (await fetch(`timeline/${encodeURIComponent(run)}`)).json() : null;
  at("timeline").replaceChildren(spans && spans.length ? timeline(spans)
    : "No timeline was kept: run the command again with save_timeline=true.");
}

function timeline(spans) {
  const work = spans.filter((span) => span[1] === "compute" && span[4] > span[3]);
  const devices = Math.max(...work.map((span) => span[0])) + 1;
  const begin = Math.min(...work.map((span) => span[3])), end = Math.max(...work.map((span) => span[4]));
  const picture = node("svg", { viewBox: `0 0 1000 ${devices * 20 + 18}`, role: "img", "aria-label": "timeline" });
  for (const [device, , action, start, stop] of work) {
    const kind = (action.match(/[A-Z]/) || ["?"])[0];
    const bar = node("rect", { x: 30 + ((start - begin) / (end - begin)) * 960, y: device * 20 + 2, height: 16,
      width: Math.max(0.4, ((stop - start) / (end - begin)) * 960), fill: KINDS[kind] || "#999999", class: "action" });
    bar.append(node("title", {}, `${action}: ${start} s to ${stop} s`));
    picture.append(bar);
  }
  for (let device = 0; device < devices; device++) {
    picture.append(node("text", { x: 2, y: device * 20 + 14, "font-size": 11 }, String(device)));
  }
  picture.append(node("text", { x: 30, y: devices * 20 + 14, "font-size": 11 },
    `device by row; ${short(begin)} s to ${short(end)} s`));
  return picture;
}

// --- following the folder ---

function draw() {
  const now = selection(), found = rows.filter((row) => chosen(row, now.picked));
  drawFilters(now);
  drawBars(found, now.metric);
  drawScatter(found);
  drawVerdicts(found);
  drawRun(now.run);
  at("state").textContent = `${found.length} of ${rows.length} runs shown; the page follows the folder.`;
}

async function follow() {
  try {
    const text = await (await fetch("rows.json")).text();
    if (text !== seen) {
      seen = text;
      rows = JSON.parse(text);
      draw();
    }
  } catch {
    at("state").textContent = "The dashboard has ended; start it again to go on.";
  }
  setTimeout(follow, FOLLOW_MS);
}

at("metric").addEventListener("change", () => keep({ ...selection(), metric: at("metric").value }));
addEventListener("hashchange", draw);
follow();
