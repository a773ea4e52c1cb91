"use strict";
// The charts of the page as Vega-Lite specifications, with the report's colours of schedules and kinds.

const charts = (() => {
  const COLOURS = ["#0072B2", "#E69F00", "#009E73", "#D55E00", "#CC79A7", "#56B4E9", "#888888"];
  const SHAPES = ["circle", "square", "diamond", "triangle-up", "cross"];
  const KINDS = { F: "#56B4E9", B: "#E69F00", FB: "#D55E00", I: "#F0C05A", W: "#009E73", R: "#CFCFCF", STEP: "#CC79A7" };
  const NAMES = { F: "F forward", B: "B backward", FB: "FB fused", I: "I input gradient", W: "W weight gradient",
    R: "R recompute", STEP: "STEP optimizer" };
  const MOST_DRAWN = 3000; // as elements of the page; more are drawn as pixels

  const wide = (id) => Math.max(240, document.getElementById(id).clientWidth);

  function config() {
    const style = getComputedStyle(document.documentElement), of = (name) => style.getPropertyValue(name).trim();
    const ink = of("--ink"), faint = of("--faint");
    return { background: of("--paper"), font: "sans-serif", view: { stroke: faint },
      axis: { labelColor: ink, titleColor: ink, gridColor: faint, domainColor: faint, tickColor: faint, labelFontSize: 11 },
      legend: { labelColor: ink, titleColor: ink, orient: "bottom" }, title: { color: ink }, rule: { color: ink } };
  }

  async function draw(id, description, spec, { choose, size = 0 } = {}) {
    const tooltip = { disableDefaultStyle: true };
    const made = await vegaEmbed(document.getElementById(id), { $schema: "https://vega.github.io/schema/vega-lite/v6.json", description,
      config: config(), autosize: { type: "fit-x", contains: "padding" }, ...spec },
    { ast: true, actions: false, defaultStyle: false, logLevel: 1, renderer: size > MOST_DRAWN ? "canvas" : "svg", tooltip });
    if (choose) made.view.addEventListener("click", (event, item) => item?.datum?.run_id && choose(item.datum.run_id));
    return made;
  }

  // A schedule keeps its colour in every selection; the legend names the shown ones.
  function bySchedule(names, width, values, extra = {}) {
    const present = new Set(values.map((each) => each.schedule));
    const legend = { values: names.filter((name) => present.has(name)), columns: Math.max(1, Math.floor(width / 130)), labelLimit: 150, title: "schedule" };
    return { field: "schedule", type: "nominal", legend, scale: { domain: names, ...extra } };
  }

  const ticks = (width) => Math.max(3, Math.floor(width / 110));
  const coloured = (names, width, values) => bySchedule(names, width, values, { range: names.map((_, at) => COLOURS[at % 7]) });

  function bars(id, groups, names, title, choose) {
    const width = wide(id), lines = Math.max(...groups.map((group) => group.label.split("\n").length));
    const y = { field: "label", type: "nominal", sort: null, title: "what ran", axis: { labelExpr: "split(datum.label, '\\n')",
      labelOffset: { expr: "-6 * (length(split(datum.label, '\\n')) - 1)" },
      labelLimit: 0, titleAngle: 0, titleAnchor: "start", titleAlign: "right", titleX: -6, titleY: -8 } };
    const shown = [{ field: "label", title: "what ran" }, { field: "median", title, format: ",.5~g" },
      { field: "runs", title: "runs" }, { field: "low", title: "least", format: ",.5~g" },
      { field: "high", title: "most", format: ",.5~g" }, { field: "evidence" }];
    return draw(id, `${title} of each configuration`, { width, height: { step: 13 * lines + 8 }, data: { values: groups }, layer: [
      { mark: { type: "bar", cursor: "pointer" }, encoding: { y, x: { field: "median", type: "quantitative", title,
        axis: { tickCount: ticks(width / 2) } }, color: coloured(names, width, groups), tooltip: shown,
      opacity: { condition: { test: "datum.evidence === 'measured'", value: 1 }, value: 0.75 } } },
      { transform: [{ filter: "datum.runs > 1" }], mark: { type: "rule", strokeWidth: 2, aria: false },
        encoding: { y, x: { field: "low", type: "quantitative" }, x2: { field: "high" } } },
    ] }, { choose });
  }

  function scatter(id, points, names, across, choose) {
    const width = wide(id), shapes = bySchedule(names, width, points, { range: names.map((_, at) => SHAPES[at % 5]) });
    return draw(id, `bubble against ${across}`, { width, height: 320, data: { values: points },
      mark: { type: "point", filled: true, size: 70, cursor: "pointer" },
      encoding: { x: { field: "memory", type: "quantitative", title: across, axis: { tickCount: ticks(width) } },
        y: { field: "bubble", type: "quantitative", title: "bubble (%)" }, color: coloured(names, width, points), shape: shapes,
        tooltip: [{ field: "label", title: "what ran" }, { field: "bubble", title: "bubble (%)", format: ".4~g" },
          { field: "memory", title: across, format: ".4~g" }, { field: "evidence" }] } }, { choose });
  }

  function curves(id, points, names, along, choose) {
    const width = wide(id), field = along === "seconds" ? "seconds" : "step";
    const title = along === "seconds" ? "time on the run's clock (s)" : "step";
    return draw(id, `loss against ${title}`, { width, height: 300, data: { values: points }, mark: { type: "line", cursor: "pointer", point: true },
      encoding: { x: { field, type: "quantitative", title, axis: { tickCount: ticks(width), tickMinStep: field === "step" ? 1 : 0 } }, color: coloured(names, width, points), detail: { field: "run_id" },
        y: { field: "loss", type: "quantitative", title: "loss (nat)", scale: { zero: false } },
        tooltip: [{ field: "label", title: "what ran" }, { field: "step" }, { field: "loss", format: ".5~g" }] } }, { choose });
  }

  // Times shorter than a second read better in milliseconds; slots stay slots.
  function scaled(last, unit) {
    return unit === "s" && last < 1 ? [1000, "ms"] : [1, unit];
  }

  function timeline(id, spans, title, last, unit) {
    const width = wide(id), [factor, word] = scaled(last, unit), end = last * factor;
    const values = spans.map(([device, , action, start, stop]) => {
      const kind = (action.match(/[A-Z]+/) || ["?"])[0];
      return { device, action, kind: NAMES[kind] || kind, start: start * factor, end: stop * factor,
        letters: ((stop - start) * factor / end) * width > 7 * action.length + 4 ? action : "" };
    });
    const kinds = [...new Set(values.map((each) => each.kind))].sort();
    const range = kinds.map((kind) => KINDS[kind.split(" ")[0]] || "#999999");
    const x = { field: "start", type: "quantitative", title: `time (${word})`, scale: { domain: [0, end], nice: false },
      axis: { tickCount: ticks(width) } };
    const y = { field: "device", type: "ordinal", title: "device" };
    return draw(id, `timeline of ${title}`, { width, height: { step: 20 }, data: { values }, title: { text: title, anchor: "start" }, layer: [
      { mark: { type: "bar", height: 17 }, encoding: { x, x2: { field: "end" }, y,
        color: { field: "kind", type: "nominal", title: "kind", scale: { domain: kinds, range },
          legend: { columns: Math.max(1, Math.floor(width / 140)) } },
        tooltip: [{ field: "action" }, { field: "device" }, { field: "start", title: `from (${word})` },
          { field: "end", title: `to (${word})` }] } },
      { transform: [{ filter: "datum.letters !== ''" }, { calculate: "(datum.start + datum.end) / 2", as: "middle" }],
        mark: { type: "text", color: "#111", fontSize: 9, aria: false },
        encoding: { x: { field: "middle", type: "quantitative" }, y, text: { field: "letters" } } },
    ] }, { size: values.length });
  }

  return { bars, scatter, curves, timeline };
})();
