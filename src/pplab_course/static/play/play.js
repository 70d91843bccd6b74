// The play mode: its levels and rules. A schedule is built by hand, action by action, and scored against a reference.
//
// Needs core.js and the levels (levels.py), adds `pplab.play`, knows nothing of a page. A state is a
// value: moves return a new one. Only what can run may be placed, so that no order ends in a deadlock. If a rank has no
// alternative, its next action runs by itself.

pplab.play = (() => {
  "use strict";

  const { needs, textOf, short, listed } = pplab;

  // ---- levels ------------------------------------------------------------------------------------------------------

  const NAMES = { naive: "the naive pipeline", Interleaved1F1B: "interleaved 1F1B", "eager-1F1B": "eager 1F1B", ZBVZeroBubble: "ZB-V" };
  const named = (name) => NAMES[name] || name;

  const inTray = (a, b) =>
    a.rank - b.rank || a.stage - b.stage || a.microbatch - b.microbatch || "FBIW".indexOf(a.kind) - "FBIW".indexOf(b.kind);

  // As the package tells them (levels.py), and what their references give.
  const levels = pplabLevels.map(({ reference: name, ...said }) => {
    const { numRanks, numMicrobatches, stagesPerRank, costs: { latency } } = said;
    const built = pplab.build(name, { numRanks, numMicrobatches, stagesPerRank });
    const schedule = Object.assign(built, { name: named(name) });
    const timeline = pplab.simulate(schedule, pplab.costs(said.costs).finer(stagesPerRank));
    const { makespan, peakInFlight, bubbleFraction, spanBubbleFraction } = timeline;
    return {
      ...said,
      numStages: schedule.numStages,
      placement: schedule.placement,
      costs: timeline.costs,
      inPython: `pp.simulate(mine${latency ? `, pp.Costs(latency=${latency})` : stagesPerRank > 1 ? `, pp.Costs().finer(${stagesPerRank})` : ""})`,
      kinds: [...new Set(timeline.spans.map(({ item }) => item.parts[0].kind))].sort(), // F, B or F, I, W
      actions: [...schedule.actions].sort(inTray),
      numActions: timeline.spans.length,
      par: { makespan, peakInFlight, bubbleFraction, spanBubbleFraction },
      reference: schedule,
      referenceTimeline: timeline,
    };
  });

  /** The level of that id; undefined where there is none. */
  const level = (id) => levels.find((each) => each.id === id);

  // ---- the state: what has been placed, and when it runs -----------------------------------------------------------

  /** Nothing placed yet. `hints` are the actions that a hint has named, as texts. */
  const start = (level, hints = []) => after({ level, hints }, []);

  /** The state after `moves`, [rank, text, isForced] each, and when what they placed runs: it can run, so it can be simulated. */
  function after({ level, hints }, moves) {
    const rows = level.par.peakInFlight.map((_, rank) => moves.filter(([on]) => on === rank).map(([, text]) => text));
    return { level, moves, hints, timeline: pplab.simulate(pplab.schedule(rows, "your schedule"), level.costs) };
  }

  /** When an action runs; undefined while it isn't placed. */
  const spanOf = ({ timeline: { spans, places } }, text) => spans[places.get(text)];

  /** The actions that aren't placed yet, by rank, stage, microbatch and kind. */
  const unplaced = (state) => state.level.actions.filter((each) => !spanOf(state, textOf(each)));

  /** What an action waits for: actions of the level. */
  const inputs = ({ kinds, numStages }, action) =>
    needs(action, numStages).map(({ kinds: any, ...need }) => ({ ...need, kind: any.find((each) => kinds.includes(each)) }));

  /** The forwards whose activations a rank holds now, oldest first: until their B, or their W. */
  function held(state, rank) {
    const row = state.timeline.byRank[rank].map(({ item }) => item.parts[0]);
    const over = new Set(row.filter(({ kind }) => kind === "B" || kind === "W").map((a) => `${a.stage},${a.microbatch}`));
    return row.filter(({ kind, stage, microbatch }) => kind === "F" && !over.has(`${stage},${microbatch}`));
  }

  // ---- the rules ---------------------------------------------------------------------------------------------------

  /** Why an action, given as text such as 0F3, can't come next on a rank: a sentence; null when it can. */
  function refusal(state, rank, text) {
    const action = state.level.actions.find((each) => each.rank === rank && textOf(each) === text);
    if (!action) return `Rank ${rank} has no ${text} in this level.`; // no button says so, but a browser may have stored it
    if (spanOf(state, text)) return `${text} is already placed.`;
    return unmet(state, action) || overfull(state, rank, action);
  }

  /** What an action still waits for, in a sentence; null when it is all placed. */
  function unmet(state, action) {
    const { level } = state, text = textOf(action);
    for (const need of inputs(level, action).reverse()) {
      const source = textOf(need);
      if (spanOf(state, source)) continue;
      if (need.stage === action.stage) return `${text} needs ${source}: place that first.`;
      const makes = need.kind === "F" ? "the output of" : "the gradient from";
      return `${text} waits for ${makes} ${source} on rank ${level.placement[need.stage]}: place that first.`;
    }
    return null;
  }

  /** Why a rank's memory has no room for a forward, and what has to run first, in sentences; null when it has room. */
  function overfull(state, rank, { stage, kind, microbatch }) {
    const { cap, kinds } = state.level;
    if (kind !== "F" || cap === null) return null;
    const holds = held(state, rank);
    if (holds.length < cap[rank]) return null;
    const first = missing(state, { ...holds[0], kind: kinds.includes("B") ? "B" : "W" });
    return (
      `Rank ${rank} has no memory left: it holds ${listed(holds.map(textOf))}. ` +
      `Before ${textOf({ stage, kind, microbatch })} fits, ${listed(first)} ${first.length > 1 ? "have" : "has"} to run.`
    );
  }

  /** What isn't placed of an action and of all that it waits for, as texts, in an order in which they can run. */
  function missing(state, action) {
    const before = inputs(state.level, action).flatMap((need) => (spanOf(state, textOf(need)) ? [] : missing(state, need)));
    return [...new Set([...before, textOf(action)])];
  }

  // ---- moves -------------------------------------------------------------------------------------------------------

  /** Place an action on a rank: {state, refused}; a refused move leaves the state and says why. */
  function place(state, rank, text, isForced = false) {
    const refused = refusal(state, rank, text);
    return { state: refused ? state : after(state, [...state.moves, [rank, text, isForced]]), refused };
  }

  /** What a rank may run next, now or once other ranks have gone on. */
  function candidates(state, rank) {
    const own = unplaced(state).filter((action) => action.rank === rank), texts = new Set(own.map(textOf));
    const isNext = (action) => missing(state, action).filter((text) => texts.has(text)).length === 1; // itself
    return own.filter((action) => isNext(action) && !overfull(state, rank, action));
  }

  /** The state after all actions to which their ranks have no alternative. Microbatches are alike, so which of them comes first
   *  isn't a choice. */
  function settle(state) {
    for (const rank of state.timeline.byRank.keys()) {
      const [first, ...others] = candidates(state, rank);
      if (!first || others.some(({ stage, kind }) => stage !== first.stage || kind !== first.kind)) continue;
      const { state: next, refused } = place(state, rank, textOf(first), true);
      if (!refused) return settle(next);
    }
    return state;
  }

  /** Without the latest choice, and what it forced. */
  const undo = (state) => after(state, state.moves.slice(0, Math.max(state.moves.findLastIndex(([, , isForced]) => !isForced), 0)));

  /** The state after `moves`, as a state has them; a refused one ends it. For what a page has stored. */
  function replay(level, moves, hints) {
    let state = start(level, hints);
    for (const [rank, text, isForced] of moves) {
      const next = place(state, rank, text, isForced);
      if (next.refused) break;
      state = next.state;
    }
    return state;
  }

  /** Everything that isn't placed yet, and why it can't come next, if it can't: {rank, text, refused}. */
  const remaining = (state) => unplaced(state).map((action) => {
    const { rank } = action, text = textOf(action);
    return { rank, text, refused: refusal(state, rank, text) };
  });

  /** The buttons of each rank, one for each stage and kind: the first action that can come next, or else the first that isn't
   *  placed, or else the last of all. */
  const slots = (state) => state.timeline.byRank.map((_, rank) => {
    const own = state.level.actions.filter((action) => action.rank === rank), left = unplaced(state);
    const isFirst = ({ stage, kind }, i) => own.findIndex((each) => each.stage === stage && each.kind === kind) === i;
    return own.filter(isFirst).map(({ stage, kind }) => {
      const alike = (each) => each.stage === stage && each.kind === kind, waiting = left.filter(alike);
      const next = waiting.find((each) => !refusal(state, rank, textOf(each))) || waiting[0];
      const action = next || own.findLast(alike), text = textOf(action);
      return { ...action, text, isOver: !next, refused: refusal(state, rank, text) };
    });
  });

  /** Whether nothing can be placed though something is left: only undo helps. */
  function isStuck(state) {
    const left = remaining(state);
    return left.length > 0 && left.every(({ refused }) => refused);
  }

  /** A move that can be made now, the one that comes first in the reference: {state, rank, text}, where the state knows
   *  that it was named; null when there is none. */
  function hint(state) {
    const byTime = [...state.level.referenceTimeline.spans].sort((a, b) => a.start - b.start || a.rank - b.rank);
    const next = byTime.find(({ rank, item }) => !refusal(state, rank, item.text));
    if (!next) return null;
    const { rank, item: { text } } = next;
    return { state: { ...state, hints: [...new Set([...state.hints, text])] }, rank, text };
  }

  // ---- the score ---------------------------------------------------------------------------------------------------

  /** Text that `lab.read_csv` reads; "" while nothing is placed. */
  const toCSV = (state) => (state.moves.length ? pplab.toCSV(state.timeline.schedule) : "");

  /** How good it is. `makespan` and `peakInFlight` are of what is placed; both bubbles are null until it is complete.
   *  `isSolved`: what was asked is reached; `isFound`: and not for the larger part by hints; `text` says it. */
  function score(state) {
    const { level } = state, { par } = level;
    const isComplete = state.moves.length === level.numActions;
    const { timeline } = state, { makespan, bubbleFraction, spanBubbleFraction } = timeline;
    const peakInFlight = timeline.peakInFlight.map((peak) => Math.max(peak, 0)); // a rank without actions has none
    const isStraight = !level.isAboutSpan || spanBubbleFraction <= par.spanBubbleFraction + 1e-9;
    const isSolved = isComplete && makespan <= par.makespan + 1e-9 && isStraight;
    const isFound = isSolved && 2 * state.hints.length <= numChosen(state);
    const bubbles = isComplete ? { bubbleFraction, spanBubbleFraction } : { bubbleFraction: null, spanBubbleFraction: null };
    const figures = { isComplete, makespan, peakInFlight, ...bubbles, par, isSolved, isFound };
    return { ...figures, text: isSolved ? found(state, figures) : verdict(state, figures) };
  }

  const numChosen = ({ moves }) => moves.filter(([, , isForced]) => !isForced).length;

  /** What is still to do, or what the order misses. */
  function verdict({ level, moves }, { isComplete, makespan, par }) {
    if (!isComplete) return `${moves.length} of ${level.numActions} actions are placed.`;
    const late = makespan - par.makespan;
    if (late <= 1e-9) return `Your order takes ${short(makespan)}, but a rank waits between its first action and its last.`;
    const asked = level.isBefore ? `and it can be done in ${short(par.makespan)}` : `which is ${short(late)} more than asked`;
    return `Your order takes ${short(makespan)}, ${asked}. ${tooLate(level, moves, par)}`;
  }

  /** From which move on what is asked was certainly out of reach. The move that lost the time may be an earlier one. */
  function tooLate(level, moves, par) {
    let state = start(level);
    for (const [rank, text] of moves) {
      state = place(state, rank, text).state;
      if (least(state) <= par.makespan + 1e-9) continue;
      const { start: begin, end } = spanOf(state, text);
      return `Once ${text} ran on rank ${rank} from ${short(begin)} to ${short(end)}, ${short(par.makespan)} was out of reach: take back moves to there, or a few more.`;
    }
    return "";
  }

  /** No order of what isn't placed yet ends before this. On each rank, what is left can't begin before its inputs are
   *  there, takes its time, and after it comes the way from its last action to the end; memory is left out. */
  function least(state) {
    const { level, timeline: { byRank, makespan } } = state, { costs, placement } = level, left = unplaced(state);
    const [ready, rest] = [new Map(), new Map(left.map((action) => [textOf(action), 0]))];
    const wire = (need, action) => (placement[need.stage] === placement[action.stage] ? 0 : costs.latency);
    const readyAt = (action) => {
      const text = textOf(action), done = spanOf(state, text);
      if (done) return done.start;
      if (!ready.has(text)) {
        const row = byRank[placement[action.stage]];
        const times = inputs(level, action).map((need) => readyAt(need) + costs.of(need.kind) + wire(need, action));
        ready.set(text, Math.max(row.length ? row[row.length - 1].end : 0, ...times));
      }
      return ready.get(text);
    };
    left.sort((a, b) => readyAt(b) - readyAt(a)); // what comes last is first: its way to the end is known
    for (const action of left) {
      for (const need of inputs(level, action)) {
        const after = wire(need, action) + costs.of(action.kind) + rest.get(textOf(action));
        if (rest.has(textOf(need))) rest.set(textOf(need), Math.max(rest.get(textOf(need)), after));
      }
    }
    let bound = makespan;
    byRank.forEach((_, rank) => {
      let [work, way] = [0, Infinity];
      for (const action of left.filter((each) => each.rank === rank)) {
        work += costs.of(action.kind);
        way = Math.min(way, rest.get(textOf(action)));
        bound = Math.max(bound, readyAt(action) + work + way);
      }
    });
    return bound;
  }

  /** What the player found, what it is called, how it compares, and how many hints it took. */
  function found(state, { makespan, peakInFlight, par, isFound }) {
    const { level, hints } = state, built = recognized(state), reference = level.reference.name;
    const who = built ? `You built ${built}.` : `You built an order of your own; a known one is ${reference}.`;
    const isSame = built === reference;
    const memory = isSame ? `, and its ranks hold ${listed(peakInFlight.map(String))} forwards at most`
      : `; your ranks hold ${listed(peakInFlight.map(String))} forwards at most, and those of ${reference} ${listed(par.peakInFlight.map(String))}`;
    const time = `Your order takes ${short(makespan)}${isSame ? "" : `, as ${reference} does`}${level.cap ? memory : ""}.`;
    const count = hints.length === 1 ? "1 hint" : `${hints.length || "no"} hints`;
    const help = isFound ? `You took ${count} in this try.`
      : `You took ${count}, for more than half of your choices, so this doesn't count as found. Start again to find it yourself.`;
    return `${who} ${time} ${level.end} ${help}`;
  }

  /** The name of the schedule that has these very rows; null when none has. */
  function recognized(state) {
    const { level } = state, csv = toCSV(state);
    const { numRanks, numMicrobatches, numStages, reference, costs } = level;
    const names = pplab.schedules.map(({ name }) => name).filter((name) => pplab.builders[name]);
    const has = (name) => {
      try {
        return pplab.toCSV(pplab.build(name, { numRanks, numMicrobatches, stagesPerRank: numStages / numRanks, costs })) === csv;
      } catch {
        return false; // it can't be built in this size
      }
    };
    const name = pplab.toCSV(reference) === csv ? reference.name : names.find(has);
    return name ? named(name) : null;
  }

  return { levels, level, start, place, undo, replay, spanOf, remaining, held, slots, settle, isStuck, hint, least, toCSV, score };
})();
