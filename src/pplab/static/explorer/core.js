// The schedules, their costs and their simulation, for the page: what src/pplab does, in plain JavaScript.
//
// One global, `pplab`; no DOM, no module, no dependency, so that the same file runs from file:// and in the tests, which
// compare it with the package. Every sum and maximum is taken in the package's order: figures are equal, not close.
// What there is to know about a schedule comes from the package's registry, which the page brings as `pplabSchedules`; here
// is only how its rows are made, for sizes that a reader chooses. P, M: ranks, microbatches.

var pplab = ((schedules) => {
  "use strict";

  // ---- what is refused ----------------------------------------------------------------------------------------------

  /** What can't be built or simulated, in words for the reader: what is wrong, and what to change. */
  class ScheduleError extends Error {
    name = "ScheduleError";
    constructor(cause, remedy = "") {
      super(remedy ? `${cause}; ${remedy}` : cause);
    }
  }

  /** A text or a number as Python prints it in its messages. */
  function repr(value) {
    if (typeof value !== "string") return Number.isNaN(value) ? "nan" : String(value).replace("Infinity", "inf");
    const quote = value.includes("'") && !value.includes('"') ? '"' : "'";
    const escaped = value.replace(/\\/g, "\\\\").replace(/\n/g, "\\n").replace(/\r/g, "\\r").replace(/\t/g, "\\t");
    return quote + (quote === "'" ? escaped.replace(/'/g, "\\'") : escaped) + quote;
  }

  function positiveInt(name, value) {
    if (!(Number.isInteger(value) && value >= 1)) throw new ScheduleError(`${name} must be an integer of at least 1, got ${repr(value)}`);
    return value;
  }

  // ---- actions: {stage, kind, microbatch}; an overlap is a pair of them ---------------------------------------------

  const F = "F", B = "B", I = "I", W = "W";
  const action = (stage, kind, microbatch) => ({ stage, kind, microbatch });
  const actions = (stage, kind, microbatches) => microbatches.map((m) => action(stage, kind, m));
  const textOf = ({ stage, kind, microbatch }) => `${stage}${kind}${microbatch}`;

  /** What stands in a row: a text and its parts, two of an overlap. */
  function itemOf(made) {
    if (Array.isArray(made)) return { text: `(${made.map(textOf).join(";")})OVERLAP_${made.map(({ kind }) => kind).join("_")}`, parts: made };
    return { text: textOf(made), parts: [made] };
  }

  const ACTION = /^(\d{1,99})(SEND_F|RECV_F|SEND_B|RECV_B|F|B|I|W)(\d{1,99})$/;
  const OVERLAP = /^\(([^;()]*);([^;()]*)\)OVERLAP_([FBIW])_([FBIW])$/;
  const PAIRS = "(0F7;7B3)OVERLAP_F_B or (0W1;0I2)OVERLAP_W_I";

  /** Read an item from its text form. Throws ScheduleError with what was expected. */
  function parse(text) {
    text = text.trim();
    let match = ACTION.exec(text);
    if (match) return itemOf(action(Number(match[1]), match[2], Number(match[3])));
    match = OVERLAP.exec(text);
    if (match) {
      const pair = overlap(parse(match[1]).parts[0], parse(match[2]).parts[0]);
      if (pair.text.endsWith(`_${match[3]}_${match[4]}`)) return pair;
      throw new ScheduleError(`${repr(text)} is not an overlap: expected ${pair.text}`);
    }
    throw new ScheduleError(`${repr(text)} is not an action: expected stage, kind and microbatch such as 0F3, 2B0, 1I5, 1W5, or ${PAIRS}`);
  }

  /** Pair two computations, checked. All that a stage does for a microbatch waits for the rest of it. */
  function overlap(first, second) {
    const computes = first.kind.length + second.kind.length === 2;
    if (!computes || (first.stage === second.stage && first.microbatch === second.microbatch)) {
      const given = computes ? itemOf([first, second]).text : `(${textOf(first)}, ${textOf(second)})`;
      throw new ScheduleError(`${given} is not an overlap: expected two computations, of different stages or microbatches, as in ${PAIRS}`);
    }
    return itemOf([first, second]);
  }

  /** A number as a reader wants it: at most `digits` digits. */
  const short = (x, digits = 6) => String(Number(x.toPrecision(digits)));
  const listed = (texts) => (texts.length < 2 ? texts.join("") : `${texts.slice(0, -1).join(", ")} and ${texts[texts.length - 1]}`);

  const range = (end) => Array.from({ length: end }, (_, i) => i);
  const sum = (values) => values.reduce((total, x) => total + x, 0);

  // ---- what waits for what ------------------------------------------------------------------------------------------

  /** What an action waits for, as {stage, kinds, microbatch}: first another stage's, then its own stage's. */
  function needs({ stage, kind, microbatch }, numStages) {
    if (kind === F) return stage > 0 ? [{ stage: stage - 1, kinds: [F], microbatch }] : [];
    if (kind === W) return [{ stage, kinds: [I], microbatch }];
    const own = { stage, kinds: [F], microbatch };
    return stage < numStages - 1 ? [{ stage: stage + 1, kinds: [B, I], microbatch }, own] : [own];
  }

  /** The actions of all rows, one after the other, each with its rank; an overlap's halves apart. An action's id is its
   *  place in the list, and the second half's id stands for the overlap, too: `id` is that of its item. */
  function actionsOf(rows) {
    const found = [];
    rows.forEach((row, rank) => row.forEach(({ parts }) => {
      const id = found.length + parts.length - 1;
      for (const { stage, kind, microbatch } of parts) found.push({ stage, kind, microbatch, rank, id });
    }));
    return found;
  }

  /** Of every action, the id of the one whose message it waits for; null where it waits for its turn only.
   *
   *  A microbatch m makes 2S hops, down through S stages and back up, and each hop needs the one before it. F, and B or I,
   *  of a stage are hops; a W needs nothing but its turn, and its hops lie behind, each after an empty one. So among all M
   *  microbatches an action has the place hop * M + m, and needs what has the place M before. */
  function makersOf({ numStages: S, numMicrobatches: M, actions }) {
    const hopOf = ({ kind, stage }) => {
      if (kind === F) return stage + 1;
      if (kind === W) return 2 * S + 2 + 2 * stage;
      return kind === B || kind === I ? 2 * S - stage : 4 * S + 2; // that is none, after an empty one: communication
    };
    const places = actions.map((each) => hopOf(each) * M + each.microbatch);
    const actionAt = new Array((4 * S + 3) * M).fill(null);
    places.forEach((place, i) => (actionAt[place] = i));
    return places.map((place) => actionAt[place - M]);
  }

  /** What `run` takes: every rank's actions in turn, and what each needs: an overlap's message comes from its second half. */
  function turnsOf({ numRanks, actions, makers }) {
    const rows = range(numRanks).map(() => []);
    actions.forEach(({ rank }, i) => rows[rank].push(i));
    return { rows, needs: makers.map((maker) => (maker === null ? null : actions[maker].id)) };
  }

  /** Give `object` something that isn't part of what it says, made when it is first asked for. */
  function later(object, name, make) {
    let made;
    Object.defineProperty(object, name, { get: () => (made = made || make()) });
  }

  // ---- schedules ----------------------------------------------------------------------------------------------------

  const FEW = 100000; // stages times microbatches that are looked through whatever the number of actions
  const plural = (count, noun) => `${count} ${noun}${count === 1 ? "" : noun.endsWith("ch") ? "es" : "s"}`;

  /** A schedule from rows of items, or of their texts. */
  function schedule(rows, name = "custom") {
    const items = rows.map((row) => row.map((item) => (typeof item === "string" ? parse(item) : item)));
    const actions = actionsOf(items);
    let numStages = 0, numMicrobatches = 0;
    for (const { stage, microbatch } of actions) {
      numStages = Math.max(numStages, stage + 1);
      numMicrobatches = Math.max(numMicrobatches, microbatch + 1);
    }
    if (numStages * numMicrobatches > Math.max(FEW, actions.length)) { // before anything of that size is made
      throw new ScheduleError(
        `${plural(numStages, "stage")} and ${plural(numMicrobatches, "microbatch")} need more than ${plural(actions.length, "action")}`,
        "number stages and microbatches from 0, without a gap",
      );
    }
    const holders = range(numStages).map(() => new Set());
    for (const { stage, rank } of actions) holders[stage].add(rank);
    const placement = holders.map((ranks) => (ranks.size === 1 ? [...ranks][0] : [...ranks]));
    const made = { name, numRanks: items.length, numStages, numMicrobatches, placement, rows: items };
    later(made, "actions", () => actions);
    later(made, "makers", () => makersOf(made));
    later(made, "turns", () => turnsOf(made));
    return made;
  }

  /** Copies of the model's parameters: as many as ranks hold a stage. 2 when the schedule is bidirectional. */
  const copies = ({ placement }) => Math.max(...placement.map((place) => [place].flat().length));

  /** By how much a stage's holding of activations changes when an action starts, and when it ends. */
  const atStart = (kind) => (kind === F ? 1 : 0);
  const atEnd = (kind) => (kind === B || kind === W ? -1 : 0);

  /** What a rank holds while an item runs, when it holds `now` before, and after it. */
  function levelsOf({ parts }, now) {
    const during = now + sum(parts.map(({ kind }) => atStart(kind)));
    return [during, during + sum(parts.map(({ kind }) => atEnd(kind)))];
  }

  /** Per rank, the most forwards whose activations are held at once: from F until B, or until W when split. */
  function peakInFlight({ rows }) {
    return rows.map((row) => {
      let during, now = 0, peak = 0; // of a row that gets nowhere
      for (const item of row) {
        [during, now] = levelsOf(item, now);
        peak = Math.max(peak, during);
      }
      return peak;
    });
  }

  /** Messages between ranks in one step: activations and gradients that cross from one rank to another. */
  const numMessages = ({ actions, makers }) =>
    makers.filter((maker, i) => maker !== null && actions[maker].rank !== actions[i].rank).length;

  /** Torch's form, as text: no header, row i is rank i. */
  const toCSV = ({ rows }) => rows.map((row) => row.map((item) => item.text).join(",") + "\n").join("");

  // ---- costs --------------------------------------------------------------------------------------------------------

  const ALIKE = "costs differ by microbatch, and here all microbatches take the same: give one per stage";

  /** The value of a stage; of a microbatch, where they differ. */
  function at(value, stage, microbatch) {
    const own = Array.isArray(value) ? value[stage] : value;
    if (!Array.isArray(own)) return own;
    if (microbatch === undefined) throw new ScheduleError(ALIKE);
    return own[microbatch];
  }

  /** Throws unless the value is a number, or a list of such values where `depth` allows lists, or lists of lists. */
  function checkNumber(name, value, depth = 0) {
    if (depth && Array.isArray(value)) value.forEach((each) => checkNumber(name, each, depth - 1));
    else if (typeof value !== "number" || !(value >= 0 && value <= 1e100)) {
      throw new ScheduleError(`${name} must be a number from 0 to 1e+100, got ${repr(value)}`);
    }
  }

  function checkLength(name, value, count, each) {
    if (!Array.isArray(value) || value.length === count) return;
    const values = `${name} has ${value.length} values for ${count} ${each}${each.endsWith("h") ? "es" : "s"}`;
    throw new ScheduleError(`${values}: give one per ${each}, or a single number`);
  }

  /** How long things take: a number for all stages, or a list with one for each, which is a list itself where microbatches
   *  differ. `backward` is a full backward's, the sum of its halves when left out; `overhead` what every action takes
   *  besides, two at once as the larger of both; `overlap` that of an overlap: "sum" or "max" of the two, or a duration
   *  of a forward and a full backward, where others take the sum. */
  function costs(given = {}) {
    const { forward = 1, backwardInput = 1, backwardWeight = 1, latency = 0, backward = null, overhead = 0, overlap = "sum" } = given;
    const lists = { forward, backward_input: backwardInput, backward_weight: backwardWeight, backward, overhead };
    for (const [name, value] of Object.entries(lists)) if (name !== "backward" || value !== null) checkNumber(name, value, 2);
    if (typeof overlap === "string" && overlap !== "sum" && overlap !== "max") {
      throw new ScheduleError(`overlap must be "sum", "max" or a duration, got ${repr(overlap)}`);
    }
    if (typeof overlap !== "string") checkNumber("overlap", overlap);
    checkNumber("latency", latency);
    const work = ({ kind, stage, microbatch }) => {
      const value = (of) => at(of, stage, microbatch);
      if (kind === F) return value(forward);
      if (kind === W) return value(backwardWeight);
      if (kind === I) return value(backwardInput);
      return backward === null ? value(backwardInput) + value(backwardWeight) : value(backward);
    };
    const besides = ({ stage, microbatch }) => at(overhead, stage, microbatch);
    /** How long an item of a row takes, an overlap or one action. */
    const ofItem = ({ parts: [first, second] }) => {
      if (!second) return work(first) + besides(first);
      const a = work(first), b = work(second), isPair = [first.kind, second.kind].sort().join("") === "BF";
      const takes = overlap === "max" ? Math.max(a, b) : isPair && typeof overlap === "number" ? overlap : a + b;
      return takes + Math.max(besides(first), besides(second));
    };
    return {
      forward, backwardInput, backwardWeight, latency, backward, overhead, overlap, ofItem,
      of: (kind, stage) => ofItem({ parts: [action(stage, kind)] }),
      /** The costs of the same model cut into `stagesPerRank` times as many stages, each with the same overhead. */
      finer(stagesPerRank) {
        const part = (value) => (typeof value === "number" ? value / stagesPerRank : Array.isArray(value) ? value.map(part) : value);
        const parts = Object.entries({ forward, backwardInput, backwardWeight, backward, overlap });
        return costs({ ...Object.fromEntries(parts.map(([name, value]) => [name, part(value)])), latency, overhead });
      },
      /** Throws unless lists have a value for each of so many stages, and of so many microbatches: if left out, these are alike. */
      check(numStages, numMicrobatches) {
        const given = Object.entries(lists).filter(([, value]) => Array.isArray(value));
        if (numMicrobatches === undefined && given.some(([, value]) => value.some(Array.isArray))) throw new ScheduleError(ALIKE);
        for (const [name, value] of given) {
          checkLength(name, value, numStages, "stage");
          value.forEach((own, stage) => checkLength(`${name} of stage ${stage}`, own, numMicrobatches, "microbatch"));
        }
      },
    };
  }

  // ---- the loop -----------------------------------------------------------------------------------------------------

  /** When every item starts, and when it ends: both null if it never runs, as in a waiting circle. Line by line, this is
   *  `run` of src/pplab/simulator.py, which says more.
   *
   *  Items are numbers, and those of a row take turns. Item i starts once the one before it has ended and what it needs
   *  has arrived: that is `lags[i]` after the end of item `needs[i]`, if it needs one. It takes `durations[i]`. */
  function run(rows, needs, durations, lags) {
    const [starts, ends] = [needs.map(() => null), needs.map(() => null)];
    const waiting = new Map(); // of an item that hasn't run: the workers that stand still until it has
    const ready = []; // workers that can go on, in any order, since each has a clock of its own

    function* work(row) {
      let now = 0;
      for (const i of row) {
        const need = needs[i];
        if (need !== null) {
          if (ends[need] === null) yield need; // stand still here until it has run
          const arrival = ends[need] + lags[i];
          if (arrival > now) now = arrival; // the row is free and has to wait
        }
        starts[i] = now;
        ends[i] = now = now + durations[i];
        if (waiting.has(i)) {
          ready.push(...waiting.get(i));
          waiting.delete(i);
        }
      }
    }

    ready.push(...rows.map(work));
    while (ready.length) {
      const worker = ready.pop();
      const need = worker.next().value ?? null; // it works until it needs what hasn't run, or to its row's end
      if (need !== null) waiting.set(need, [...(waiting.get(need) ?? []), worker]);
    }
    return [starts, ends];
  }

  /** How long every action takes; an overlap's first half none, since its second takes it all. */
  const durationsOf = ({ rows }, { ofItem }) => rows.flat().flatMap((item) => (item.parts.length > 1 ? [0, ofItem(item)] : ofItem(item)));

  /** How long what each action waits for takes to arrive. */
  const lagsOf = ({ actions, makers }, { latency }) =>
    makers.map((maker, i) => (maker !== null && actions[maker].rank !== actions[i].rank ? latency : 0));

  /** The timeline of a schedule: when everything happens, and its figures. Its rows are a builder's, or of a player who
   *  placed only what could run; rows.js says of any rows what is wrong with them. */
  function simulate(schedule, given = costs()) {
    const { turns } = schedule;
    given.check(schedule.numStages, schedule.numMicrobatches);
    const [starts, ends] = run(turns.rows, turns.needs, durationsOf(schedule, given), lagsOf(schedule, given));
    if (ends.includes(null)) throw new ScheduleError("the ranks wait for each other, and nothing more can run");
    const ofItems = (times) => times.filter((_, i) => schedule.actions[i].id === i);
    return timelineOf(schedule, given, ofItems(starts), ofItems(ends));
  }

  // ---- timelines ----------------------------------------------------------------------------------------------------

  /** The timeline whose items start and end as given, rank by rank: a measured one. Nobody knows when messages arrived. */
  const recorded = (schedule, starts, ends) => timelineOf(schedule, null, starts, ends);

  function timelineOf(schedule, costs, starts, ends) {
    const { numRanks } = schedule, spans = [];
    const byRank = schedule.rows.map((row, rank) => row.map((item, position) => {
      const id = spans.length;
      return spans[spans.push({ id, rank, position, item, start: starts[id], end: ends[id] }) - 1];
    }));
    const makespan = ends.reduce((a, b) => Math.max(a, b), 0);
    const busy = byRank.map((row) => sum(row.map(({ start, end }) => end - start)));
    const idle = sum(busy.map((time) => makespan - time));
    const lengths = byRank.map((row) => (row.length ? row[row.length - 1].end - row[0].start : 0));
    const longest = lengths.indexOf(Math.max(...lengths));
    const figures = {
      bubbleFraction: idle / (numRanks * makespan),
      bubbleRatio: idle / sum(busy),
      spanBubbleFraction: 1 - busy[longest] / lengths[longest],
      peakInFlight: peakInFlight(schedule),
    };
    const timeline = { schedule, costs, makespan, ...figures, busy, spans, byRank };
    later(timeline, "places", () => new Map(spans.flatMap(({ id, item }) => item.parts.map((part) => [textOf(part), id]))));
    later(timeline, "users", () => usersOf(timeline));
    return timeline;
  }

  /** How many forwards' activations a rank holds over time: [time, count from then on], in steps. */
  function inFlight({ byRank }, rank) {
    const steps = [[0, 0]];
    const step = (time, count) => {
      const last = steps[steps.length - 1];
      if (time === last[0]) last[1] = count;
      else if (count !== last[1]) steps.push([time, count]);
    };
    let during, now = 0;
    for (const { item, start, end } of byRank[rank]) {
      [during, now] = levelsOf(item, now);
      step(start, during);
      step(end, now);
    }
    return steps;
  }

  /** Of what a span waits for, what ends last; the first of several. Undefined: of nothing. */
  const lastOf = (waits) => waits.reduce((last, each) => (last && last.span.end >= each.span.end ? last : each), undefined);

  /** One longest chain of spans, each of which starts late because of the one before it. First to last. */
  function criticalPath(timeline) {
    const { schedule, spans, byRank } = timeline, path = [];
    const turns = `${schedule.numStages - 1}F`; // what the last stage keeps is what its backward's gradient is made of
    const isResult = ({ how, text }) => how === "message" || how === "local" || text?.startsWith(turns);
    let { span } = lastOf(spans.map((span) => ({ span })));
    while (span) {
      path.push(span);
      const awaited = lastOf(waitsFor(timeline, span).filter(isResult));
      const before = byRank[span.rank][span.position - 1];
      span = awaited && !(before && span.start <= before.end) ? awaited.span : before;
    }
    return path.reverse();
  }

  /** What a span needs before it can start: other stages' results (`how`: "message" when it comes from another rank,
   *  "local" when from its own), what its own stage kept ("kept"), and the action before it on its rank ("order").
   *  `text` is the action that is needed: of an overlap, one half. */
  function waitsFor(timeline, span) {
    const { schedule, costs, spans, byRank } = timeline;
    const found = new Map();
    for (const part of span.item.parts) {
      for (const need of needs(part, schedule.numStages)) {
        const text = need.kinds.map((kind) => `${need.stage}${kind}${need.microbatch}`).find((each) => timeline.places.has(each));
        const made = spans[timeline.places.get(text)];
        if (!made || made === span || found.has(made.id)) continue;
        const crosses = made.rank !== span.rank;
        const how = need.stage === part.stage ? "kept" : crosses ? "message" : "local";
        found.set(made.id, { span: made, arrives: made.end + (crosses && costs ? costs.latency : 0), how, text });
      }
    }
    const previous = byRank[span.rank][span.position - 1];
    if (previous && !found.has(previous.id)) found.set(previous.id, { span: previous, arrives: previous.end, how: "order" });
    return [...found.values()];
  }

  /** The spans that wait for this one, in the order of ranks and rows. */
  const neededBy = ({ users, spans }, span) => users[span.id].map((id) => spans[id]);

  function usersOf(timeline) {
    const users = timeline.spans.map(() => []);
    for (const span of timeline.spans) for (const { span: made } of waitsFor(timeline, span)) users[made.id].push(span.id);
    return users;
  }

  /** Every idle interval: `part` is "fill" before the rank's first action, "drain" after its last, "wait" between;
   *  `for` is the span of another rank that it waits for, `waitsFor` the action's text, `until` when that ends. */
  function idle(timeline) {
    const { costs, byRank, makespan } = timeline, found = [];
    byRank.forEach((row, rank) => {
      let now = 0, part = "fill";
      for (const span of row) {
        const { start, end } = span;
        if (start > now) found.push({ rank, start: now, end: start, part, ...reasonOf(timeline, span, costs) });
        [now, part] = [end, "wait"];
      }
      if (now < makespan) found.push({ rank, start: now, end: makespan, part: "drain", for: null, text: "it has nothing left to do" });
    });
    return found;
  }

  /** Why a rank idles before a span. */
  function reasonOf(timeline, span, costs) {
    const last = lastOf(waitsFor(timeline, span).filter(({ how }) => how === "message"));
    if (!last) return { for: null, text: "it could go on" };
    const { span: made, text: action } = last, until = made.end;
    const runs = `it waits for ${action}, which runs on rank ${made.rank} until ${short(until)}`;
    const late = costs ? `whose result arrives at ${short(span.start)}` : `the rank goes on at ${short(span.start)}`; // measured
    return { for: made, waitsFor: action, until, text: until < span.start ? `${runs} and ${late}` : runs };
  }

  // ---- what the rows of many schedules are woven from ---------------------------------------------------------------

  /** `warmup` forwards, then a forward and a backward in turn, then the backwards left over. */
  function phases(forwards, backwards, warmup) {
    const steady = forwards.slice(warmup).flatMap((forward, i) => [forward, backwards[i]]);
    return [...forwards.slice(0, warmup), ...steady, ...backwards.slice(forwards.length - warmup)];
  }

  /** Every B as its I, its W put off until `delay` further I's have run; the W's left over last, oldest first. */
  function splitBackwards(row, delay) {
    const waiting = [];
    const made = row.flatMap((each) => {
      if (each.kind !== B) return each;
      waiting.push(action(each.stage, W, each.microbatch));
      const gradient = action(each.stage, I, each.microbatch);
      return waiting.length > delay ? [gradient, waiting.shift()] : gradient;
    });
    return [...made, ...waiting];
  }

  // ---- builders: rows for P ranks and M microbatches ----------------------------------------------------------------

  // By the names of the package's registry. Of a schedule that is missing here the page has the package's own rows, for
  // some sizes: who builds the page (pplab_schedules) looks for lines that begin as these do.
  const builders = Object.create(null); // a schedule may be called "constructor"

  builders["naive"] = (P, M) => range(P).map((rank) => range(M).flatMap((m) => [action(rank, F, m), action(rank, B, m)]));

  builders["GPipe"] = (P, M) => range(P).map((rank) => [...actions(rank, F, range(M)), ...actions(rank, B, range(M))]);

  /** The row of a rank with one stage that runs at most `cap` forwards ahead of its backwards. */
  function cappedRow(rank, cap, M) {
    const order = range(M);
    return phases(actions(rank, F, order), actions(rank, B, order), Math.min(cap, M) - 1);
  }

  builders["1F1B"] = (P, M, { moreInFlight = 0 }) =>
    range(P).map((rank) => cappedRow(rank, positiveInt(`in_flight[${rank}]`, P - rank + moreInFlight), M));

  builders["eager-1F1B"] = (P, M) => range(P).map((rank) => cappedRow(rank, 2 * (P - rank) - 1, M));

  builders["ZB-H1"] = (P, M) => range(P).map((rank) => splitBackwards(cappedRow(rank, P - rank, M), rank));

  builders["ZB-H2"] = (P, M) => range(P).map((rank) => splitBackwards(cappedRow(rank, 2 * (P - rank) - 1, M), 2 * rank));

  // in a loop: stage s on rank s mod P

  builders["Interleaved1F1B"] = (P, M, { stagesPerRank = 2 }) => loopRows(P, M, stagesPerRank, 2);

  builders["InterleavedZeroBubble"] = (P, M, { stagesPerRank = 2 }) =>
    loopRows(P, M, stagesPerRank, 1).map((row, rank) => splitBackwards(row, rank));

  builders["paired-1F1B"] = (P, M, { stagesPerRank = 1 }) => loopRows(P, M, stagesPerRank, 2).map(pairedRow);

  /** A row's forwards before its first backward, then each other forward with a backward, then the backwards left over. */
  function pairedRow(row) {
    const [forwards, backwards] = [F, B].map((kind) => row.filter((each) => each.kind === kind));
    const first = row.findIndex(({ kind }) => kind === B), together = forwards.length - first;
    const pairs = forwards.slice(first).map((forward, i) => [forward, backwards[i]]);
    return [...forwards.slice(0, first), ...pairs, ...backwards.slice(together)];
  }

  builders["LoopedBFS"] = (P, M, { stagesPerRank = 2 }) => {
    const order = range(M), back = range(M).reverse();
    return range(P).map((rank) => {
      const stages = loopStages(rank, P, stagesPerRank);
      const forwards = stages.flatMap((stage) => actions(stage, F, order));
      return [...forwards, ...stages.reverse().flatMap((stage) => actions(stage, B, back))];
    });
  };

  function loopRows(P, M, stagesPerRank, warmupPerRank) {
    const groups = groupsOf(P, M);
    return range(P).map((rank) => {
      const stages = loopStages(rank, P, stagesPerRank);
      const most = (stages.length - 1) * groups[0].length + warmupPerRank * (P - 1 - rank);
      const inGroups = (stages, kind) => groups.flatMap((group) => stages.flatMap((stage) => actions(stage, kind, group)));
      return phases(inGroups(stages, F), inGroups([...stages].reverse(), B), Math.min(most, stages.length * M));
    });
  }

  const loopStages = (rank, P, stagesPerRank) =>
    range(positiveInt("stages_per_rank", stagesPerRank)).map((v) => rank + v * P);

  /** The microbatches in groups that go through a rank's stages together. The first is the largest: warm-ups fit. */
  function groupsOf(P, M) {
    const count = Math.max(1, Math.floor(M / P)), each = Math.floor(M / count), rest = M % count;
    return range(count).map((g) => range(each + (g < rest ? 1 : 0)).map((i) => g * each + Math.min(g, rest) + i));
  }

  // of slices: what counts as a microbatch is one of some slices of a sequence

  builders["Seq1F1B"] = (P, M, { stagesPerRank = 1, slices = 2 }) => {
    const count = sequencesOf("Seq1F1B", M, slices);
    positiveInt("stages_per_rank", stagesPerRank);
    const groups = groupsOf(Math.ceil(P / slices), count).map((group) => group.flatMap((m) => range(slices).map((j) => m * slices + j)));
    return range(P).map((rank) => {
      const stages = loopStages(rank, P, stagesPerRank);
      const inGroups = (order, kind) => groups.flatMap((group) => order.flatMap((stage) => actions(stage, kind, group)));
      const forwards = inGroups(stages, F);
      const lastFirst = inGroups([...stages].reverse(), B).map(({ stage, microbatch: n }) => action(stage, B, n - 2 * (n % slices) + slices - 1));
      const warmup = (stages.length - 1) * groups[0].length + P - 1 - rank + slices - 1;
      return phases(forwards, lastFirst, Math.min(warmup, forwards.length - 1));
    });
  };

  builders["TeraPipe"] = (P, M, { slices = 2 }) => {
    sequencesOf("TeraPipe", M, slices);
    return range(P).map((rank) => [...actions(rank, F, range(M)), ...actions(rank, B, range(M).reverse())]);
  };

  /** How many microbatches so many slices make. */
  function sequencesOf(name, M, slices) {
    if (M % positiveInt("slices", slices) === 0) return M / slices;
    throw new ScheduleError(`${name} takes a multiple of slices = ${slices} microbatches, since each counts as a slice, got ${M}`);
  }

  // on a V: stages r and 2P-1-r on rank r

  /** A stage as its rank sees it: how much of each kind it has been given, and what comes next. */
  function local(stage, firstMicrobatch = 0) {
    const given = { F: 0, I: 0, W: 0 };
    const next = (kind) => {
      const microbatch = given[kind === B ? I : kind];
      if (kind === B) given.I = given.W = microbatch + 1; // a full backward counts as I and W
      else given[kind] = microbatch + 1;
      return action(stage, kind, firstMicrobatch + microbatch);
    };
    return { next, given };
  }

  builders["ZBVZeroBubble"] = (P, M) => {
    const enough = Math.max(M, 2 * P - 1);
    return range(P).map((rank) => zbVRow(rank, P, enough).filter((a) => a.microbatch < M));
  };

  function zbVRow(rank, P, M) {
    const down = local(rank), up = local(2 * P - 1 - rank), row = [];
    const times = (count, ...made) => {
      for (let i = 0; i < count; i++) for (const [stage, kind] of made) row.push(stage.next(kind));
    };
    times(2 * (P - rank) - 1, [down, F]); // the V fills, down and back up
    times(rank, [up, F], [down, F]);
    times(P - rank, [up, F], [up, I], [up, W]);
    while (up.given.F < M) {
      // steady state
      if (down.given.F < M) times(1, [down, F]);
      times(1, [down, I], [down, W], [up, F], [up, I], [up, W]);
    }
    times(rank, [down, I], [up, I]); // the V empties: weight gradients can wait
    times(P - rank, [down, I], [down, W]);
    for (const stage of [up, down]) times(stage.given.I - stage.given.W, [stage, W]);
    return row;
  }

  // `lab.Block`: a building block, repeated, and the plan that it gives reordered

  /** A block on a V, from what each rank starts when: F and F on the way up, I and I on the way back. */
  const vBlock = (P, startsOf) => ({
    placement: [...range(P), ...range(P).reverse()],
    interval: 6, // units that a microbatch's F, I and W take on a rank with two stages
    starts: range(P).flatMap((r) => startsOf(r).map((start, i) => ({ stage: i % 3 ? 2 * P - 1 - r : r, kind: i < 2 ? F : I, start }))),
  });

  builders["V-Half"] = (P, M, { costs: given = costs() }) => {
    const gap = P % 2 === 0 ? 3 : 0;
    return fastest(vBlock(P, (r) => [2 * r, 3 * P - r - 2, 3 * P + gap + 2 * r - 1, 6 * P + gap - r - 2]), M, given);
  };

  builders["V-Min"] = (P, M, { costs: given = costs() }) => {
    const gap = P % 3 === 0 ? 2 : 0;
    return fastest(vBlock(P, (r) => [r, 2 * P - r - 1, 2 * P + gap + r, 4 * P + gap - r - 1]), M, given);
  };

  /** The block's rows that are the fastest for these costs. */
  function fastest(block, M, given) {
    let best = null, least = 0;
    for (const rows of candidates(block, M)) {
      const { makespan } = simulate(schedule(rows.map((row) => row.map(itemOf))), given);
      if (best === null || makespan < least) [best, least] = [rows, makespan];
    }
    return best;
  }

  /** The repeated block as it is, and reordered around three steady states, the longer ones P and 2P units more. */
  function* candidates(block, M) {
    const plans = plansOf(block, M), P = plans.length, { placement, interval, starts } = block;
    yield plans.map((plan) => plan.map((planned) => planned.action));
    const [first, last] = [I, F].map((kind) => starts.find((each) => each.stage === 0 && each.kind === kind).start);
    for (const more of [0, P, 2 * P]) yield reordered(plans, placement.length, first - more, last + interval * (M - 1) + more);
  }

  /** A block's starts of F and I repeated, in whole units, a weight gradient in every unit that is left free: what each
   *  rank runs in which unit. */
  function plansOf({ placement, interval, starts }, M) {
    return range(Math.max(...placement) + 1).map((rank) => {
      const at = [], plan = [], waiting = [];
      for (const { stage, kind, start } of starts.filter((each) => placement[each.stage] === rank)) {
        for (let m = 0; m < M; m++) at[start + interval * m] = action(stage, kind, m);
      }
      for (let unit = 0; unit < at.length || waiting.length; unit++) {
        const each = at[unit];
        if (each) {
          plan.push({ unit, action: each });
          if (each.kind === I) waiting.push(action(each.stage, W, each.microbatch));
        } else if (waiting.length) plan.push({ unit, action: waiting.shift() });
      }
      return plan;
    });
  }

  /** The plans, squeezed and, outside of the units of the steady state, reordered in no more memory.
   *
   *  Step by step, each rank runs what comes first in its plan and is ready; a W only when it could run nothing else, an
   *  F only if the rest of the plan, run as planned, then holds no more than the plans do. So what is first of all that
   *  is left, over all ranks, can always run. In the steady state a rank keeps to its plan. */
  function reordered(plans, numStages, first, last) {
    const most = Math.max(...plans.map(peakOf));
    const left = plans.map((plan) => partsOf(plan, first, last));
    const rows = plans.map(() => []), held = plans.map(() => 0), done = new Set();
    const isReady = (each) =>
      needs(each, numStages).every(({ stage, kinds, microbatch }) =>
        done.has(textOf(action(stage, kinds[kinds.length - 1], microbatch))),
      );

    function chosen(rank) {
      let ahead = held[rank], peak = ahead; // when what is passed over runs as planned, and the most until here
      const tried = new Set();
      let weight = null;
      for (const each of left[rank][0] || []) {
        const { stage, kind } = each;
        if (!tried.has(stage + kind)) {
          tried.add(stage + kind); // of these, later microbatches aren't ready earlier
          if ((kind !== F || peak < most) && isReady(each)) {
            if (kind !== W) return each;
            weight = weight || each;
          }
        }
        ahead += change(each);
        peak = Math.max(peak, ahead);
      }
      return weight;
    }

    while (left.some((parts) => parts.length)) {
      plans.map((_, rank) => chosen(rank)).forEach((each, rank) => {
        if (!each) return;
        const [part] = left[rank];
        rows[rank].push(each);
        done.add(textOf(each));
        held[rank] += change(each);
        part.splice(part.indexOf(each), 1);
        if (!part.length) left[rank].shift();
      });
    }
    return rows;
  }

  /** A plan in parts that are run one after the other, each in any order. */
  function partsOf(plan, first, last) {
    const before = [], between = [], after = [];
    for (const { unit, action } of plan) {
      if (last < first || unit < first) before.push(action);
      else if (unit <= last) between.push([action]);
      else after.push(action);
    }
    return [before, ...between, after].filter((part) => part.length);
  }

  /** By how much a rank holds more activations after an action. It holds them while the W runs, too. */
  const change = ({ kind }) => (kind === F) - (kind === W);

  function peakOf(plan) {
    let held = 0;
    return Math.max(...plan.map(({ action }) => (held += change(action))));
  }

  // from both ends: DualPipe, and its half on a V

  builders["DualPipe"] = (P, M) => {
    if (P % 2) {
      throw new ScheduleError(`DualPipe needs an even number of ranks, got ${P}, because each rank is paired with its mirror image: take ${P + 1}, for example`);
    }
    if (M % 2 || M < 2 * P) {
      throw new ScheduleError(`DualPipe on ${P} ranks needs an even number of microbatches of at least 2P = ${2 * P}, got ${M}`);
    }
    return range(P).map((rank) => {
      const mirror = P - 1 - rank;
      const streams = [local(rank), local(mirror, M / 2)];
      const [near, far] = rank > mirror ? streams.reverse() : streams;
      return dualRow(near, far, Math.min(rank, mirror), P / 2, M / 2, Math.abs(rank - mirror) === 1);
    });
  };

  builders["DualPipeV"] = (P, M) => {
    if (M < 2 * P) {
      throw new ScheduleError(`DualPipeV on ${P} ranks needs at least 2P = ${2 * P} microbatches, got ${M}`);
    }
    return range(P).map((rank) => dualRow(local(rank), local(2 * P - 1 - rank), rank, P, M, rank === P - 1));
  };

  /** The eight steps of the published schedule, of a rank `depth` ranks from where its `near` stream enters. `reach`
   *  ranks lie between there and where the streams meet; `turns`: this rank is the last of them. */
  function dualRow(near, far, depth, reach, M, turns) {
    const rest = reach - depth - 1, row = [], waiting = []; // waiting: weight gradients put off
    const forward = (stream) => stream.next(F);
    const backward = (stream, split) => {
      if (!split) return stream.next(B);
      const made = stream.next(I);
      waiting.push(stream.next(W));
      return made;
    };
    for (let i = 0; i < 2 * rest; i++) row.push(forward(near)); // 1
    for (let i = 0; i < depth + 1; i++) row.push(forward(near), forward(far)); // 2
    for (let i = 0; i < rest; i++) row.push(backward(far, true), waiting.shift(), forward(far)); // 3
    for (let i = 0; i < M - 2 * reach + depth + 1; i++) {
      // 4, the steady state
      if (turns && i === 0) row.push(forward(near), backward(far, false)); // these two could be a pair; the published row has them apart
      else row.push([forward(near), backward(far, false)]);
      row.push([forward(far), backward(near, false)]);
    }
    for (let i = 0; i < rest; i++) row.push(backward(far, false), [forward(far), backward(near, false)]); // 5
    let split = false;
    for (let i = 0; i < depth + 1; i++) {
      // 6
      const half = i === Math.floor((depth + 1) / 2);
      split = split || (half && depth % 2 === 1);
      row.push(backward(far, split));
      split = split || half;
      row.push(backward(near, split));
    }
    for (let i = 0; i < rest; i++) row.push(waiting.shift(), backward(near, split)); // 7
    return row.concat(waiting); // 8
  }

  // ---- by name ------------------------------------------------------------------------------------------------------

  const known = schedules.filter(({ name, rows }) => builders[name] || rows); // of others there is no row to show

  /** What the package says of a schedule: {name, aliases, rules, source, options, placement}. Undefined: it has none. */
  const find = (name) => known.find((each) => [each.name, ...each.aliases].some((each) => plain(each) === plain(name)));
  const plain = (name) => name.toLowerCase().replace(/^schedule|[-_ ]/g, ""); // as the package's registry

  /** Build the schedule `name`. Options that a schedule doesn't take are left unread, so that a view can keep its state
   *  while a reader goes from one to another. Throws ScheduleError that says what was given and what was expected. */
  function build(name, { numRanks: P, numMicrobatches: M, ...options }) {
    const found = find(name);
    if (!found) throw new ScheduleError(`unknown schedule ${repr(name)}: known: ${known.map((each) => each.name).join(", ")}`);
    positiveInt("num_ranks", P);
    positiveInt("num_microbatches", M);
    const make = builders[found.name];
    const rows = make ? make(P, M, options).map((row) => row.map(itemOf)) : packageRows(found, P, M, options);
    return schedule(rows, found.name);
  }

  /** The package's own rows of a schedule that has none here: the page has them for some sizes, and for equal times. */
  function packageRows({ name, options, rows }, P, M, { stagesPerRank, costs: given = costs() }) {
    const { forward, backwardInput, backwardWeight, latency, overhead } = given;
    const areEqual = forward === backwardInput && forward === backwardWeight && latency === 0 && overhead === 0;
    if (options.includes("costs") && !areEqual) {
      const has = `the order of ${name} depends on the costs, and the page has it for equal ones: F = I = W, no latency, no overhead`;
      throw new ScheduleError(has, "build it with the package, and open it with lab.explore");
    }
    const found = rows[options.includes("stages_per_rank") ? [P, M, stagesPerRank] : [P, M]];
    if (!found) {
      const sizes = Object.keys(rows).map((size) => size.replaceAll(",", " x "));
      throw new ScheduleError(
        `the page has ${name} for some sizes only, not for ${P} ranks and ${M} microbatches: it has ${sizes.join(", ")}. ` +
          "Build others with the package",
      );
    }
    if (typeof found === "string") throw new ScheduleError(found); // why the package refuses them
    return found.map((row) => row.split(" "));
  }

  return {
    ScheduleError, repr, short, listed, schedules: known, builders, block: { plansOf, fastest }, find, costs, build, schedule,
    parse, textOf, toCSV, run, durationsOf, simulate, recorded, inFlight, peakInFlight, criticalPath, waitsFor, neededBy, idle,
    needs, numMessages, copies,
  };
})(pplabSchedules);
