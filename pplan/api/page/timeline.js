"use strict";
/* The timeline of a step on a canvas: zoomed, read by pointing or by keys. */
(function (root) {
  const NAMES = { F: "forward", B: "backward", W: "weight gradient" };
  const TOP = 22, LEFT = 44, LEAST_LABEL = 16, MOST_TRANSFERS = 1500;
  const { formatSeconds } = root.PageNumbers;

  /** The data of a page (whole numbers of a step's parts) as seconds. */
  function readTimeline(data) {
    const unit = data.step / data.units;
    const devices = data.devices.map((own) => {
      let end = 0;
      const start = [], ends = [], begin = [], arrival = [];
      own.m.forEach((_, i) => {
        start.push((end + own.wait[i]) * unit);
        end += own.wait[i] + own.run[i];
        ends.push(end * unit);
        begin.push((end + own.queue[i]) * unit);
        arrival.push((end + own.queue[i] + own.sent[i]) * unit);
      });
      return { kinds: own.kinds, m: own.m, c: own.c, to: own.to, start, end: ends, begin, arrival };
    });
    const sums = data.sums.map(([stages, start, end]) => ({ stages, start: start * unit, end: end * unit }));
    return { step: data.step, devices, sums, title: data.title };
  }

  /** What `simulator.js` returns, in the same form. */
  function simulatedTimeline(result, title) {
    const devices = result.ends.map(() => ({ kinds: [], m: [], c: [], to: [], start: [], end: [], begin: [], arrival: [] }));
    // In the order of the clock each stage's actions stand in the order of its list.
    result.order.forEach((action, i) => {
      const own = devices[action.stage];
      own.kinds.push("FB"[action.kind]);
      own.m.push(action.microBatch);
      own.to.push(action.target < 0 ? -1 : result.order[action.target].stage);
      own.start.push(result.start[i]);
      own.end.push(result.end[i]);
      own.begin.push(result.begin[i]);
      own.arrival.push(result.arrival[i]);
    });
    const sums = [];
    result.ends.forEach((end, stage) => {
      const last = devices[stage].end[devices[stage].end.length - 1];
      if (end > last) sums.push({ stages: [stage], start: last, end });
    });
    return { step: result.step, devices, sums, title, levels: result.levels };
  }

  /** The first of ascending numbers that is above a value. */
  function above(values, value) {
    let low = 0, high = values.length;
    while (low < high) {
      const middle = (low + high) >> 1;
      if (values[middle] > value) high = middle; else low = middle + 1;
    }
    return low;
  }

  class TimelineView {
    constructor(canvas, status, transfers) {
      Object.assign(this, { canvas, status, transfers, model: null, axis: 1, from: 0, to: 1, selected: null, together: [this] });
      this.listen();
    }

    /** Shows a step on an axis that ends with it, or at `axis`. */
    show(model, axis = model.step || 1) {
      Object.assign(this, { model, axis, from: 0, to: axis });
      this.selected = null;
      this.canvas.setAttribute("aria-label", `Timeline: ${model.title}, ${formatSeconds(model.step)} a step`);
      this.draw();
    }

    get rowHeight() { return Math.max(14, Math.min(34, 420 / this.model.devices.length)); }
    get width() { return this.canvas.clientWidth || 800; }
    x(second) { return LEFT + (second - this.from) / (this.to - this.from) * (this.width - LEFT - 4); }
    second(x) { return this.from + (x - LEFT) / (this.width - LEFT - 4) * (this.to - this.from); }

    zoom(factor, around) {
      const middle = around ?? (this.from + this.to) / 2;
      const span = Math.min(this.axis, Math.max(this.axis * 1e-5, (this.to - this.from) * factor));
      const share = (middle - this.from) / (this.to - this.from);
      this.begin(middle - share * span, span);
    }

    move(seconds) { this.begin(this.from + seconds, this.to - this.from); }

    whole() { this.begin(0, this.axis); }

    /** Shows so much of the axis from there on, in all views that are shown together. */
    begin(from, span) {
      const first = Math.max(0, Math.min(this.axis - span, from));
      for (const view of this.together) {
        [view.from, view.to] = [first, first + span];
        view.draw();
      }
    }

    colours() {
      const style = getComputedStyle(document.documentElement), colours = {};
      for (const name of ["page", "text", "soft", "line", "forward", "backward", "weight", "transfer", "sum", "idle", "on-action", "accent"]) {
        colours[name] = style.getPropertyValue(`--${name}`).trim();
      }
      return colours;
    }

    draw() {
      if (!this.model) return;
      const { canvas, model } = this, row = this.rowHeight, width = this.width;
      const height = TOP + model.devices.length * row + 6, ratio = root.devicePixelRatio || 1;
      canvas.style.height = `${height}px`;
      canvas.width = Math.round(width * ratio);
      canvas.height = Math.round(height * ratio);
      const context = canvas.getContext("2d"), colours = this.colours();
      context.setTransform(ratio, 0, 0, ratio, 0, 0);
      context.fillStyle = colours.page;
      context.fillRect(0, 0, width, height);
      this.drawAxis(context, colours, height);
      model.devices.forEach((own, stage) => this.drawRow(context, colours, own, stage));
      for (const { stages, start, end } of model.sums) {
        for (const stage of stages) this.drawBox(context, stage, start, end, colours.sum, 0.5);
      }
      if (this.transfers.checked) this.drawTransfers(context, colours);
      if (this.selected) this.drawSelected(context, colours);
    }

    drawAxis(context, colours, height) {
      const span = this.to - this.from, rough = span / Math.max(2, this.width / 140);
      const power = 10 ** Math.floor(Math.log10(rough));
      const tick = [1, 2, 5, 10].map((each) => each * power).find((each) => each >= rough);
      context.font = "11px sans-serif";
      context.textBaseline = "top";
      for (let t = Math.ceil(this.from / tick) * tick; t <= this.to; t += tick) {
        context.fillStyle = colours.line;
        context.fillRect(this.x(t), 14, 1, height - 14);
        context.fillStyle = colours.soft;
        context.fillText(t < tick / 2 ? "0" : formatSeconds(t), this.x(t) + 2, 2);
      }
    }

    drawBox(context, stage, start, end, colour, share) {
      const row = this.rowHeight, left = Math.max(LEFT, this.x(start)), right = Math.min(this.width, this.x(end));
      if (right <= LEFT || left >= this.width) return 0;
      const size = (row - 3) * share;
      context.fillStyle = colour;
      context.fillRect(left, TOP + stage * row + (row - 3) - size, Math.max(right - left - (right - left > 3 ? 0.7 : 0), 0.6), size);
      return right - left;
    }

    drawRow(context, colours, own, stage) {
      const row = this.rowHeight, y = TOP + stage * row, fill = { F: colours.forward, B: colours.backward, W: colours.weight };
      const end = Math.min(this.width - 4, this.x(this.model.step));
      context.fillStyle = colours.idle;
      if (end > LEFT) context.fillRect(LEFT, y, end - LEFT, row - 3);
      context.fillStyle = colours.text;
      context.font = "11px sans-serif";
      context.textBaseline = "middle";
      context.fillText(String(stage), 6, y + row / 2 - 1);
      for (let i = above(own.end, this.from); i < own.m.length && own.start[i] < this.to; i++) {
        const kind = own.kinds[i];
        const width = this.drawBox(context, stage, own.start[i], own.end[i], fill[kind], kind === "W" ? 0.6 : 1);
        if (kind === "B" && width > 1) {
          context.fillStyle = colours["on-action"];
          context.fillRect(Math.max(LEFT, this.x(own.start[i])), y + row - 5, Math.max(width - 0.7, 0.6), 2);
        }
        if (width > LEAST_LABEL) {
          context.fillStyle = colours["on-action"];
          const text = width > 30 ? `${kind}${own.m[i]}` : kind;
          context.fillText(text, Math.max(LEFT, this.x(own.start[i])) + 3, y + row / 2 - 1, width - 4);
        }
      }
    }

    drawTransfers(context, colours) {
      const row = this.rowHeight, lines = [];
      this.model.devices.forEach((own, stage) => {
        for (let i = Math.max(0, above(own.end, this.from) - 1); i < own.m.length && own.start[i] < this.to; i++) {
          if (own.to[i] >= 0 && lines.length <= MOST_TRANSFERS) lines.push([stage, own, i]);
        }
      });
      if (lines.length > MOST_TRANSFERS) return;
      context.save();
      context.beginPath();
      context.rect(LEFT, TOP, this.width, this.model.devices.length * row);
      context.clip();
      context.strokeStyle = colours.transfer;
      context.lineWidth = 1;
      for (const [stage, own, i] of lines) {
        context.beginPath();
        context.moveTo(this.x(own.begin[i]), TOP + stage * row + (row - 3) / 2);
        context.lineTo(this.x(own.arrival[i]), TOP + own.to[i] * row + (row - 3) / 2);
        context.stroke();
      }
      context.restore();
    }

    drawSelected(context, colours) {
      const [stage, i] = this.selected, own = this.model.devices[stage], row = this.rowHeight;
      context.strokeStyle = colours.accent;
      context.lineWidth = 3;
      const left = Math.max(LEFT, this.x(own.start[i])), right = Math.min(this.width, this.x(own.end[i]));
      if (right > LEFT) context.strokeRect(left, TOP + stage * row, Math.max(right - left, 2), row - 3);
    }

    /** An action, or the idle time at a place, in words. */
    describe(stage, second) {
      const own = this.model.devices[stage], i = above(own.end, second);
      if (i < own.m.length && own.start[i] <= second) return this.describeAction(stage, i);
      const sum = this.model.sums.find(({ stages, start, end }) => stages.includes(stage) && start <= second && second < end);
      const from = i ? own.end[i - 1] : 0, to = i < own.m.length ? own.start[i] : this.model.step;
      if (sum) return `Stage ${stage}: all-reduce, ${formatSeconds(sum.end - sum.start)}`;
      return `Stage ${stage}: idle for ${formatSeconds(to - from)}, from ${formatSeconds(from)} to ${formatSeconds(to)}`;
    }

    describeAction(stage, i) {
      const own = this.model.devices[stage], part = own.c.length ? `, part ${own.c[i]}` : "";
      const sent = own.to[i] < 0 ? "" : `; then to stage ${own.to[i]}, there at ${formatSeconds(own.arrival[i])}`;
      return `Stage ${stage}: ${NAMES[own.kinds[i]]} of micro-batch ${own.m[i]}${part}, `
        + `${formatSeconds(own.end[i] - own.start[i])}, from ${formatSeconds(own.start[i])} to ${formatSeconds(own.end[i])}${sent}`;
    }

    select(stage, i) {
      const own = this.model.devices[stage], count = own.m.length;
      if (!count) return;
      this.selected = [stage, Math.max(0, Math.min(count - 1, i))];
      const at = this.selected[1], span = this.to - this.from;
      if (own.start[at] < this.from || own.end[at] > this.to) {
        this.begin(own.start[at] - span / 4, span);
      }
      this.status.textContent = this.describeAction(stage, at);
      this.draw();
    }

    key(name) {
      const [stage, i] = this.selected || [0, -1], last = this.model.devices.length - 1;
      const beside = (other) => this.select(other, above(this.model.devices[other].end, this.model.devices[stage].start[Math.max(i, 0)]));
      const actions = {
        ArrowRight: () => this.select(stage, i + 1), ArrowLeft: () => this.select(stage, i - 1),
        ArrowDown: () => beside(Math.min(last, stage + 1)), ArrowUp: () => beside(Math.max(0, stage - 1)),
        "+": () => this.zoom(0.5, this.centre()), "=": () => this.zoom(0.5, this.centre()), "-": () => this.zoom(2, this.centre()),
        Home: () => this.whole(),
      };
      if (!actions[name]) return false;
      actions[name]();
      return true;
    }

    centre() {
      return this.selected ? this.model.devices[this.selected[0]].start[this.selected[1]] : undefined;
    }

    listen() {
      const { canvas, status } = this;
      let drag = null;
      const place = (event) => {
        const box = canvas.getBoundingClientRect();
        const stage = Math.floor((event.clientY - box.top - TOP) / this.rowHeight);
        return [stage, this.second(event.clientX - box.left)];
      };
      canvas.addEventListener("pointerdown", (event) => { drag = [event.clientX, this.from]; canvas.setPointerCapture(event.pointerId); });
      canvas.addEventListener("pointerup", () => { drag = null; });
      canvas.addEventListener("pointermove", (event) => {
        if (!this.model) return;
        if (drag && event.buttons) {
          this.move(drag[1] - (event.clientX - drag[0]) / this.width * (this.to - this.from) - this.from);
          return;
        }
        const [stage, second] = place(event);
        if (stage >= 0 && stage < this.model.devices.length && second >= this.from && second <= this.to) {
          status.textContent = this.describe(stage, second);
        }
      });
      canvas.addEventListener("dblclick", (event) => this.zoom(0.5, place(event)[1]));
      canvas.addEventListener("wheel", (event) => {
        if (!event.shiftKey && !event.ctrlKey) return;
        event.preventDefault();
        this.zoom((event.deltaY || event.deltaX) > 0 ? 1.25 : 0.8, place(event)[1]);
      }, { passive: false });
      canvas.addEventListener("keydown", (event) => { if (this.model && !event.ctrlKey && !event.metaKey && this.key(event.key)) event.preventDefault(); });
      this.transfers.addEventListener("change", () => this.draw());
    }
  }

  root.PageTimeline = { TimelineView, readTimeline, simulatedTimeline };
})(globalThis);
