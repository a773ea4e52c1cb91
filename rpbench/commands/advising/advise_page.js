// The table of `advise --open` that moves with three controls. All numbers come from the page itself.
"use strict";
const DATA = JSON.parse(document.getElementById("around").textContent);
const PLACE = Object.fromEntries(DATA.fields.map((name, place) => [name, place]));
const BEST = "best";
const CONTROLS = { num_devices: "Devices", microbatch_sequences: "Sequences a microbatch", recompute: "Recomputed" };
const GB = 1e9;

const said = (value, digits) =>
    value.toLocaleString("en", { minimumFractionDigits: digits, maximumFractionDigits: digits });

function of(point, name) {
    return point[PLACE[name]];
}

// Of the points that the controls leave of a row: the fastest that fits, or the one that lacks least, or why none is.
function chosen(row, asked) {
    const left = row.points.filter((point) =>
        Object.keys(CONTROLS).every((name) => asked[name] === BEST || String(of(point, name)) === asked[name]),
    );
    const plans = left.filter((point) => !of(point, "why"));
    const fitting = plans.filter((point) => of(point, "fits"));
    const better = (name, sign) => (one, other) => (sign * (of(one, name) - of(other, name)) > 0 ? one : other);
    if (fitting.length) return fitting.reduce(better("tokens_per_s", 1));
    if (plans.length) return plans.reduce(better("peak_memory_bytes", -1));
    return left[0] || null;
}

function command(row, point) {
    return DATA.fields.reduce(
        (words, name) => words.replaceAll("{" + name + "}", String(of(point, name))),
        row.command,
    );
}

function cell(text, className) {
    const found = document.createElement("td");
    found.textContent = text;
    if (className) found.className = className;
    return found;
}

function bar(share, limit) {
    const found = document.createElement("td");
    const outer = found.appendChild(document.createElement("div"));
    const inner = outer.appendChild(document.createElement("div"));
    outer.className = "meter";
    inner.className = share > limit ? "over" : "within";
    inner.style.width = `${Math.min(100, 100 * share)}%`;
    return found;
}

function lacking(point) {
    const parts = [];
    const limits = { "a device": [DATA.limit_bytes, "peak_memory_bytes"] };
    limits["the host"] = [DATA.host_limit_bytes, "host_memory_bytes"];
    for (const [where, [limit, name]] of Object.entries(limits)) {
        if (limit !== null && of(point, name) > limit) {
            parts.push(`${where} needs ${said(of(point, name) / GB, 1)} GB and has ${said(limit / GB, 1)} GB`);
        }
    }
    return `does not fit: ${parts.join(", ")}`;
}

function line(row, point, fastest) {
    const found = document.createElement("tr");
    const name = found.appendChild(document.createElement("th"));
    name.scope = "row";
    name.textContent = row.label + (row.late ? " (late updates)" : "");
    if (!point || of(point, "why")) {
        const why = found.appendChild(cell(point ? of(point, "why") : "not computed at such settings", "why"));
        why.colSpan = 9;
        return found;
    }
    const fits = of(point, "fits");
    const pace = of(point, "tokens_per_s");
    const memory = of(point, "peak_memory_bytes");
    found.append(
        cell(said(of(point, "step_time_s"), 3)),
        cell(said(pace, 0)),
        bar(fits ? pace / fastest : 0, 1),
        cell(said(memory / GB, 1)),
        bar(DATA.limit_bytes ? memory / DATA.limit_bytes : 0, 1),
        cell(said(of(point, "host_memory_bytes") / GB, 1)),
        cell(String(of(point, "microbatch_sequences"))),
        cell(of(point, "recompute")),
    );
    const last = found.appendChild(cell(fits ? of(point, "partition") : lacking(point), "why"));
    if (!fits) found.className = "unfit";
    const more = last.appendChild(document.createElement("details"));
    more.appendChild(document.createElement("summary")).textContent = "command";
    more.appendChild(document.createElement("code")).textContent = command(row, point);
    return found;
}

function show() {
    const asked = Object.fromEntries(Object.keys(CONTROLS).map((name) => [name, document.getElementById(name).value]));
    const found = DATA.rows.map((row) => [row, chosen(row, asked)]);
    const rank = (point) => (!point || of(point, "why") ? -2 : of(point, "fits") ? of(point, "tokens_per_s") : -1);
    found.sort(([, one], [, other]) => rank(other) - rank(one));
    const fastest = Math.max(0, ...found.map(([, point]) => rank(point)));
    document.getElementById("rows").replaceChildren(...found.map(([row, point]) => line(row, point, fastest)));
    const fitting = found.filter(([, point]) => rank(point) >= 0);
    const first = fitting.length ? `; the fastest is ${fitting[0][0].label} with ${said(fastest, 0)} tokens/s` : "";
    document.getElementById("told").textContent = `${fitting.length} of ${found.length} rows fit${first}.`;
}

for (const [name, title] of Object.entries(CONTROLS)) {
    const label = document.getElementById("controls").appendChild(document.createElement("label"));
    label.textContent = `${title} `;
    const control = label.appendChild(document.createElement("select"));
    control.id = name;
    const values = DATA.values[name].map(String);
    for (const value of name === "num_devices" ? values : [BEST, ...values]) {
        control.add(new Option(value === BEST ? "the best of each row" : value, value));
    }
    control.value = name === "num_devices" ? values[values.length - 1] : BEST;
    control.addEventListener("input", show);
}
show();
