// The play mode: its levels and rules. A schedule is built by hand, action by action, and scored against a reference.
//
// Needs core.js, adds `pplab.play`, knows nothing of a page. A state is a value: moves return a new one. Only what can
// run may be placed, so that no order ends in a deadlock. The references' figures are simulated, none is typed in.

pplab.play = (() => {
  "use strict";

  // ---- levels ------------------------------------------------------------------------------------------------------

  // `capped`: no rank may hold more than the reference does; else a rank may hold all.
  const LEVELS = [
    {
      id: "first-steps",
      title: "One microbatch",
      text:
        "Two ranks, one microbatch, forward and back. A stage waits for the one before it, a backward for the stage " +
        "after it: one rank works at a time.",
      reference: ["GPipe", { numRanks: 2, numMicrobatches: 1 }],
    },
    {
      id: "fill-and-drain",
      title: "Fill and drain",
      text:
        "The batch comes in three slices, and a backward takes twice as long as a forward. Keep rank 1 fed, and all " +
        "ranks have less to wait for. GPipe runs all forwards first.",
      reference: ["GPipe", { numRanks: 3, numMicrobatches: 3 }],
      costs: { backward: 2 },
    },
    {
      id: "less-memory",
      title: "As fast, in less memory",
      text:
        "A forward's activations are held until its backward. Rank s may now hold no more than P-s of them, as in 1F1B. " +
        "It costs no time: find the order.",
      reference: ["1F1B", { numRanks: 3, numMicrobatches: 4 }],
      costs: { backward: 2 },
      capped: true,
    },
    {
      id: "four-ranks",
      title: "Four ranks",
      text: "The same rule with one rank more. See which rank's row is a plain alternation, and where the bubble lies.",
      reference: ["1F1B", { numRanks: 4, numMicrobatches: 4 }],
      costs: { backward: 2 },
      capped: true,
    },
    {
      id: "latency",
      title: "Messages take time",
      text:
        "What a rank makes is on its way for one unit. 1F1B would wait for every message; with a larger cap a rank has " +
        "a forward to run meanwhile. The reference is eager 1F1B.",
      reference: ["eager-1F1B", { numRanks: 3, numMicrobatches: 5 }],
      costs: { backward: 2, latency: 1 },
      capped: true,
    },
    {
      id: "two-stages",
      title: "Two stages per rank",
      text:
        "Rank r holds stages r and r+2, each half as deep: a microbatch passes every rank twice, and the ramps are " +
        "half as long. The reference is interleaved 1F1B.",
      reference: ["Interleaved1F1B", { numRanks: 2, numMicrobatches: 4, stagesPerRank: 2 }],
      costs: { backward: 2 },
      finer: 2,
    },
    {
      id: "split-backward",
      title: "Split the backward",
      text:
        "A backward comes in two: I, the gradient of the input, which the previous stage waits for, and W, the gradient " +
        "of the weights, which nobody does. Fill gaps with W. Every rank may hold P forwards, until their W, as in ZB-H1.",
      reference: ["ZB-H1", { numRanks: 3, numMicrobatches: 4 }],
      capped: true,
    },
    {
      id: "zero-bubble",
      title: "Zero bubble",
      text:
        "With memory for 2P-1 forwards, no rank need ever wait between its first action and its last. The reference " +
        "is ZB-H2.",
      reference: ["ZB-H2", { numRanks: 2, numMicrobatches: 5 }],
      capped: true,
    },
    {
      id: "zero-bubble-v",
      title: "Zero bubble, in a V",
      text:
        "Rank r holds stages r and 2P-1-r, so that the last stage is where the first one is. ZB-V leaves no bubble " +
        "between a rank's first action and its last either, and a rank holds no more than 2P activations of its half-size " +
        "stages: 1F1B's memory.",
      reference: ["ZBVZeroBubble", { numRanks: 2, numMicrobatches: 3 }],
      finer: 2,
      capped: true,
    },
  ];

  const levels = LEVELS.map(({ id, title, text, reference: [name, options], costs = {}, finer = 1, capped = false }) => {
    const schedule = pplab.build(name, options);
    const timeline = pplab.simulate(schedule, pplab.costs(costs).finer(finer));
    const { makespan, peakInFlight, bubbleFraction, spanBubbleFraction } = timeline;
    return {
      id,
      title,
      text,
      numRanks: schedule.numRanks,
      numStages: schedule.numStages,
      numMicrobatches: schedule.numMicrobatches,
      placement: schedule.placement,
      costs: timeline.costs,
      inPython: `pp.simulate(mine${costs.latency ? `, pp.Costs(latency=${costs.latency})` : finer > 1 ? `, pp.Costs().finer(${finer})` : ""})`,
      kinds: [...new Set(timeline.spans.map(({ item }) => item.parts[0].kind))].sort(), // F, B or F, I, W
      numActions: timeline.spans.length,
      cap: capped ? peakInFlight : null,
      par: { makespan, peakInFlight, bubbleFraction, spanBubbleFraction },
      reference: schedule,
      referenceTimeline: timeline,
    };
  });

  /** The level of that id. */
  function level(id) {
    const found = levels.find((each) => each.id === id);
    if (!found) throw new pplab.ScheduleError(`no level ${id}: there are ${levels.map((each) => each.id).join(", ")}`);
    return found;
  }

  // ---- the state: what has been placed, and when it runs -----------------------------------------------------------

  /** Nothing placed yet. `spans` are as a timeline's: {id, rank, position, item, start, end}, in the order of moves. */
  const start = (level) => ({ level, moves: [], spans: [] });

  const rowOf = ({ spans }, rank) => spans.filter((span) => span.rank === rank);
  const spanOf = ({ spans }, text) => spans.find(({ item }) => item.text === text);
  const textOf = ({ stage, kind, microbatch }) => `${stage}${kind}${microbatch}`;
  const madeFor = (state, { stage, kinds, microbatch }) =>
    kinds.map((kind) => spanOf(state, textOf({ stage, kind, microbatch }))).find((span) => span !== undefined);

  /** The forwards whose activations a rank holds now, oldest first: until their B, or their W. */
  function held(state, rank) {
    const row = rowOf(state, rank).map(({ item }) => item.parts[0]);
    const over = new Set(row.filter(({ kind }) => kind === "B" || kind === "W").map((a) => `${a.stage},${a.microbatch}`));
    return row.filter(({ kind, stage, microbatch }) => kind === "F" && !over.has(`${stage},${microbatch}`));
  }

  // ---- the rules ---------------------------------------------------------------------------------------------------

  /** Why an action, given as text such as 0F3, can't come next on a rank: a sentence; null when it can. */
  function refusal(state, rank, text) {
    const { level } = state;
    let item;
    try {
      item = pplab.parse(text);
    } catch (error) {
      return `${error.message}.`;
    }
    const [action] = item.parts, { stage, kind, microbatch } = action;
    if (!Number.isInteger(rank) || rank < 0 || rank >= level.numRanks) {
      return `There is no rank ${rank}: this level has ranks 0 to ${level.numRanks - 1}.`;
    }
    if (stage >= level.numStages) return `There is no stage ${stage}: this level has stages 0 to ${level.numStages - 1}.`;
    if (microbatch >= level.numMicrobatches) {
      return `There is no microbatch ${microbatch}: this level has microbatches 0 to ${level.numMicrobatches - 1}.`;
    }
    if (!level.kinds.includes(kind) || item.parts.length > 1) {
      return `${item.text} is not for this level: its actions are ${level.kinds.join(", ")}.`;
    }
    const home = level.placement[stage];
    if (home !== rank) return `Stage ${stage} lives on rank ${home}: ${item.text} can't run on rank ${rank}.`;
    if (spanOf(state, item.text)) return `${item.text} is already placed.`;
    return unmet(state, action) || overfull(state, rank, action);
  }

  /** What an action still waits for, in a sentence; null when it is all placed. */
  function unmet(state, action) {
    const { level } = state, text = textOf(action);
    for (const need of pplab.needs(action, level.numStages).reverse()) {
      if (madeFor(state, need)) continue;
      const kind = need.kinds.find((each) => level.kinds.includes(each));
      const missing = textOf({ ...need, kind });
      if (need.stage === action.stage) return `${text} needs ${missing}: place that first.`;
      const makes = kind === "F" ? "the output of" : "the gradient from";
      return `${text} waits for ${makes} ${missing} on rank ${level.placement[need.stage]}: place that first.`;
    }
    return null;
  }

  /** Why a forward would exceed the memory cap, in a sentence; null when it doesn't. */
  function overfull(state, rank, { stage, kind, microbatch }) {
    const { cap, kinds } = state.level;
    if (kind !== "F" || cap === null) return null;
    const holds = held(state, rank);
    if (holds.length < cap[rank]) return null;
    const frees = kinds.includes("B") ? "B" : "W";
    const freed = textOf({ ...holds[0], kind: frees });
    const what = holds.length === 1 ? "1 forward's" : `${holds.length} forwards'`;
    return (
      `Memory cap: rank ${rank} already holds ${what} activations, as many as it may, and ` +
      `${textOf({ stage, kind, microbatch })} would be one more: a ${frees} such as ${freed} must come first.`
    );
  }

  // ---- moves -------------------------------------------------------------------------------------------------------

  /** Place an action on a rank: {state, refused}; a refused move leaves the state and says why. */
  function place(state, rank, text) {
    const refused = refusal(state, rank, text);
    if (refused) return { state, refused };
    const item = pplab.parse(text), { level } = state;
    const row = rowOf(state, rank);
    let begin = row.length ? row[row.length - 1].end : 0;
    for (const need of pplab.needs(item.parts[0], level.numStages)) {
      const made = madeFor(state, need);
      begin = Math.max(begin, made.end + (made.rank === rank ? 0 : level.costs.latency));
    }
    const [{ kind }] = item.parts;
    const end = begin + level.costs.of(kind);
    const span = { id: state.spans.length, rank, position: row.length, item, start: begin, end };
    return { state: { level, moves: [...state.moves, [rank, item.text]], spans: [...state.spans, span] }, refused: null };
  }

  /** Without the latest move. */
  const undo = ({ level, moves, spans }) => ({ level, moves: moves.slice(0, -1), spans: spans.slice(0, -1) });

  /** The state after `moves`, [rank, text] each; a refused one ends it. For what a page has stored. */
  function replay(level, moves) {
    let state = start(level);
    for (const [rank, text] of moves) {
      const next = place(state, rank, text);
      if (next.refused) break;
      state = next.state;
    }
    return state;
  }

  /** Everything that isn't placed yet, by rank, stage, microbatch and kind: {rank, text, refused}. */
  function remaining(state) {
    const { level } = state, found = [];
    for (let rank = 0; rank < level.numRanks; rank++) {
      level.placement.forEach((home, stage) => {
        for (let microbatch = 0; home === rank && microbatch < level.numMicrobatches; microbatch++) {
          for (const kind of ["F", "B", "I", "W"].filter((each) => level.kinds.includes(each))) {
            const text = textOf({ stage, kind, microbatch });
            if (!spanOf(state, text)) found.push({ rank, text, refused: refusal(state, rank, text) });
          }
        }
      });
    }
    return found;
  }

  const isComplete = ({ level, moves }) => moves.length === level.numActions;

  /** Whether nothing can be placed though something is left: only undo helps. */
  const isStuck = (state) => !isComplete(state) && remaining(state).every(({ refused }) => refused);

  /** A move that can be made now, the one that comes first in the reference; null when there is none. */
  function hint(state) {
    const byTime = [...state.level.referenceTimeline.spans].sort((a, b) => a.start - b.start || a.rank - b.rank);
    const next = byTime.find(({ rank, item }) => !refusal(state, rank, item.text));
    return next ? { rank: next.rank, text: next.item.text } : null;
  }

  // ---- the score ---------------------------------------------------------------------------------------------------

  /** What has been placed, as a schedule, which needs one action at least. */
  function schedule(state) {
    const rows = Array.from({ length: state.level.numRanks }, (_, rank) => rowOf(state, rank).map(({ item }) => item));
    return pplab.schedule(rows, `my ${state.level.title.toLowerCase()}`);
  }

  /** Text that `pplab.Schedule.from_csv` reads; "" while nothing is placed. */
  const toCSV = (state) => (state.moves.length ? pplab.toCSV(schedule(state)) : "");

  /** Per rank, the most forwards whose activations were held at once so far. */
  function peaks(state) {
    if (!state.moves.length) return Array(state.level.numRanks).fill(0);
    return pplab.peakInFlight(schedule(state)).map((peak) => Math.max(peak, 0)); // a rank without actions has none
  }

  /**
   * How good it is. `makespan`, `peakInFlight` and `spanBubbleFraction` (null until it is complete) are of what is
   * placed; `isFast`, `isLean`: complete, and no slower, in no rank's memory above the reference; `text` says it.
   */
  function score(state) {
    const { level } = state, { par } = level;
    const complete = isComplete(state);
    const timeline = complete ? pplab.simulate(schedule(state), level.costs) : null;
    const makespan = timeline ? timeline.makespan : state.spans.reduce((latest, { end }) => Math.max(latest, end), 0);
    const peakInFlight = peaks(state);
    const isFast = complete && makespan <= par.makespan + 1e-9;
    const isLean = complete && peakInFlight.every((peak, rank) => peak <= par.peakInFlight[rank]);
    const spanBubbleFraction = timeline && timeline.spanBubbleFraction;
    const figures = { isComplete: complete, makespan, peakInFlight, spanBubbleFraction, par, isFast, isLean };
    return { ...figures, text: verdict(state, figures) };
  }

  const short = (x) => String(Number(x.toPrecision(6)));

  function verdict({ level, moves }, { isComplete, makespan, peakInFlight, par, isFast, isLean }) {
    if (!isComplete) return `${moves.length} of ${level.numActions} actions are placed.`;
    const { name } = level.reference, difference = makespan - par.makespan;
    const than = `${short(makespan)}, and ${name}'s is ${short(par.makespan)}`;
    const time =
      Math.abs(difference) <= 1e-9
        ? `The makespan is ${short(makespan)}, as ${name}'s`
        : `The makespan is ${than}: ${short(Math.abs(difference))} ${difference > 0 ? "slower" : "faster"}`;
    if (isLean) return `${time}; no rank holds more than there${isFast ? "" : ". Look for a rank that waits"}.`;
    const rank = peakInFlight.findIndex((peak, r) => peak > par.peakInFlight[r]);
    return `${time}; rank ${rank} holds up to ${peakInFlight[rank]} forwards, and there ${par.peakInFlight[rank]}.`;
  }

  return {
    levels,
    level,
    start,
    place,
    undo,
    replay,
    remaining,
    held,
    isComplete,
    isStuck,
    hint,
    schedule,
    toCSV,
    score,
  };
})();
