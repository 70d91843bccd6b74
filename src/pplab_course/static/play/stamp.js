// The game's other rules: one microbatch on all ranks, a block, is stamped into a schedule. What pplab.lab.Block says of a
// block that takes one unit for every F, I and W and starts in whole units, in its words.
//
// Needs core.js and the levels (pplab_blocks), adds `pplab.stamp`, knows nothing of a page. A state is a
// value {level, starts, interval}: starts by action, in the order in which a microbatch visits the stages.

pplab.stamp = (() => {
  "use strict";

  const levels = pplabBlocks;
  const level = (id) => levels.find((each) => each.id === id);

  const parsed = (key) => ({ stage: Number(key.slice(0, -1)), kind: key.slice(-1) });
  const rankOf = ({ level }, key) => level.placement[parsed(key).stage];
  const wrap = (x, interval) => ((x % interval) + interval) % interval;
  const sum = (values) => values.reduce((total, x) => total + x, 0);

  // ---- a block -----------------------------------------------------------------------------------------------------

  /** The shortest block: every action as soon as the one before it has ended. */
  function start(level) {
    const stages = level.placement.map((_, stage) => stage);
    const keys = [...stages.map((stage) => `${stage}F`), ...stages.reverse().map((stage) => `${stage}I`)];
    return { level, starts: Object.fromEntries(keys.map((key, i) => [key, i])), interval: level.interval };
  }

  /** With `key` later by so many units (earlier, below 0), and what comes after it in the block with it, or alone. */
  function move(state, key, by, alone = false) {
    const keys = Object.keys(state.starts), first = keys.indexOf(key);
    const moves = keys.filter((_, i) => i === first || (i > first && !alone));
    if (state.starts[key] + by < 0) return state;
    return { ...state, starts: { ...state.starts, ...Object.fromEntries(moves.map((each) => [each, state.starts[each] + by])) } };
  }

  /** Of every rank and unit of the interval, the actions that start there. More than one: they meet. */
  function beat({ level, starts, interval }) {
    const ranks = Math.max(...level.placement) + 1;
    const found = Array.from({ length: ranks }, () => Array.from({ length: interval }, () => []));
    for (const [key, at] of Object.entries(starts)) found[rankOf({ level }, key)][wrap(at, interval)].push(key);
    return found;
  }

  /** Why this is no block; null when it is one. */
  function problem({ level, starts, interval }) {
    const { placement } = level;
    for (const [key, at] of Object.entries(starts)) {
      for (const need of pplab.needs(parsed(key), placement.length)) {
        const made = need.stage + need.kinds[need.kinds.length - 1], there = starts[made] + 1;
        if (at < there) return `${key} starts at ${at}, and what ${made} makes arrives at ${there}: start it at ${there} or later`;
      }
    }
    const byStart = Object.keys(starts).sort((a, b) => starts[a] - starts[b]);
    for (let rank = 0; rank <= Math.max(...placement); rank++) {
      const own = byStart.filter((key) => rankOf({ level }, key) === rank), work = (3 * own.length) / 2;
      if (work > interval) return `rank ${rank} has ${work} of work on a microbatch, and the interval is ${interval}: make it longer`;
      for (const [i, first] of own.entries()) {
        const second = own.slice(i + 1).find((key) => wrap(starts[key] - starts[first], interval) === 0);
        if (!second) continue;
        const both = `on rank ${rank}, ${first} (at ${starts[first]}) and ${second} (at ${starts[second]}) meet`;
        return `${both} in unit ${wrap(starts[first], interval)} of the interval of ${interval}: start one of them at another time`;
      }
    }
    return null;
  }

  /** The block as core.js takes it. */
  const blockOf = ({ level: { placement }, interval, starts }) =>
    ({ placement, interval, starts: Object.entries(starts).map(([key, at]) => ({ ...parsed(key), start: at })) });

  /** The block as often as there are microbatches, when it says. */
  function stamped(state, numMicrobatches) {
    const plans = pplab.block.plansOf(blockOf(state), numMicrobatches);
    const schedule = pplab.schedule(plans.map((plan) => plan.map(({ action }) => pplab.textOf(action))), "your block");
    const begins = plans.flatMap((plan) => plan.map(({ unit }) => unit));
    return pplab.recorded(schedule, begins, begins.map((unit) => unit + 1));
  }

  /** Stamped, every action as soon as it can: in that order, or with the ends in the fastest of a few. */
  const squeezed = (state, numMicrobatches) => pplab.simulate(stamped(state, numMicrobatches).schedule);
  function reordered(state, numMicrobatches) {
    const rows = pplab.block.fastest(blockOf(state), numMicrobatches, pplab.costs());
    return pplab.simulate(pplab.schedule(rows.map((row) => row.map(pplab.textOf)), "your block"));
  }

  /** Per stage how long it holds a microbatch; per rank what that means at most, and what it holds at most. */
  function memory(state) {
    const { level: { placement }, starts, interval } = state;
    const enough = Math.ceil(Math.max(...Object.values(starts)) / interval) + 4;
    const many = stamped(state, 2 * enough);
    const lifespans = placement.map(() => Array(2 * enough).fill(0));
    for (const { item: { parts: [{ stage, kind, microbatch }] }, start, end } of many.spans) {
      if (kind !== "I") lifespans[stage][microbatch] += kind === "F" ? -start : end;
    }
    const longest = lifespans.map((lives) => Math.max(...lives));
    const bound = many.byRank.map((_, rank) => sum(longest.map((life, stage) => (placement[stage] === rank ? Math.ceil(life / interval) : 0))));
    return { lifespans: longest, bound, peak: many.peakInFlight };
  }

  /** What there is to say of a block: `problem`, or its memory and its makespan, and whether that is what was asked. */
  function judge(state) {
    const { level } = state, wrong = problem(state);
    if (wrong) return { problem: wrong, isSolved: false, text: `${wrong[0].toUpperCase()}${wrong.slice(1)}.` };
    const said = memory(state), { makespan } = reordered(state, level.numMicrobatches), most = Math.max(...said.peak);
    const misses = [
      most > level.cap && `a rank holds ${most}, and there is memory for ${level.cap}`,
      makespan > level.makespan && `it takes ${makespan}, and ${level.makespan} is asked`,
    ].filter(Boolean);
    const text = misses.length ? `Nothing meets, but ${misses.join("; ")}.` : `It takes ${makespan} and holds at most ${most}. ${level.end}`;
    return { problem: null, ...said, makespan, isSolved: !misses.length, text };
  }

  /** The state as a line of Python. */
  const inPython = ({ level, starts, interval }) =>
    `lab.Block({${Object.entries(starts).map(([key, at]) => `"${key}": ${at}`).join(", ")}}, ` +
    `(${level.placement.join(", ")}), ${interval}).reorder(${level.numMicrobatches})`;

  return { levels, level, start, move, beat, problem, stamped, squeezed, reordered, memory, judge, inPython, rankOf };
})();
