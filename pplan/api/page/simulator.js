"use strict";
/* A step of GPipe or 1F1B for any cuts, as pplan's own simulator has it: what the cut editor of a report runs.
 *
 * A problem is what pplan/api/page/cut_problem.py writes. Seconds, bytes. Layers, stages and micro-batches count
 * from 0. tests/api/page/test_page_simulator.py holds every figure against pplan's own simulator. */
(function (root) {
  const FORWARD = 0, BACKWARD = 1, NONE = -1;

  /** The actions of each stage in order, as [kind, micro-batch]. */
  function actionLists(schedule, stages, microBatches) {
    const lists = [];
    for (let stage = 0; stage < stages; stage++) {
      const own = [];
      if (schedule === "gpipe") {
        for (let m = 0; m < microBatches; m++) own.push([FORWARD, m]);
        for (let m = microBatches - 1; m >= 0; m--) own.push([BACKWARD, m]);
      } else {
        const ahead = Math.min(microBatches, stages - stage);
        for (let m = 0; m < ahead; m++) own.push([FORWARD, m]);
        for (let m = 0; m < microBatches - ahead; m++) own.push([BACKWARD, m], [FORWARD, m + ahead]);
        for (let m = microBatches - ahead; m < microBatches; m++) own.push([BACKWARD, m]);
      }
      lists.push(own);
    }
    return lists;
  }

  /** All actions in the order of a clock on which each takes one tick, with what each waits for. */
  function clockOrder(lists) {
    const stages = lists.length, each = lists[0].length, count = stages * each, microBatches = each / 2;
    const where = new Int32Array(count), received = new Int32Array(count).fill(NONE);
    const at = (stage, kind, m) => (stage * 2 + kind) * microBatches + m;
    lists.forEach((own, stage) => own.forEach(([kind, m], i) => { where[at(stage, kind, m)] = stage * each + i; }));
    lists.forEach((own, stage) => own.forEach(([kind, m], i) => {
      const from = kind === FORWARD ? stage - 1 : stage + 1;
      if (from >= 0 && from < stages) received[stage * each + i] = where[at(from, kind, m)];
    }));
    const target = new Int32Array(count).fill(NONE), missing = new Int8Array(count);
    received.forEach((sender, i) => { if (sender !== NONE) target[sender] = i; });
    for (let i = 0; i < count; i++) missing[i] = (i % each ? 1 : 0) + (received[i] !== NONE ? 1 : 0);
    const order = [];
    let ready = [];
    for (let i = 0; i < count; i++) if (!missing[i]) ready.push(i);
    while (ready.length) {
      const following = [];
      for (const i of ready) {
        order.push(i);
        for (const other of [(i + 1) % each ? i + 1 : NONE, target[i]]) {
          if (other !== NONE && --missing[other] === 0) following.push(other);
        }
      }
      ready = following.sort((a, b) => a - b);
    }
    const rank = new Int32Array(count);
    order.forEach((i, tick) => { rank[i] = tick; });
    const ticks = (i) => (i === NONE ? NONE : rank[i]);
    return order.map((i) => ({
      stage: Math.floor(i / each), kind: lists[Math.floor(i / each)][i % each][0],
      microBatch: lists[Math.floor(i / each)][i % each][1],
      next: (i + 1) % each ? ticks(i + 1) : NONE, source: ticks(received[i]), target: ticks(target[i]),
      isFirst: i % each === 0,
    }));
  }

  /** The lists and the clock's order of a schedule: the same for all cuts, so kept. */
  const known = new Map();
  function program(schedule, stages, microBatches) {
    const key = `${schedule} ${stages} ${microBatches}`;
    if (!known.has(key)) {
      const lists = actionLists(schedule, stages, microBatches);
      known.set(key, { lists, order: clockOrder(lists) });
    }
    return known.get(key);
  }

  const sum = (values, first, last) => {
    let total = 0;
    for (let i = first; i <= last; i++) total += values[i];
    return total;
  };
  const most = (values, first, last) => {
    let largest = 0;
    for (let i = first; i <= last; i++) largest = Math.max(largest, values[i]);
    return largest;
  };

  /** The first and the last layer of every stage. */
  function stageRanges(balance) {
    let first = 0;
    return balance.map((layers) => { first += layers; return [first - layers, first - 1]; });
  }

  /** Gradient buckets as DistributedDataParallel makes them: seconds of an all-reduce after the backward. */
  function exposedAllReduce(problem, stage, first, last) {
    const own = problem.stages[stage];
    if (own.replicas === 1) return 0;
    let timing = null, longest = -1;
    for (const [table, scale] of own.timings) {
      const seconds = scale * sum(problem.tables[table].backward, first, last);
      if (seconds > longest) { longest = seconds; timing = [table, scale]; }
    }
    const line = (bytes) => ([start, each]) => start + each * bytes;
    const seconds = (bytes) => Math.min(...own.all_reduce.map((lines) => Math.max(...lines.map(line(bytes)))));
    let done = 0, end = 0, bytes = 0, size = problem.first_bucket_bytes, full = 0, anything = false;
    for (let layer = last; layer >= first; layer--) {
      const gradient = problem.trainable[layer] * own.memory.gradient;
      done += timing[1] * problem.tables[timing[0]].backward[layer];
      bytes += gradient;
      if (gradient > 0) { full = done; anything = true; }
      if (bytes >= size) {
        end = Math.max(end, full) + seconds(bytes);
        bytes = 0;
        size = problem.bucket_bytes;
      }
    }
    if (bytes > 0) end = Math.max(end, full) + seconds(bytes);
    return anything ? Math.max(0, end - done) : 0;
  }

  /** Seconds of the actions and transfers of every stage. */
  function stageCosts(problem, balance, schedule) {
    const ranges = stageRanges(balance), { recompute } = problem.schedules[schedule];
    return ranges.map(([first, last], stage) => {
      const own = problem.stages[stage], seconds = { forward: 0, backward: 0, firstBackward: 0 };
      for (const [table, scale] of own.timings) {
        const costs = problem.tables[table];
        const backward = scale * sum(costs.backward, first, last);
        const adding = scale * sum(costs.accumulation, first, last);
        seconds.forward = Math.max(seconds.forward, scale * sum(costs.forward, first, last));
        seconds.backward = Math.max(seconds.backward, backward);
        seconds.firstBackward = Math.max(seconds.firstBackward, backward - adding);
      }
      const costs = problem.tables[own.table], cut = problem.cuts[stage];
      seconds.forwardLaunch = sum(costs.forward_host, first, last);
      seconds.backwardLaunch = sum(costs.backward_host, first, last);
      if (cut) {
        const bytes = Math.max(costs.output[last], problem.tables[problem.stages[stage + 1].table].output[last]);
        seconds.occupancy = bytes * cut.streams * cut.pace;
        seconds.latency = cut.latency;
      }
      seconds.recompute = recompute[stage];
      seconds.allReduce = exposedAllReduce(problem, stage, first, last);
      return seconds;
    });
  }

  function recomputes(mode, microBatch, microBatches) {
    return mode === "always" || (mode === "except_last" && microBatch < microBatches - 1);
  }

  /** A heap of [second, position], the earliest first and of equal ones that of the lowest position. */
  class Queue {
    constructor() { this.items = []; }
    static before(a, b) { return a[0] < b[0] || (a[0] === b[0] && a[1] < b[1]); }
    push(item) {
      const items = this.items;
      let i = items.length;
      items.push(item);
      while (i) {
        const parent = (i - 1) >> 1;
        if (!Queue.before(item, items[parent])) break;
        items[i] = items[parent];
        i = parent;
      }
      items[i] = item;
    }
    pop() {
      const items = this.items, top = items[0], item = items.pop();
      if (!items.length) return top;
      let i = 0;
      for (;;) {
        let child = 2 * i + 1;
        if (child >= items.length) break;
        if (child + 1 < items.length && Queue.before(items[child + 1], items[child])) child++;
        if (!Queue.before(items[child], item)) break;
        items[i] = items[child];
        i = child;
      }
      items[i] = item;
      return top;
    }
  }

  /** When each launch starts and ends: of each device's own host, one after another in the order of the clock; of
   * one process that drives all devices, forwards one after another, backwards from a thread a device, each after
   * the one its gradients come from, and what they run again of their forwards one after another, too. */
  function launchTimes(order, costs, microBatches, hosts) {
    const starts = new Float64Array(order.length), ends = new Float64Array(order.length);
    const threads = new Array(costs.length).fill(0), one = hosts === "one";
    let called = 0, done = 0, python = 0;
    order.forEach(({ stage, kind, microBatch, source }, i) => {
      const own = costs[stage], forward = kind !== BACKWARD;
      const again = !forward && recomputes(own.recompute, microBatch, microBatches) ? own.forwardLaunch : 0;
      let start = threads[stage];
      if (one && forward) start = Math.max(called, done);
      if (one && !forward) {
        start = Math.max(start, called, source === NONE ? 0 : ends[source]);
        if (again) python = (start = Math.max(start, python)) + again;
      }
      starts[i] = start;
      ends[i] = start + (forward ? own.forwardLaunch : own.backwardLaunch + again);
      if (one && forward) called = python = ends[i];
      else {
        threads[stage] = ends[i];
        done = Math.max(done, ends[i]);
      }
    });
    return [starts, ends];
  }

  /** Start and end of every action, and of every transfer on its link: whoever is ready first is served first. */
  function run(problem, order, costs, hosts) {
    const count = order.length, microBatches = problem.micro_batches;
    const start = new Float64Array(count), end = new Float64Array(count);
    const begin = new Float64Array(count), arrival = new Float64Array(count);
    const waits = order.map((action) => (action.isFirst ? 0 : 1) + (action.source !== NONE ? 1 : 0));
    const free = new Map(), requests = new Queue(), canRun = [], backwards = new Uint8Array(problem.stages.length);
    const [launchStart, launchEnd] = launchTimes(order, costs, microBatches, hosts);
    waits.forEach((waiting, i) => { if (!waiting) canRun.push(i); });
    const release = (i, second) => {
      if (second > start[i]) start[i] = second;
      if (--waits[i] === 0) canRun.push(i);
    };
    const duration = ({ stage, kind, microBatch }) => {
      const own = costs[stage];
      if (kind === FORWARD) return own.forward;
      const seconds = backwards[stage]++ ? own.backward : own.firstBackward;
      return recomputes(own.recompute, microBatch, microBatches) ? seconds + own.forward : seconds;
    };
    while (canRun.length || requests.items.length) {
      if (canRun.length) {
        const i = canRun.pop(), action = order[i];
        start[i] = Math.max(start[i], launchStart[i]);
        end[i] = Math.max(start[i] + duration(action), launchEnd[i]);
        if (action.next !== NONE) release(action.next, end[i]);
        if (action.target !== NONE) requests.push([end[i], i]);
        continue;
      }
      const [ready, i] = requests.pop(), { stage, target } = order[i];
      const own = costs[Math.min(stage, order[target].stage)], link = problem.links[stage][order[target].stage];
      begin[i] = Math.max(ready, free.get(link) || 0);
      free.set(link, begin[i] + own.occupancy);
      arrival[i] = begin[i] + own.occupancy + own.latency;
      release(target, arrival[i]);
    }
    return { start, end, begin, arrival };
  }

  /** By stage, the bytes of gradients that its replicas add up. */
  function reducedBytes(problem, balance) {
    return stageRanges(balance).map(([first, last], stage) => {
      const own = problem.stages[stage];
      return own.replicas > 1 ? sum(problem.trainable, first, last) * own.memory.gradient : 0;
    });
  }

  /** When every stage is done, with the all-reduces that follow; those through one port share it. */
  function stageEnds(problem, balance, costs, last) {
    const bytes = reducedBytes(problem, balance), uses = new Map(), free = new Map();
    problem.stages.forEach((own, stage) => {
      if (bytes[stage]) for (const [port] of own.ports) uses.set(port, (uses.get(port) || 0) + 1);
    });
    const waiting = problem.stages.map((_, stage) => stage);
    waiting.sort((a, b) => last[a] - last[b] || a - b);
    const ends = last.slice();
    for (const stage of waiting) {
      const shared = bytes[stage] ? problem.stages[stage].ports.filter(([port]) => uses.get(port) > 1) : [];
      if (!costs[stage].allReduce && !shared.length) continue;
      const alone = last[stage] + costs[stage].allReduce;
      let end = alone;
      for (const [port, each] of shared) {
        const seconds = each * bytes[stage];
        const done = Math.max(alone - seconds, free.get(port) || 0) + seconds;
        free.set(port, done);
        end = Math.max(end, done);
      }
      ends[stage] = end;
    }
    return ends;
  }

  /** For how long the most loaded port is taken: no step is shorter. */
  function portSeconds(problem, balance, costs) {
    const taken = new Map();
    const add = (port, seconds) => taken.set(port, (taken.get(port) || 0) + seconds);
    problem.cuts.forEach((cut, stage) => {
      const seconds = costs[stage].occupancy * problem.micro_batches;
      for (const [port, part] of cut.ports) add(port, part * seconds);
    });
    const bytes = reducedBytes(problem, balance);
    problem.stages.forEach((own, stage) => {
      for (const [port, each] of own.ports) {
        add(`${port} out`, each * bytes[stage]);
        add(`${port} in`, each * bytes[stage]);
      }
    });
    return Math.max(0, ...taken.values());
  }

  /** What a micro-batch holds on a stage, and what the stage's weights and passes need besides. */
  function stageBytes(problem, schedule, stage, first, last) {
    const table = problem.tables[problem.stages[stage].table];
    const saved = sum(table.saved, first, last), received = first ? table.output[first - 1] : 0;
    let peak = 0, before = 0, buffers = sum(problem.buffers, first, last);
    for (let layer = first; layer <= last; layer++) {
      before += table.saved[layer];
      peak = Math.max(peak, before + table.workspace[layer]);
    }
    for (const [bytes, layers] of problem.shared_buffers) {
      if (layers[0] < first && layers.some((layer) => layer >= first && layer <= last)) buffers += bytes;
    }
    const bytes = {
      parameters: sum(problem.parameters, first, last), trainable: sum(problem.trainable, first, last), buffers,
      whole: saved + table.saved_input[first], input: first ? received : table.input_bytes, received,
      sent: last < problem.trainable.length - 1 ? table.output[last] : 0,
      workspace: Math.max(peak - saved, 0), largest: most(problem.largest, first, last),
    };
    if (!problem.schedules[schedule].ahead) return bytes;
    return receiveAhead(bytes, table.saved_input[first], table.output[last], problem.micro_batches);
  }

  /** With buffers for what all micro-batches of a step receive, as in PyTorch's pipelining. */
  function receiveAhead(bytes, savedInput, output, microBatches) {
    if (!(bytes.received || bytes.sent)) return bytes;
    return {
      ...bytes, whole: bytes.whole + Math.max(bytes.received - savedInput, 0) + output, input: bytes.input + output,
      received: (microBatches + 1) * bytes.received, sent: microBatches * bytes.sent,
    };
  }

  /** Bytes of a device as it holds most, all terms of the ledger; and as each of its actions runs and is done. */
  function stageMemory(problem, schedule, list, stage, first, last) {
    const own = problem.stages[stage], factors = own.memory, bytes = stageBytes(problem, schedule, stage, first, last);
    const mode = problem.schedules[schedule].recompute[stage], microBatches = problem.micro_batches;
    const during = [], after = [];
    let saving = 0, waiting = 0, peak = -1;
    for (const [kind, m] of list) {
      const again = recomputes(mode, m, microBatches);
      if (kind === FORWARD) { if (again) waiting++; else saving++; }
      const now = (saving + (kind === BACKWARD && again ? 1 : 0)) * bytes.whole + waiting * bytes.input;
      during.push(now);
      peak = Math.max(peak, now);
      if (kind === BACKWARD) { if (again) waiting--; else saving--; }
      after.push(saving * bytes.whole + waiting * bytes.input);
    }
    const gradients = bytes.trainable * factors.gradient;
    const step = factors.step_trainable * bytes.trainable + factors.step_largest * bytes.largest;
    const terms = [
      bytes.parameters + bytes.buffers, gradients, bytes.trainable * (factors.master + factors.state), peak,
      bytes.received + bytes.sent + (own.replicas > 1 ? gradients : 0), bytes.workspace,
      Math.max(step - peak - bytes.workspace, 0),
    ];
    const held = terms.reduce((total, term) => total + term, 0);
    const most = held * (1 + problem.reserve) + factors.context;
    const level = (usage) => most - (peak - usage) * (1 + problem.reserve);
    return { bytes: most, resident: level(0), during: during.map(level), after: after.map(level) };
  }

  /** A step: its seconds, bubble, actions, transfers, and the bytes of every stage. */
  function simulate(problem, balance, schedule) {
    const stages = balance.length, { lists, order } = program(schedule, stages, problem.micro_batches);
    const costs = stageCosts(problem, balance, schedule);
    const { start, end, begin, arrival } = run(problem, order, costs, problem.schedules[schedule].hosts);
    const last = new Array(stages).fill(0), busy = new Array(stages).fill(0);
    order.forEach((action, i) => {
      last[action.stage] = Math.max(last[action.stage], end[i]);
      busy[action.stage] += end[i] - start[i];
    });
    const ends = stageEnds(problem, balance, costs, last);
    const step = Math.max(...ends, portSeconds(problem, balance, costs));
    const levels = stageRanges(balance).map(([first, end_], stage) =>
      stageMemory(problem, schedule, lists[stage], stage, first, end_));
    return {
      step, ends, busy, memory: levels.map((own) => own.bytes), levels, order, start, end, begin, arrival,
      bubble: step ? 1 - busy.reduce((a, b) => a + b, 0) / (stages * step) : 0,
    };
  }

  /** Whether a stage may end before this layer. */
  const mayCut = (problem, layer) => Boolean(problem.cut_after[layer - 1]);

  const api = { simulate, actionLists, stageRanges, mayCut, FORWARD, BACKWARD };
  if (typeof module !== "undefined" && module.exports) module.exports = api;
  else root.PipelineSimulator = api;
})(typeof globalThis !== "undefined" ? globalThis : this);
