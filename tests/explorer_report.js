// What the page says of configurations, rows and spans: everything that the package says, too.

var level, state, made; // of a game; only var and function outlive a call in every engine

function camelled(given) {
  const camel = (name) => name.replace(/_(.)/g, (_, letter) => letter.toUpperCase());
  return Object.fromEntries(Object.entries(given).map(([name, value]) => [camel(name), value]));
}

/** Where and why a call throws; null when it doesn't. `isThere`: the place that it names holds the action. */
function refused(call, rows = null) {
  try {
    call();
    return null;
  } catch (error) {
    if (!(error instanceof pplab.ScheduleError)) throw error;
    const { message, rank, action, position } = error;
    const isThere = position === null || rows === null || rows[rank][position].includes(action);
    return { message, rank, action, isThere };
  }
}

function report({ name, costs: given, ...options }) {
  const costs = pplab.costs(camelled(given));
  try {
    return reportOf(pplab.build(name, { ...camelled(options), costs }), costs);
  } catch (error) {
    if (!(error instanceof pplab.ScheduleError)) throw error;
    return { error: error.message };
  }
}

function reportOf(schedule, costs) {
  const timeline = pplab.simulate(schedule, costs);
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
