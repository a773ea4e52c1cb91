"use strict";
// The page over rows.json and sweeps.json. Text of records becomes text nodes or text of a chart, never markup. The
// selection is kept in the address.

const KEYS = ["schedule", "model", "num_devices", "num_microbatches"];
const FOLLOW_MS = 2000, MOST_BARS = 40, MOST_POINTS = 3000, MOST_CURVES = 12, MOST_SWEEPS = 4;
const KEPT = ["metric", "along", "sweep", "run", "beside"]; // of the address, beside the filters
const FIRST = ["status", "reason", "evidence", "schedule", "model", "num_devices", "num_microbatches", "num_steps",
  "tokens_per_s", "step_time_s", "makespan_s", "bubble_makespan", "bubble_steady", "comm_exposed_s", "peak_memory_bytes",
  "peak_in_flight", "weight_versions", "staleness_steps", "loss", "started_at", "git_commit"];
const at = (id) => document.getElementById(id);
let rows = [], sweeps = [], seen = "", drawn = "", turn = 0;

// --- the selection: kept in the address ---

function selection() {
  const asked = new URLSearchParams(location.hash.slice(1));
  return { ...Object.fromEntries(KEPT.map((key) => [key, asked.get(key) || ""])),
    picked: Object.fromEntries(KEYS.map((key) => [key, new Set(asked.getAll(key))])) };
}

function keep(change) {
  const now = { ...selection(), ...change }, asked = new URLSearchParams();
  for (const key of KEYS) for (const value of now.picked[key]) asked.append(key, value);
  for (const key of KEPT) if (now[key]) asked.set(key, now[key]);
  location.hash = asked.toString();
}

function chosen({ picked, sweep }) {
  const runs = sweep && new Set(sweeps.find((each) => each.name === sweep)?.runs);
  return rows.filter((row) => (!runs || runs.has(row.run_id)) &&
    KEYS.every((key) => !picked[key].size || picked[key].has(String(row[key]))));
}

const element = (name, properties = {}, ...inside) => {
  const made = Object.assign(document.createElement(name), properties);
  made.append(...inside);
  return made;
};

const inOrder = (values) => [...new Set(values)].sort((a, b) => a.localeCompare(b, "en", { numeric: true }));
const schedules = () => inOrder(rows.map((row) => String(row.schedule)));

function drawFilters({ picked, metric, along, sweep }) {
  at("metric").value = metric || usual();
  at("along").value = along || "step";
  at("sweep").replaceChildren(new Option("every record", ""), ...sweeps.map(({ name }) => new Option(name, name)));
  at("sweep").value = sweep;
  for (const key of KEYS) {
    const values = inOrder([...rows.map((row) => String(row[key])), ...picked[key]]);
    at(`pick-${key}`).replaceChildren(...values.map((value) => {
      const box = element("input", { type: "checkbox", checked: picked[key].has(value) });
      box.addEventListener("change", () => {
        const now = selection().picked;
        now[key][box.checked ? "add" : "delete"](value);
        keep({ picked: now });
      });
      return element("label", {}, box, ` ${value}`);
    }));
  }
}

// --- data of the charts ---

const number = (value) => (typeof value === "number" && Number.isFinite(value) ? value : null);
const usual = () => ["tokens_per_s", "makespan_s", "makespan_slots"].find((key) => rows.some((row) => number(row[key]) !== null))
  || "tokens_per_s";
const where = (row) => row.contender || row.backend || row.mode;

function parts(row) {
  return [String(row.schedule), row.model, `${row.num_devices} devices, ${row.num_microbatches} microbatches`, row.cluster, row.workload,
    row.cost, where(row), row.evidence, row.options].map((part) => String(part ?? "–"));
}

// Words in lines that fit into a label.
function wrapped(words, length) {
  const lines = [""];
  for (const word of words) {
    const text = lines.at(-1) + (lines.at(-1) ? ", " : "") + word;
    if (lines.at(-1) && text.length > length) lines.push(word);
    else lines[lines.length - 1] = text;
  }
  return lines.map((line) => (line.length > length ? `${line.slice(0, length - 1)}…` : line)).join("\n");
}

// The schedule, and below it the other parts that differ between the shown runs; always the size.
function labels(found) {
  const all = found.map(parts), differ = (place) => place === 2 || new Set(all.map((each) => each[place])).size > 1;
  const shown = (all[0] || []).map((_, place) => place).filter((place) => place && differ(place));
  const length = at("bars").clientWidth < 700 ? 22 : 44;
  return new Map(found.map((row, at) => [row.run_id,
    `${wrapped([all[at][0]], length)}\n${wrapped(shown.map((place) => all[at][place]), length)}`]));
}

function median(sorted) {
  const middle = sorted.length >> 1;
  return sorted.length % 2 ? sorted[middle] : (sorted[middle - 1] + sorted[middle]) / 2;
}

function grouped(found, metric, label) {
  const groups = new Map(), factor = metric.startsWith("bubble") ? 100 : 1;
  for (const row of found) {
    if (number(row[metric]) === null) continue;
    const key = JSON.stringify([...parts(row), row.asked]);
    if (!groups.has(key)) groups.set(key, { row, values: [] });
    groups.get(key).values.push(row[metric] * factor);
  }
  const times = new Map(); // a label, as often as groups bear it: those differ in code or machine
  for (const { row } of groups.values()) times.set(label.get(row.run_id), (times.get(label.get(row.run_id)) || 0) + 1);
  return [...groups.values()].map(({ row, values }) => {
    values.sort((a, b) => a - b);
    const own = label.get(row.run_id), more = times.get(own) > 1 ? `\n[${row.run_id.slice(0, 8)}]` : "";
    return { label: own + more, schedule: String(row.schedule), evidence: row.evidence, run_id: row.run_id,
      median: median(values), low: values[0], high: values.at(-1), runs: values.length };
  }).sort((a, b) => (metric === "tokens_per_s" ? b.median - a.median : a.median - b.median));
}

function choose(run) {
  const now = selection();
  if (now.run && now.run !== run) keep({ run, beside: now.run }); // the one before stays to compare with
  else keep({ run });
}

async function drawCharts(now, found) {
  const mine = ++turn, names = schedules(), label = labels(found);
  const metric = at("metric").value, title = at("metric").selectedOptions[0].textContent;
  const groups = grouped(found, metric, label);
  if (groups.length) await charts.bars("bars", groups.slice(0, MOST_BARS), names, title, choose);
  else at("bars").textContent = "No run of the selection has this number.";
  if (groups.length > MOST_BARS) at("bars").append(`${groups.length - MOST_BARS} more are not drawn; choose fewer above. `);
  const without = found.filter((row) => number(row[metric]) === null).length;
  if (groups.length && without) at("bars").append(`${without} of the ${found.length} runs do not have this number.`);

  const most = found.reduce((high, row) => Math.max(high, number(row.peak_memory_bytes) || 0), 0);
  const held = most ? "peak_memory_bytes" : "peak_in_flight", [factor, unit] = most < 1e9 ? [1e6, "MB"] : [1e9, "GB"];
  const across = most ? `peak memory of the fullest device (${unit})` : "stage activations held at most by a device";
  const points = found.filter((row) => number(row.bubble_makespan) !== null && number(row[held]) !== null).map((row) => ({
    run_id: row.run_id, label: label.get(row.run_id), schedule: String(row.schedule), evidence: row.evidence,
    bubble: 100 * row.bubble_makespan, memory: most ? row[held] / factor : row[held] }));
  if (points.length) await charts.scatter("scatter", points.slice(0, MOST_POINTS), names, across, choose);
  else at("scatter").textContent = "No run of the selection has both.";

  const trained = found.filter((row) => row.has_curve);
  const lines = await Promise.all(trained.slice(0, MOST_CURVES).map(async (row) => (await asked(`curve/${row.run_id}`)).map(
    ([step, loss, seconds]) => ({ step, loss, seconds, run_id: row.run_id, label: label.get(row.run_id),
      schedule: String(row.schedule) }))));
  if (mine !== turn) return; // a newer selection is being drawn
  if (lines.flat().length) await charts.curves("curves", lines.flat(), names, at("along").value, choose);
  else at("curves").textContent = "No run of the selection trained with a loss.";
  await drawRuns(now);
}

// --- one run, or two side by side ---

const link = (run) => element("a", { href: `record/${encodeURIComponent(run)}`, textContent: "record" });

async function drawRuns({ run, beside }) {
  const runs = [run, beside].filter((each, place, all) => rows.some((row) => row.run_id === each) && all.indexOf(each) === place);
  const name = labels(rows);
  for (const [id, value] of [["chosen", run], ["beside", beside]]) {
    at(id).replaceChildren(new Option(id === "chosen" ? "none" : "nothing", ""),
      ...rows.map((row) => new Option(`${name.get(row.run_id).replaceAll("\n", ", ")} [${row.run_id.slice(0, 8)}]`, row.run_id)));
    at(id).value = value;
  }
  const records = await Promise.all(runs.map((each) => asked(`record/${each}`)));
  const spans = await Promise.all(runs.map((each) => asked(`timeline/${each}`)));
  drawDetails(runs, records.map((each) => each || {}));
  await drawTimelines(runs, spans.map((each) => (each || []).filter((span) => span[1] === "compute" && span[4] > span[3])));
}

async function drawTimelines(runs, spans) {
  const begins = spans.map((each) => each.reduce((least, span) => Math.min(least, span[3]), Infinity));
  const moved = spans.map((each, place) => each.map(([device, lane, action, start, end]) =>
    [device, lane, action, start - begins[place], end - begins[place]]));
  const last = moved.flat().reduce((most, span) => Math.max(most, span[4]), 0); // one scale for both
  at("timelines").replaceChildren(...runs.map((_, place) => element("div", { id: `timeline-${place}`, className: "chart" })));
  for (const [place, run] of runs.entries()) {
    const row = rows.find((each) => each.run_id === run);
    if (moved[place].length) await charts.timeline(`timeline-${place}`, moved[place], parts(row).slice(0, 3).join(", "), last, row.times_in);
    else at(`timeline-${place}`).textContent = `${row.schedule}: no timeline was kept; run it again with save_timeline=true.`;
  }
}

const readable = (value) => (Array.isArray(value) ? value.map(readable).join(", ")
  : typeof value === "number" ? Number(value.toPrecision(6)).toLocaleString("en", { maximumFractionDigits: 12 })
    : value === null || value === undefined ? "–" : String(value));

function drawDetails(runs, records) {
  const table = at("details"), head = element("tr", {}, element("th", { textContent: "field" }));
  for (const run of runs) head.append(element("th", {}, `${run.slice(0, 8)} `, link(run)));
  const flat = (value) => value === null || typeof value !== "object" || (Array.isArray(value) && value.every(flat));
  const others = [...new Set(records.flatMap(Object.keys))].filter((key) => !FIRST.includes(key) && key !== "overrides");
  const same = (key) => new Set(records.map((each) => readable(each[key]))).size < 2;
  const keys = [...FIRST, ...others.filter((key) => records.every((each) => flat(each[key] ?? null)) && !same(key))];
  const lines = runs.length ? keys.filter((key) => records.some((each) => each[key] !== null && each[key] !== undefined)) : [];
  table.tHead.replaceChildren(...(runs.length ? [head] : []));
  table.tBodies[0].replaceChildren(...lines.map((key) => element("tr", { className: same(key) ? "" : "differs" },
    element("td", { textContent: key }), ...records.map((each) => element("td", { textContent: readable(each[key]) })))),
  ...(runs.length ? [element("tr", {}, element("td", { textContent: "command" }), ...runs.map((run) =>
    element("td", {}, element("code", { textContent: rows.find((row) => row.run_id === run).command }))))] : []));
}

// --- states and verdicts ---

function drawSweeps() {
  const lines = sweeps.map((each) => {
    const states = Object.entries(each.states).map(([state, count]) => `${count} ${state}`).join(", ");
    const pace = each.runs_per_minute === null ? "" : `; ${readable(Number(each.runs_per_minute.toPrecision(2)))} runs a minute`;
    const left = each.left_s === null ? "" : `, ${Math.ceil(each.left_s / 60)} min left at this pace`;
    const cells = `${each.cells} cell${each.cells === 1 ? "" : "s"}`;
    return element("li", {}, element("code", { textContent: each.command }), ` ${cells}: ${states}${pace}${left}`);
  });
  // Many ended sweeps are folded, so that charts are on the first screen.
  const fold = (line, number) => lines.length > MOST_SWEEPS && !sweeps[number].states.planned;
  at("sweeps").replaceChildren(...lines.filter((line, number) => !fold(line, number)));
  at("ended").replaceChildren(...lines.filter(fold));
  at("ended").parentElement.hidden = !at("ended").children.length;
  at("ended").previousElementSibling.textContent = `${at("ended").children.length} sweeps have ended`;
}

function drawVerdicts(found) {
  at("verdicts").tBodies[0].replaceChildren(...found.filter((row) => row.status !== "ok").slice(0, 500).map((row) =>
    element("tr", {}, ...["schedule", "model", "num_devices", "status", "reason"].map((key) =>
      element("td", { textContent: readable(row[key]) })), element("td", {}, link(row.run_id)))));
}

// --- following the folder ---

async function asked(path) {
  return (await fetch(path)).json();
}

async function draw() {
  const now = selection(), found = chosen(now);
  drawFilters(now);
  drawSweeps();
  drawVerdicts(found);
  at("state").textContent = `${found.length} of ${rows.length} runs shown; the page follows the folder.`;
  await drawCharts(now, found);
  document.body.dataset.drawn = location.hash;
}

async function follow() {
  try {
    const [runs, states] = await Promise.all(["rows.json", "sweeps.json"].map(async (path) => (await fetch(path)).text()));
    if (runs + states !== seen) {
      [rows, sweeps] = [JSON.parse(runs), JSON.parse(states)];
      if (runs !== drawn) await draw();
      else drawSweeps();
      [seen, drawn] = [runs + states, runs];
    }
  } catch (error) {
    at("state").textContent = `The dashboard has ended, start it again to go on (${error.message}).`;
  }
  setTimeout(follow, FOLLOW_MS);
}

for (const id of ["metric", "along", "sweep"]) at(id).addEventListener("change", () => keep({ [id]: at(id).value }));
at("chosen").addEventListener("change", () => keep({ run: at("chosen").value }));
at("beside").addEventListener("change", () => keep({ beside: at("beside").value }));
addEventListener("hashchange", draw);
addEventListener("resize", () => { clearTimeout(draw.later); draw.later = setTimeout(draw, 200); });
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", draw);
follow();
