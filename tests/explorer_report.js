// What the page says of configurations, rows and spans: everything that the package says, too.

var level, state, found, kept; // of a game, and the page while a test has another; only var and function outlive a call in every engine

if (typeof URLSearchParams === "undefined") { // an engine alone has none; the page's addresses need no more
  globalThis.URLSearchParams = class {
    constructor(text) {
      this.pairs = text.split("&").filter(Boolean).map((pair) => pair.split("=").map(decodeURIComponent));
    }
    [Symbol.iterator]() {
      return this.pairs[Symbol.iterator]();
    }
  };
}

function textsOf({ rows }) {
  return rows.map((row) => row.map(({ text }) => text));
}

function camelled(given) {
  const camel = (name) => name.replace(/_(.)/g, (_, letter) => letter.toUpperCase());
  return Object.fromEntries(Object.entries(given).map(([name, value]) => [camel(name), value]));
}

/** Why a call throws; null when it doesn't. */
function refused(call) {
  try {
    call();
    return null;
  } catch (error) {
    if (!(error instanceof pplab.ScheduleError)) throw error;
    return error.message;
  }
}

function report({ name, costs: given, ...options }) {
  let said;
  const error = refused(() => {
    const costs = pplab.costs(camelled(given));
    said = reportOf(pplab.simulate(pplab.build(name, { ...camelled(options), costs }), costs));
  });
  return error === null ? said : { error };
}

function reportOf(timeline) {
  const { schedule } = timeline;
  const { numRanks, numStages, numMicrobatches, placement } = schedule;
  return {
    csv: pplab.toCSV(schedule),
    sizes: [numRanks, numStages, numMicrobatches, pplab.copies(schedule), pplab.numMessages(schedule)],
    placement,
    times: timeline.byRank.map((row) => row.flatMap(({ start, end }) => [start, end])),
    figures: [timeline.makespan, timeline.bubbleFraction, timeline.bubbleRatio, timeline.spanBubbleFraction],
    peaks: timeline.peakInFlight,
    busy: timeline.busy,
    held: schedule.rows.map((_, rank) => pplab.inFlight(timeline, rank)),
    path: pplab.criticalPath(timeline).map(({ rank, item, start }) => [rank, item.text, start]),
    idle: pplab.idle(timeline).map(({ rank, start, end, part, waitsFor = null, for: span, until = null }) =>
      [rank, start, end, part, waitsFor, span && span.rank, until]),
  };
}

/** Per item its text, the texts of what needs it, and what it waits for. */
function waitsOf(rows, latency) {
  const timeline = pplab.simulate(pplab.schedule(rows), pplab.costs({ latency }));
  return timeline.spans.map((span) => [
    span.item.text,
    pplab.neededBy(timeline, span).map(({ item }) => item.text),
    pplab.waitsFor(timeline, span).map(({ span: { item }, arrives, how }) => [item.text, arrives, how]),
  ]);
}
