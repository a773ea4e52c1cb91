"use strict";
// The page of schedules. What it shows is worked out by the project's own Python in a worker, from the address behind #.
// Text of orders goes in as text nodes only; the drawing is made by Python, which escapes what it quotes.

(() => {
  const PATIENCE_MS = 30000;
  const at = (id) => document.getElementById(id);
  if (!at("schedule-form")) return;
  const SIZES = ["num_devices", "num_microbatches", "chunks_per_device", "num_steps"];
  const TIMES = ["forward_ms", "input_grad_ms", "weight_grad_ms", "recompute_ms", "hop_ms"];
  let worker, known = [], waiting = null;

  // --- in the worker ---

  function inside() {
    // Nothing leaves the page: whatever is asked for is one of its files.
    self.fetch = async (address) => {
      const name = String(address.url || address).split("/").pop();
      if (!(name in self.files)) throw new Error(`${name} is not part of this page`);
      const type = name.endsWith(".wasm") ? "application/wasm" : "application/octet-stream";
      return new Response(self.files[name], { headers: { "Content-Type": type } });
    };
    self.onmessage = async ({ data }) => {
      try {
        if (data.files) {
          self.files = data.files;
          const python = await loadPyodide({ indexURL: "https://page.invalid/" });
          python.FS.writeFile("/project.zip", new Uint8Array(data.files["project.zip"]));
          python.runPython("import sys; sys.path.insert(0, '/project.zip')\nimport json\n" +
            "from analysis.site import schedule_answer");
          self.answer = python.runPython("lambda text: json.dumps(schedule_answer.answer(text))");
          self.postMessage({ known: JSON.parse(python.runPython("json.dumps(schedule_answer.catalogue())")) });
        } else {
          self.postMessage({ asked: data.asked, found: JSON.parse(self.answer(data.asked)) });
        }
      } catch (error) {
        self.postMessage({ failed: String(error) });
      }
    };
  }

  async function unpacked(letters) {
    const packed = Uint8Array.from(atob(letters), (letter) => letter.charCodeAt(0));
    const stream = new Blob([packed]).stream().pipeThrough(new DecompressionStream("gzip"));
    return new Response(stream).arrayBuffer();
  }

  async function begin() {
    const held = self.SCHEDULES_RUNTIME || {};
    if (!("pyodide.js" in held)) {
      say("This copy of the site was built without Python for the browser: run `npm ci --prefix analysis/site` and " +
        "build it again. Until then: python -m rpbench show schedule=1f1b num_devices=4 num_microbatches=8");
      return;
    }
    say("Python is starting.");
    const files = {};
    for (const name of Object.keys(held)) files[name] = await unpacked(held[name]);
    // One script, since a page read from disk may import no other into a worker.
    const parts = [files["pyodide.asm.js"], "\n", files["pyodide.js"], `\n(${inside})()`];
    worker = new Worker(URL.createObjectURL(new Blob(parts, { type: "text/javascript" })));
    worker.onmessage = ({ data }) => heard(data);
    worker.postMessage({ files });
  }

  function heard(data) {
    if (data.failed) {
      say(`Python has failed: ${data.failed}`);
    } else if (data.known) {
      known = data.known;
      offer();
      ask();
    } else if (data.asked === waiting?.asked) {
      clearTimeout(waiting.timer);
      waiting = null;
      show(data.found);
    }
  }

  function ask() {
    const asked = location.hash.slice(1);
    if (!known.length || waiting?.asked === asked) return;
    clearTimeout(waiting?.timer);
    say("Python is working.");
    waiting = { asked, timer: setTimeout(() => {
      worker.terminate();
      known = [];
      waiting = null;
      begin().then(() => say("This takes longer than 30 s here; choose a smaller one, or ask the command line."));
    }, PATIENCE_MS) };
    worker.postMessage({ asked });
  }

  // --- the form and the address ---

  function offer() {
    at("schedule").replaceChildren(...known.map(({ name }) => new Option(name, name)));
    fill();
  }

  function fill() {
    const asked = new URLSearchParams(location.hash.slice(1)), name = asked.get("schedule") || "1f1b";
    at("schedule").value = name;
    for (const key of SIZES) if (asked.has(key) || at(key).value === "") at(key).value = asked.get(key) ?? "";
    for (const key of TIMES) if (asked.has(`cost.${key}`)) at(key).value = asked.get(`cost.${key}`);
    at("order").value = asked.get("order") || "";
    const found = known.find((each) => each.name === name);
    at("source").textContent = found && !asked.has("order") ? found.source : "";
    at("chunks_per_device").disabled = Boolean(found && !found.looped);
    at("choices").hidden = !Object.keys(found?.options || {}).length;
    at("options").replaceChildren(...Object.entries(found?.options || {}).map(([option, usual]) => {
      const label = document.createElement("label"), field = document.createElement("input");
      Object.assign(field, { name: `schedule.${option}`, placeholder: usual, value: asked.get(`schedule.${option}`) || "" });
      label.append(`${option} `, field);
      return label;
    }));
  }

  function keep() {
    const asked = new URLSearchParams(), order = at("order").value.trim();
    if (order) asked.set("order", `${order}\n`);
    else {
      asked.set("schedule", at("schedule").value);
      for (const key of SIZES) if (at(key).value !== "" && !at(key).disabled) asked.set(key, at(key).value);
      for (const field of at("options").querySelectorAll("input")) {
        const chosen = known.find((each) => each.name === at("schedule").value);
        if (field.value !== "" && field.name.slice(9) in (chosen?.options || {})) asked.set(field.name, field.value);
      }
    }
    for (const key of TIMES) if (at(key).value !== "") asked.set(`cost.${key}`, at(key).value);
    location.hash = asked.toString();
  }

  // --- the answer ---

  function say(words) {
    at("sentence").textContent = words;
    at("answer").hidden = true;
  }

  const digits = (value) => String(Number(value.toPrecision(6)));

  function show(found) {
    document.body.dataset.answer = JSON.stringify([found.makespan_ms, found.bubble, found.sentence]);
    if (found.sentence) return say(found.sentence);
    say("");
    at("makespan").textContent = `${digits(found.makespan_ms)} ms`;
    at("bubble").textContent = `${(100 * found.bubble).toFixed(2)} %`;
    at("command").textContent = found.command;
    at("text").textContent = found.order;
    const drawing = new DOMParser().parseFromString(found.svg, "image/svg+xml").documentElement;
    drawing.setAttribute("role", "img");
    drawing.setAttribute("aria-label", `Timeline of ${found.schedule}`);
    at("timeline").replaceChildren(document.importNode(drawing, true));
    at("devices").replaceChildren(...found.busy.map((busy, device) => {
      const line = document.createElement("tr");
      for (const words of [device, `${(100 * busy).toFixed(1)} %`, found.held[device]]) {
        line.insertCell().textContent = words;
      }
      return line;
    }));
    at("answer").hidden = false;
  }

  at("schedule-form").addEventListener("change", keep);
  at("schedule-form").addEventListener("submit", (event) => { event.preventDefault(); keep(); });
  addEventListener("hashchange", () => { fill(); ask(); });
  begin().catch((error) => say(`Python could not start: ${error}`));
})();
