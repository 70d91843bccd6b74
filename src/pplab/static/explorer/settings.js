// The explorer's settings: as a fragment of an address, and as schedules and timelines. `schedule=1F1B&ranks=4`.

var pplabSettings = (() => {
  "use strict";

  /** The settings, by the names of the directive's options, and what they are when nothing is said. */
  const DEFAULTS = {
    schedule: "1F1B", compare: "", ranks: 4, microbatches: 8, "stages-per-rank": 2, slices: 2, attention: 0,
    forward: 1, "backward-input": 1, "backward-weight": 1, overhead: 0, latency: 0, overlap: "sum", pair: 0,
    "more-in-flight": 0, per: "rank", until: 0, path: false, memory: true, tickets: false, time: 0, zoom: 1, rows: "",
  };
  const OWN = "own"; // in place of a schedule's name: the rows that the reader brings
  const DURATIONS = ["forward", "backward-input", "backward-weight"];
  const PER_STAGE = [...DURATIONS, "overhead"]; // one value for all stages, or a list
  const MOST_ACTIONS = 20000; // that a chart of a page shows without making its reader wait

  // ---- state -------------------------------------------------------------------------------------------------------

  /** The state that a fragment says; what it doesn't name is as in `base`. Values are taken as they are. */
  function decode(text, base = DEFAULTS) {
    const state = { ...base };
    for (const [name, value] of new URLSearchParams(text)) {
      if (!Object.keys(DEFAULTS).includes(name)) continue;
      state[name] = typeof DEFAULTS[name] === "boolean" ? value !== "false" : read(name, value);
    }
    for (const name of ["schedule", "compare"]) state[name] = pplab.find(state[name])?.name || state[name];
    state.rows = pplabRows.unpack(state.rows);
    return state;
  }

  /** The value of a setting that isn't a yes or no, from what an address or a field says. */
  function read(name, text) {
    if (PER_STAGE.includes(name) && /[^,\s][,\s]+[^,\s]/.test(text)) return text.split(/[,\s]+/).filter(Boolean).map(number);
    return typeof DEFAULTS[name] === "number" ? number(text) : text;
  }

  /** What differs from the defaults, in one order, so that equal states are equal texts. */
  function encode(state) {
    const said = Object.keys(DEFAULTS).filter((name) => name === "schedule" || state[name] !== DEFAULTS[name]);
    const text = (name) => (name === "rows" ? pplabRows.pack(state.rows) : String(state[name]));
    return said.map((name) => `${name}=${encodeURIComponent(text(name)).replace(/%2C/g, ",")}`).join("&");
  }

  const isList = Array.isArray;
  const number = (text) => (text.trim() === "" ? NaN : Number(text));

  // ---- building ----------------------------------------------------------------------------------------------------

  /** The durations of an action of a stage, of which a rank has `stages`. A list has the stages' own: they aren't divided. */
  function costsOf(state, stages) {
    areNumbers(state, [...PER_STAGE, "latency"]);
    const [forward, backwardInput, backwardWeight] = DURATIONS.map((name) => state[name]);
    const { overhead, latency, pair } = state, overlap = pair === 0 ? state.overlap : pair; // a number that isn't one is refused there
    const whole = pplab.costs({ forward, backwardInput, backwardWeight, overhead, latency, overlap });
    const costs = whole.finer(state.per === "batch" ? state.microbatches : 1);
    if (state.per === "stage") return costs;
    const lists = Object.entries(costs).filter(([, value]) => isList(value));
    return pplab.costs({ ...costs.finer(stages), ...Object.fromEntries(lists) });
  }

  /** Whether the schedule `name` has that option in the package. */
  const takes = (name, option) => Boolean(pplab.find(name)?.options.includes(option));

  /** Refuse settings whose field, or whose place in an address, has no number. */
  function areNumbers(state, names) {
    const empty = names.find((name) => [state[name]].flat().some(Number.isNaN));
    if (empty) throw new pplab.ScheduleError(`${empty.replaceAll("-", " ")} has to be a number`, "put one into its field");
  }

  function optionsOf(state, name) {
    areNumbers(state, ["ranks", "microbatches", "stages-per-rank", "more-in-flight"]);
    const { ranks, microbatches, "stages-per-rank": stagesPerRank } = state, slices = slicesOf(state, name);
    const actions = ranks * microbatches * slices * (takes(name, "stages_per_rank") ? stagesPerRank : 2) * 2;
    checkSize(`${ranks} ranks and ${microbatches} microbatches are some ${actions} actions`, actions);
    return { numRanks: ranks, numMicrobatches: microbatches * slices, stagesPerRank, slices, moreInFlight: state["more-in-flight"] };
  }

  /** Into how many slices the schedule `name` cuts a microbatch. */
  function slicesOf({ slices, attention }, name) {
    if (!takes(name, "slices")) return 1;
    if (!(Number.isInteger(slices) && slices >= 1)) {
      throw new pplab.ScheduleError(`slices must be an integer of at least 1, got ${pplab.repr(slices)}`);
    }
    if (attention >= 0 && attention <= 1) return slices;
    throw new pplab.ScheduleError(`attention must be a number from 0 to 1, got ${pplab.repr(attention)}`);
  }

  function checkSize(what, actions) {
    if (actions <= MOST_ACTIONS) return;
    throw new pplab.ScheduleError(`${what}, and the page draws at most ${MOST_ACTIONS}`, "take fewer, or simulate with the package");
  }

  /** The timeline of a schedule that the state's settings gave, under the state's costs. */
  function timelineOf(state, schedule) {
    const costs = checkedCosts(state, schedule);
    return pplab.simulate(schedule, schedule.slices === undefined ? costs : slicedCosts(costs, schedule, state.attention));
  }

  /** From costs of whole microbatches, those of a schedule's equal slices. Attention's work grows as the square of the
   *  place, and all that the backward has of it is in the input gradient. */
  function slicedCosts({ forward, backwardInput, backwardWeight, ...others }, { slices, numStages, numMicrobatches }, share) {
    const width = 1 / slices;
    const part = (n) => (1 - share) * width + share * (((n % slices + 1) ** 2 - (n % slices) ** 2) / slices ** 2);
    const ofEach = (each) => Array.from({ length: numStages }, (_, stage) => {
      const [f, i, w] = [forward, backwardInput, backwardWeight].map((value) => (isList(value) ? value[stage] : value));
      return Array.from({ length: numMicrobatches }, (_, n) => each(part(n), f, i + w, w));
    });
    return pplab.costs({
      ...others,
      forward: ofEach((part, forward) => forward * part),
      backward: ofEach((part, forward, whole) => whole * part),
      backwardInput: ofEach((part, forward, whole, weights) => Math.max(0, whole * part - weights * width)),
      backwardWeight: ofEach((part, forward, whole, weights) => weights * width),
    });
  }

  function checkedCosts(state, schedule) {
    const costs = costsOf(state, schedule.numStages / schedule.numRanks);
    if (!DURATIONS.some((name) => [state[name]].flat().some((duration) => duration > 0))) {
      throw new pplab.ScheduleError("forward, input and weight gradient all take 0 time; give one of them a duration");
    }
    costs.check(schedule.numStages, schedule.numMicrobatches);
    return costs;
  }

  /** The timelines of the reader's own rows, and why some of them can't run: these are as far as they get. `given`: the
   *  records (see pplabRows) that are shown, or else the state's rows. */
  function ownTimelines(state, given) {
    const own = given.length ? given : [{ schedule: pplabRows.read(state.rows) }];
    const numActions = own.reduce((total, { schedule }) => total + schedule.actions.length, 0);
    checkSize(`these rows have ${numActions} actions`, numActions);
    const problems = [];
    const timelines = own.map(({ schedule, timeline, unit = "" }) => {
      if (timeline) return timeline;
      const costs = checkedCosts(state, schedule);
      try {
        pplabRows.validate(schedule);
        return Object.assign(pplab.simulate(schedule, costs), { unit });
      } catch (problem) {
        if (!(problem instanceof pplab.ScheduleError)) throw problem;
        problems.push(problem.message);
        return pplabRows.reach(schedule, costs);
      }
    });
    return { timelines, problem: problems.join(" ") };
  }

  /** The schedule `name` in the state's sizes. */
  function scheduleOf(state, name) {
    const options = optionsOf(state, name);
    const stages = pplab.find(name)?.placement === "V" ? 2 : 1; // per rank; an order in a loop doesn't read the costs
    const made = pplab.build(name, { ...options, costs: costsOf(state, stages) });
    return takes(name, "slices") ? Object.assign(made, { slices: options.slices }) : made;
  }

  return { DEFAULTS, OWN, decode, encode, read, takes, scheduleOf, timelineOf, ownTimelines };
})();
