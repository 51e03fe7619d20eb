"use strict";
/* The report's page: the chain with its cuts, what follows when they are moved, memory over time, sorting. */
(function () {
  const { formatSeconds, formatBytes, formatPercent } = globalThis.PageNumbers;
  const { TimelineView, readTimeline, simulatedTimeline } = globalThis.PageTimeline;
  const Simulator = globalThis.PipelineSimulator;
  const byId = (id) => document.getElementById(id);
  const data = JSON.parse(byId("data").textContent);
  const MANY = 300;

  const make = (tag, attributes, text) => {
    const element = document.createElement(tag);
    for (const [name, value] of Object.entries(attributes || {})) element.setAttribute(name, value);
    if (text !== undefined) element.textContent = text;
    return element;
  };
  // Greys in turn: colours are for what a stage does.
  const stageColour = (stage) => `var(--stage-${stage % 2})`;
  const layerName = (layer) => (data.names[layer] === undefined ? `layer ${layer}` : `${layer} ${data.names[layer]}`);

  // The timeline, of the plan or of the cuts as they are moved.
  let view = null;
  const planned = data.timeline && readTimeline(data.timeline);
  let shown = planned;
  function showTimeline(model) {
    shown = model;
    view.show(model);
    drawMemory();
  }

  // Memory over time of one stage: of the cuts as they are moved, as the simulator has it.
  function movedMemoryPoints(stage) {
    const own = shown.devices[stage], { resident, during, after } = shown.levels[stage], points = [[0, resident]];
    own.start.forEach((start, i) => points.push([start, during[i]], [own.end[i], after[i]]));
    return points.concat([[shown.step, resident]]);
  }

  function memoryPoints(stage) {
    if (shown.levels) return movedMemoryPoints(stage);
    const own = shown.devices[stage], [resident, inFlight, , firstPart] = data.memory[stage];
    const finished = new Set();
    for (let i = 0; i < own.m.length; i++) if (own.kinds[i] === "W") finished.add(`${own.m[i]}.${own.c[i] || 0}`);
    const points = [[0, resident]];
    let level = resident;
    for (let i = 0; i < own.m.length; i++) {
      const chunk = own.c[i] || 0, kind = own.kinds[i];
      const [begins, ends] = firstPart[chunk];
      if (kind === "F") level += inFlight[chunk];
      else if (kind === "W") level -= inFlight[chunk] + begins + ends;
      else if (!finished.has(`${own.m[i]}.${chunk}`)) level -= inFlight[chunk];
      else {
        points.push([own.start[i], level += begins]);
        level += ends;
      }
      points.push([kind === "F" ? own.start[i] : own.end[i], level]);
    }
    points.push([shown.step, level]);
    return points;
  }

  function drawMemory() {
    if (!data.memory.length) {
      byId("over-time").hidden = true;
      return;
    }
    byId("over-time").hidden = false;
    const stage = Number(byId("memory-stage").value) || 0, points = memoryPoints(stage), limit = data.memory[stage][2];
    const most = Math.max(...points.map(([, bytes]) => bytes)), top = Math.max(most, limit || 0) * 1.05 || 1;
    const y = (bytes) => (100 * (1 - bytes / top)).toFixed(3), x = (second) => (1000 * second / shown.step).toFixed(3);
    const svg = document.createElementNS("http://www.w3.org/2000/svg", "svg");
    svg.setAttribute("viewBox", "0 0 1000 100");
    svg.setAttribute("preserveAspectRatio", "none");
    svg.setAttribute("role", "img");
    const add = (tag, attributes) => {
      const element = document.createElementNS("http://www.w3.org/2000/svg", tag);
      for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
      svg.append(element);
    };
    let path = `M0 ${y(points[0][1])}`;
    for (const [second, bytes] of points) path += `H${x(second)}V${y(bytes)}`;
    add("path", { d: path, class: "memory-line", "vector-effect": "non-scaling-stroke" });
    if (limit) add("line", { x1: 0, x2: 1000, y1: y(limit), y2: y(limit), class: "memory-limit", "vector-effect": "non-scaling-stroke" });
    const text = `Stage ${stage}: at most ${formatBytes(most)} over the step` + (limit ? ` of ${formatBytes(limit)} (dashed)` : "") + ".";
    svg.setAttribute("aria-label", text);
    const labels = [top, top / 2, 0].map((bytes) => make("span", {}, bytes ? formatBytes(bytes) : "0"));
    const seconds = [0, shown.step / 2, shown.step].map((second) => make("span", {}, second ? formatSeconds(second) : "0"));
    const left = make("div", { class: "axis-left", "aria-hidden": "true" }), below = make("div", { class: "axis-below", "aria-hidden": "true" });
    left.append(...labels);
    below.append(...seconds);
    add("line", { x1: 0, x2: 1000, y1: 50, y2: 50, class: "memory-grid", "vector-effect": "non-scaling-stroke" });
    byId("memory-drawing").replaceChildren(left, svg, below);
    byId("memory-text").textContent = text;
  }

  // The layers as bars, and the cuts between them.
  const chain = byId("chain");
  let balance = data.balance.slice(), schedule = data.cuts && data.cuts.schedules[data.schedule] ? data.schedule : "1f1b";
  const weights = data.weights.length ? data.weights : new Array(data.balance.reduce((a, b) => a + b, 0)).fill(1);
  const all = weights.reduce((a, b) => a + b, 0) || 1, before = [0];
  weights.forEach((weight) => before.push(before[before.length - 1] + weight));
  const position = (layer) => 100 * before[Math.min(layer, weights.length)] / all;
  const handles = [];

  function ends() {
    let end = 0;
    return balance.map((layers) => (end += layers));
  }

  function buildChain() {
    const count = weights.length;
    chain.classList.toggle("many", count > MANY);
    weights.forEach((weight, layer) => {
      const bar = make("div", { class: "layer", title: `${layerName(layer)}: ${data.weights.length ? formatSeconds(weight) : ""}` });
      bar.style.flexGrow = weight / all || 1e-9;
      chain.append(bar);
    });
    for (let cut = 0; cut < balance.length - 1; cut++) {
      const handle = make("div", { class: data.cuts ? "cut" : "cut fixed" });
      if (data.cuts) {
        handle.setAttribute("role", "slider");
        handle.setAttribute("tabindex", "0");
        handle.setAttribute("aria-label", `Cut between stages ${cut} and ${cut + 1}`);
        handle.setAttribute("aria-describedby", "editor-help");
        listenToCut(handle, cut);
      }
      handles.push(handle);
      chain.append(handle);
    }
    paintChain();
  }

  function paintChain() {
    const at = ends();
    let stage = 0;
    for (let layer = 0; layer < weights.length; layer++) {
      while (layer >= at[stage]) stage++;
      chain.children[layer].style.background = stageColour(stage);
    }
    chain.querySelectorAll(".stage-number").forEach((element) => element.remove());
    at.forEach((end, own) => {
      const first = own ? at[own - 1] : 0, number = make("span", { class: "stage-number" }, String(own));
      number.style.left = `${(position(first) + position(end)) / 2}%`;
      if ((position(end) - position(first)) * chain.clientWidth / 100 > 14) chain.append(number);
    });
    chain.classList.toggle("tight", at.slice(1, -1).some((end, cut) => (position(end) - position(at[cut])) * chain.clientWidth / 100 < 24));
    handles.forEach((handle, cut) => {
      handle.style.left = `${position(at[cut])}%`;
      if (!data.cuts) return;
      const [least, most] = cutRange(cut);
      handle.setAttribute("aria-valuemin", least);
      handle.setAttribute("aria-valuemax", most);
      handle.setAttribute("aria-valuenow", at[cut]);
      handle.setAttribute("aria-valuetext", `after layer ${layerName(at[cut] - 1)}`);
    });
  }

  /** From where to where a cut may go between its neighbours. */
  function cutRange(cut) {
    const at = ends();
    return [(cut ? at[cut - 1] : 0) + 1, at[cut + 1] - 1];
  }

  /** Moves a cut to the nearest place that is allowed, at most to its neighbours; `way`: the first in that direction. */
  function moveCut(cut, wanted, way) {
    const [least, most] = cutRange(cut), now = ends()[cut];
    let best = now;
    for (let layer = least; layer <= most; layer++) {
      const suits = Simulator.mayCut(data.cuts, layer) && (!way || (way > 0 ? layer > now : layer < now));
      if (suits && (best === now && (way || layer === wanted) || Math.abs(layer - wanted) < Math.abs(best - wanted))) best = layer;
    }
    if (best === now) return;
    balance[cut] += best - now;
    balance[cut + 1] -= best - now;
    update();
  }

  function listenToCut(handle, cut) {
    const layerAt = (clientX) => {
      const box = chain.getBoundingClientRect(), target = (clientX - box.left) / box.width * all;
      let nearest = 1;
      for (let layer = 1; layer < weights.length; layer++) {
        if (Math.abs(before[layer] - target) < Math.abs(before[nearest] - target)) nearest = layer;
      }
      return nearest;
    };
    handle.addEventListener("pointerdown", (event) => { handle.setPointerCapture(event.pointerId); handle.focus(); event.preventDefault(); });
    handle.addEventListener("pointermove", (event) => { if (handle.hasPointerCapture(event.pointerId)) moveCut(cut, layerAt(event.clientX)); });
    handle.addEventListener("keydown", (event) => {
      const [least, most] = cutRange(cut), now = ends()[cut];
      const moves = {
        ArrowLeft: [now - 1, -1], ArrowDown: [now - 1, -1], ArrowRight: [now + 1, 1], ArrowUp: [now + 1, 1],
        Home: [least, 0], End: [most, 0], PageUp: [now + 10, 1], PageDown: [now - 10, -1],
      };
      if (!moves[event.key]) return;
      event.preventDefault();
      moveCut(cut, ...moves[event.key]);
    });
  }

  /** The step and memory of the cuts as they are; and their timeline, once they were moved. */
  function update(moved = true) {
    paintChain();
    byId("editor-balance").value = balance.join(",");
    if (!data.cuts) return;
    const isPlan = schedule === data.schedule && balance.every((layers, i) => layers === data.balance[i]);
    const result = Simulator.simulate(data.cuts, balance, schedule), plan = planned.step;
    const change = result.step / plan - 1, over = [];
    const rows = balance.map((layers, stage) => {
      const limit = data.cuts.stages[stage].limit, row = make("tr"), memory = result.memory[stage];
      const cells = [stage, layers, formatSeconds(result.busy[stage]), formatPercent(result.busy[stage] / result.step),
        formatBytes(memory), limit === null ? "-" : formatBytes(limit)];
      if (limit !== null && memory > limit) {
        over.push(stage);
        row.className = "over";
        cells[5] += " (over)";
      }
      for (const cell of cells) row.append(make("td", { class: "number" }, String(cell)));
      return row;
    });
    byId("editor-stages").replaceChildren(...rows);
    const under = schedule === data.schedule ? "" : `Under ${schedule}: `;
    const versus = isPlan ? "the plan" : Math.abs(change) < 5e-4 ? "nearly as the plan" : `${formatPercent(Math.abs(change))} ${change > 0 ? "slower" : "faster"} than the plan`;
    const memory = over.length ? ` Stage${over.length > 1 ? "s" : ""} ${over.join(", ")} ${over.length > 1 ? "do" : "does"} not fit.` : "";
    byId("editor-answer").textContent = `${under}Step ${formatSeconds(result.step)} (${versus}), `
      + `${(data.cuts.mini_batch / result.step).toPrecision(3)} samples/s, bubble ${formatPercent(result.bubble)}.${memory}`;
    if (moved) showTimeline(isPlan ? planned : simulatedTimeline(result, `${schedule} with the cuts as moved`));
  }

  /** Takes a list that was typed; says what is wrong with one that it cannot take. */
  function setBalance(text) {
    const wanted = text.split(/[\s,]+/).filter(Boolean).map(Number), ends = [], count = data.balance.reduce((a, b) => a + b, 0);
    wanted.reduce((end, layers) => (ends.push(end + layers), end + layers), 0);
    const forbidden = ends.slice(0, -1).find((end) => !Simulator.mayCut(data.cuts, end));
    let problem = "";
    if (wanted.some((layers) => !Number.isInteger(layers) || layers < 1)) problem = "numbers of layers, with commas between them";
    else if (wanted.length !== balance.length) problem = `${balance.length} numbers, one a stage, not ${wanted.length}`;
    else if (ends[ends.length - 1] !== count) problem = `numbers that add up to ${count} layers, not ${ends[ends.length - 1]}`;
    else if (forbidden !== undefined) problem = `another cut: none may be after layer ${layerName(forbidden - 1)}`;
    if (problem) {
      byId("editor-answer").textContent = `The balance needs ${problem}.`;
      return;
    }
    balance = wanted;
    update();
  }

  function startEditor() {
    if (!data.cuts) {
      byId("editor-reason").hidden = false;
      byId("editor-reason").textContent = `The cuts cannot be moved here: ${data.cutsReason}.`;
      return;
    }
    byId("editor").hidden = false;
    const select = byId("editor-schedule");
    for (const name of Object.keys(data.cuts.schedules)) select.append(make("option", { value: name }, name));
    select.value = schedule;
    select.addEventListener("change", () => { schedule = select.value; update(); });
    byId("editor-reset").addEventListener("click", () => {
      balance = data.balance.slice();
      schedule = data.cuts.schedules[data.schedule] ? data.schedule : schedule;
      select.value = schedule;
      update();
    });
    byId("editor-balance").addEventListener("change", () => setBalance(byId("editor-balance").value));
    byId("editor-copy").addEventListener("click", async () => {
      const text = byId("editor-balance").value;
      try {
        await navigator.clipboard.writeText(text);
      } catch (error) {
        byId("editor-balance").select();
        document.execCommand("copy");
      }
      byId("editor-answer").textContent = `Copied: ${text}`;
    });
    // After the page is painted: the first simulation of a large plan takes some tenths of a second.
    requestAnimationFrame(() => setTimeout(() => update(false)));
  }

  /** Tables that a click on a heading sorts. */
  function makeSortable(table) {
    const body = table.tBodies[0], headings = [...table.tHead.rows[0].cells];
    headings.forEach((heading, column) => {
      const button = make("button", { type: "button" }, heading.textContent);
      heading.replaceChildren(button);
      button.addEventListener("click", () => {
        const down = heading.getAttribute("aria-sort") === "ascending";
        headings.forEach((other) => other.removeAttribute("aria-sort"));
        heading.setAttribute("aria-sort", down ? "descending" : "ascending");
        const key = (row) => row.cells[column].dataset.order, sign = down ? -1 : 1;
        const compare = (a, b) => (key(a) !== undefined && key(b) !== undefined
          ? Number(key(a)) - Number(key(b)) : a.cells[column].textContent.localeCompare(b.cells[column].textContent));
        body.append(...[...body.rows].sort((a, b) => sign * compare(a, b)));
      });
    });
  }

  /** The steps of all plans, one below the other on one axis. */
  function showPlans() {
    const status = byId("plans-text"), transfers = byId("plans-transfers"), models = data.plans.map((own) => readTimeline(own.timeline));
    const axis = Math.max(...models.map((model) => model.step));
    const together = models.map((model, number) => {
      const canvas = make("canvas", { tabindex: "0", role: "img", "aria-describedby": "plans-text" });
      byId("plans-drawings").append(make("h4", {}, `${data.plans[number].name}: ${model.title}, ${formatSeconds(model.step)}`), canvas);
      return new TimelineView(canvas, status, transfers);
    });
    byId("plans-timelines").hidden = false;
    together.forEach((own, number) => {
      own.together = together;
      own.show(models[number], axis);
    });
    const zooms = { in: () => together[0].zoom(0.5), out: () => together[0].zoom(2), all: () => together[0].whole() };
    document.querySelectorAll("[data-zoom-plans]").forEach((button) => button.addEventListener("click", zooms[button.dataset.zoomPlans]));
    return together;
  }

  function start() {
    const plans = data.plans.length ? showPlans() : [];
    if (planned) {
      view = new TimelineView(byId("timeline-canvas"), byId("timeline-text"), byId("timeline-transfers"));
      byId("timeline-controls").hidden = false;
      const zooms = { in: () => view.zoom(0.5), out: () => view.zoom(2), all: () => view.whole() };
      document.querySelectorAll("[data-zoom]").forEach((button) => button.addEventListener("click", zooms[button.dataset.zoom]));
      data.memory.forEach((_, stage) => byId("memory-stage").append(make("option", { value: stage }, String(stage))));
      byId("memory-stage").addEventListener("change", drawMemory);
      showTimeline(planned);
    }
    buildChain();
    startEditor();
    document.querySelectorAll("table[data-sortable]").forEach(makeSortable);
    const redraw = () => { for (const own of [view, ...plans]) if (own) own.draw(); paintChain(); };
    addEventListener("resize", redraw);
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", redraw);
    addEventListener("beforeprint", () => { document.documentElement.classList.add("paper"); redraw(); });
    addEventListener("afterprint", () => { document.documentElement.classList.remove("paper"); redraw(); });
  }
  start();
})();
