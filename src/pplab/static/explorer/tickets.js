// Microbatches as tickets that ride a loop through the ranks: pplab_course's pictures.tickets, at any moment of a timeline.

var pplabTickets = (() => {
  "use strict";

  const { FILL, ink, itemOf } = pplabChart;
  const WIDTH = 350, ROW = 74, HIGH = 34, TOP = 40, DOWN = 150, UP = 250, RADIUS = 11, STEP = 2 * RADIUS + 2;
  const WAITS = "#d5d8dd", ROOM = 4; // for those that wait for a ticket

  /** Why a schedule has no tickets; "" if it has. */
  const refusal = ({ schedule: { numStages, numRanks }, costs, spans }) =>
    costs && numStages === numRanks && spans.every(({ item: { parts } }) => parts.length === 1 && "FB".includes(parts[0].kind))
      ? "" : "Tickets are drawn of schedules with one stage per rank and backwards in one piece.";

  /** Draw the loop of `drawing`'s first chart into `host`. Returns what shows a moment. */
  function draw(host, { charts: [chart], id }) {
    const { timeline } = chart, { numRanks, numMicrobatches } = timeline.schedule;
    const middle = (rank) => TOP + rank * ROW + HIGH / 2;
    const stations = Array.from({ length: numRanks }, (_, rank) => {
      const y = middle(rank) - HIGH / 2;
      const wires = [[DOWN, "F"], [UP, "B"]].map(([x, kind]) => `<path class="pplab-wire" stroke="${FILL[kind]}" d="M${x} ${y + HIGH}v${ROW - HIGH}"/>`);
      return `<rect x="${DOWN - 26}" y="${y}" width="${UP - DOWN + 52}" height="${HIGH}"/><text x="${UP + 35}" y="${y + 21}"></text>` +
        (rank < numRanks - 1 ? wires.join("") : turn(y + HIGH, DOWN, UP, 22));
    });
    const tickets = Array.from({ length: numMicrobatches }, (_, m) => `<g class="pplab-ticket"><circle r="${RADIUS}"/><text y="4">${m}</text></g>`);
    host.innerHTML =
      `<svg role="img" viewBox="0 0 ${WIDTH} ${middle(numRanks - 1) + HIGH / 2 + 40}">${stations.join("")}${turn(TOP, UP, DOWN, -22)}` +
      `<path class="pplab-gate" d="M${DOWN - 35} ${TOP - 5}v${HIGH + 10}"/><text x="${DOWN + 50}" y="10" text-anchor="middle">` +
      `${timeline.peakInFlight[0]} tickets</text><text x="${DOWN - 52 - STEP * (ROOM - 1)}" y="${middle(0) + 4}" text-anchor="middle"></text><text x="${WIDTH}" y="10" text-anchor="end"></text>${tickets.join("")}</svg>`;
    const svg = host.firstChild, [, waiting, done] = svg.querySelectorAll(":scope > text:not(rect + text)");
    const boxes = [...svg.querySelectorAll("rect")], circles = [...svg.querySelectorAll(".pplab-ticket")];
    const trips = circles.map((_, m) => timeline.spans.filter(({ item }) => item.parts[0].microbatch === m).sort((a, b) => a.start - b.start));

    return (time) => {
      const placed = trips.map((trip) => place(timeline, trip, time)), met = new Map();
      const queue = placed.filter((where) => where === "waits").length, shown = queue > ROOM ? ROOM - 1 : queue;
      circles.forEach((circle, m) => {
        const where = placed[m] && spot(placed[m], middle, numRanks);
        const key = where && `${where.x} ${where.y}`, nth = met.get(key) || 0;
        met.set(key, nth + 1);
        circle.style.opacity = where && (placed[m] !== "waits" || nth < shown) ? 1 : 0;
        if (!where) return;
        circle.style.transform = `translate(${where.x + where.side * STEP * Math.min(nth, ROOM)}px, ${where.y}px)`;
        circle.firstChild.style.fill = where.fill;
        circle.lastChild.style.fill = ink(where.fill);
      });
      const idle = boxes.map((box, rank) => {
        const part = itemOf(chart, rank, time)?.idle?.part || (time < timeline.makespan ? "" : "drain");
        box.style.fill = part ? `url(#${id}-${part})` : "";
        box.nextSibling.textContent = `rank ${rank}${part && ", idle"}`;
        return part;
      });
      waiting.textContent = queue > shown ? `+${queue - shown}` : "";
      done.textContent = `${placed.filter((where) => where === null).length} done`;
      svg.ariaLabel = `A loop through ${numRanks} ranks: rank 0 admits at most ${timeline.peakInFlight[0]} microbatches; ` +
        `${placed.filter((where) => where?.rank >= 0).length} ride, ${queue} wait in front of it, ${done.textContent}; ` +
        `${idle.filter((part) => !part).length} of ${numRanks} ranks work`;
    };
  }

  const turn = (y, from, to, rise) => `<path class="pplab-turn" d="M${from} ${y}C${from} ${y + rise} ${to} ${y + rise} ${to} ${y}"/>`;

  /** Where a microbatch is: "waits" before its first action, null after its last, or at work or on the way to a rank. */
  function place({ costs: { latency } }, trip, time) {
    const next = trip.findIndex(({ end }) => time < end);
    if (next < 0) return null;
    const { rank, start, item: { parts: [{ kind }] } } = trip[next], before = trip[next - 1];
    if (time >= start) return { rank, kind, works: true };
    if (!before) return "waits";
    return { rank, kind, share: before.rank !== rank && latency ? Math.min((time - before.end) / latency, 1) : 1 };
  }

  function spot(where, middle, numRanks) {
    if (where === "waits") return { x: DOWN - 52, y: middle(0), side: -1, fill: WAITS };
    const { rank, kind, works, share } = where;
    const side = kind === "F" ? -1 : 1, x = kind === "F" ? DOWN : UP, fill = FILL[kind];
    if (works) return { x, y: middle(rank), side, fill };
    if (kind !== "F" && rank === numRanks - 1) return { x: (DOWN + UP) / 2, y: middle(rank) + HIGH / 2 + 21, side, fill };
    const there = middle(rank) + side * (HIGH / 2 + RADIUS + 1);
    return { x, y: there + side * (1 - share) * (ROW - HIGH - 2 * RADIUS - 2), side, fill };
  }

  return { refusal, draw };
})();
