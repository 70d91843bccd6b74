// Gantt charts of timelines as SVG, in the look of pplab.plot: colour is kind, number is microbatch, a lighter shade is a
// later stage of the rank, hatched is idle. One drawing holds one or more charts on one time axis.
//
// Bars of one colour are one path, and what lies under the pointer is computed: a chart of thousands of actions is some
// hundred elements, and drawn anew in milliseconds. What the drawings say in words is here, too.

var pplabChart = (() => {
  "use strict";

  // ---- the package's palette (the page's test compares) ------------------------------------------------------------

  const FILL = { F: "#2f6db5", B: "#f0a13a", I: "#cf3131", W: "#a9dbc0" };
  const NAME = { F: "forward", B: "backward", I: "input gradient", W: "weight gradient" };
  const IDLE_OPACITY = [0.2, 0.75]; // ground and hatching, in the page's colour of text
  const OTHER = "#7f6e90"; // the optimizer, barriers: what isn't an action of the schedule
  const PHASE = { fill: "idle: filling", wait: "idle: inside", drain: "idle: draining", stuck: "stuck" };

  const channels = (colour) => [1, 3, 5].map((i) => parseInt(colour.slice(i, i + 2), 16));

  /** `colour` mixed with white, for the stage `step` of `steps` on a rank: the first keeps the full colour. */
  function shade(colour, step, steps) {
    const share = (0.33 * step) / Math.max(steps - 1, 1);
    return "#" + channels(colour).map((c) => toEven(c + (255 - c) * share).toString(16).padStart(2, "0")).join("");
  }

  /** Python's round: a half goes to the even neighbour. */
  function toEven(x) {
    const low = Math.floor(x);
    return x - low === 0.5 ? low + (low % 2) : Math.round(x);
  }

  /** Black or white, whichever has the higher contrast on `fill`. */
  function ink(fill) {
    const linear = channels(fill).map((c) => (c / 255 <= 0.03928 ? c / 255 / 12.92 : ((c / 255 + 0.055) / 1.055) ** 2.4));
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2] < 0.179 ? "#ffffff" : "#111111";
  }

  // ---- words -------------------------------------------------------------------------------------------------------

  const { short, listed } = pplab;
  const percent = (x) => `${(100 * x).toFixed(1)}\u00a0%`;
  const escaped = (text) => String(text).replace(/[&<>"]/g, (c) => ({ "&": "&amp;", "<": "&lt;", ">": "&gt;", '"': "&quot;" })[c]);
  const long = ({ kind, microbatch, stage }) => `${NAME[kind]} of microbatch ${microbatch} on stage ${stage}`;

  const timed = (x, { unit }, digits = 6) => short(x, digits) + (unit ? ` ${unit}` : "");

  /** A chart in one sentence, for readers who don't see it: pplab.plot.describe. */
  function describe(timeline) {
    const { schedule, makespan, bubbleFraction, how = "simulated" } = timeline;
    return (
      `${how.slice(0, 1).toUpperCase()}${how.slice(1)} Gantt chart of ${schedule.name} on ${schedule.numRanks} ranks with ${schedule.numMicrobatches} ` +
      `microbatches: makespan ${timed(makespan, timeline)}, ${percent(bubbleFraction)} of all rank-time idle`
    );
  }

  /** What an action is, what it waits for and what waits for it. */
  function tellAction(timeline, span) {
    const { costs } = timeline; // of a measured timeline, nobody knows when messages arrived
    const took = costs ? "" : `: it takes ${timed(span.end - span.start, timeline, 4)}`;
    const says = [
      `${span.item.text}, the ${span.item.parts.map(long).join(" together with the ")}, runs on rank ${span.rank} ` +
        `from ${short(span.start)} to ${short(span.end)}${took}.`,
    ];
    const waits = pplab.waitsFor(timeline, span);
    const come = {
      message: (s, t) => `the result of ${s.item.text}, which ${costs ? "arrives from" : "ends on"} rank ${s.rank} at ${t}`,
      local: (s, t) => `the result of ${s.item.text}, which this rank has itself at ${t}`,
      kept: (s, t) => `what its stage kept of ${s.item.text}, which ends at ${t}`,
      order: (s, t) => `a free rank, which it has when ${s.item.text} ends at ${t}`,
    };
    const each = waits.map(({ span: made, arrives, how }) => come[how](made, short(arrives)));
    says.push(waits.length ? `It needs ${each.join("; it needs ")}.` : "It waits for nothing.");
    const last = waits.reduce((a, b) => (!a || b.arrives > a.arrives ? b : a), null);
    if (waits.length > 1 && last.arrives === span.start) {
      const decisive = waits.filter((w) => w.arrives === last.arrives).map((w) => w.span.item.text);
      says.push(`${listed(decisive)} ${decisive.length > 1 ? "decide" : "decides"} when it starts.`);
    }
    const users = pplab.neededBy(timeline, span);
    const where = (s) => `${s.item.text} ${s.rank === span.rank ? "on this rank" : `on rank ${s.rank}`}`;
    says.push(users.length ? `${listed(users.map(where))} ${users.length > 1 ? "need" : "needs"} it.` : "Nothing waits for it.");
    return says.join(" ");
  }

  /** Why a rank idles. */
  function tellIdle({ rank, start, end, text, part }) {
    if (part === "stuck") return `Rank ${rank} is stuck from ${short(start)} on: ${text}.`;
    if (part === "other") return `Rank ${rank} is busy with something else from ${short(start)} to ${short(end)}: ${text}.`;
    return `Rank ${rank} is idle from ${short(start)} to ${short(end)}: ${text}.`;
  }

  // ---- views -------------------------------------------------------------------------------------------------------

  let views = 0; // of the page: labels need ids that no other has

  /** The element in which a view lives, which its template says (frames.py); `data-open`: the page of its own. */
  function begin(root) {
    const live = document.createElement("div");
    live.className = "pplab-live";
    live.innerHTML = document.getElementById(`${root.className}-live`).innerHTML.replaceAll("@", `pplab-view-${++views}`);
    const open = live.querySelector(".pplab-open");
    if (root.dataset.open) open.href = root.dataset.open;
    else open.remove();
    root.append(live);
    return live;
  }

  // ---- drawing -----------------------------------------------------------------------------------------------------

  const LABELS = 58, ROW = 28, BAR = 24, STRIP = 15, TALL = 24, TITLE = 26, BETWEEN = 10, AXIS = 40, RIGHT = 14; // pixels
  const FONT = 11, SMALL = 9.5;
  const FLIGHT = 1 / 60; // of the whole time: so long a message is seen, if it doesn't take longer

  const px = (x) => Math.round(x * 10) / 10;
  const box = (x, y, width, height) => `M${px(x)} ${px(y)}h${px(width)}v${px(height)}h${-px(width)}z`;

  let drawings = 0; // patterns need ids that no other drawing of the page has

  /** Draw `timelines` one above the other into `host`, a scrolling box, and return the drawing: what lies where, and
   *  `select` to mark an action or an idle interval. `until`: where the time axis ends, at least. `par`: a time to mark;
   *  `caps`: per rank, how many forwards it has memory for, a line in its strip. At a `zoom` of 1 the whole fits the width. */
  function draw(host, timelines, { width, until = 0, zoom = 1, path = false, memory = true, par = null, caps = null }) {
    const last = Math.max(...timelines.map((t) => t.end || t.makespan)), end = Math.max(until, last);
    const [unit = "", ...more] = new Set(timelines.map((t) => t.unit || ""));
    const id = `pplab-${++drawings}`;
    const inner = Math.max(width - LABELS - RIGHT, 1) * zoom;
    const scale = (inner - 1) / end;
    const strip = caps ? TALL : STRIP, row = ROW + (memory ? strip + 3 : 0);
    let y = 0;
    const charts = timelines.map((timeline, index) => {
      const top = y + TITLE;
      y = top + timeline.schedule.numRanks * row + BETWEEN;
      const longest = path ? pplab.criticalPath(timeline) : [];
      return { timeline, index, top, row, idle: idleOf(timeline), path: longest, bottom: y - BETWEEN };
    });
    const most = Math.max(...timelines.map((t) => Math.max(...t.peakInFlight, ...(caps || [])) * fullStages(t)));
    const height = y - BETWEEN + AXIS;
    const drawing = { charts, scale, row, strip, caps, x: (time) => time * scale, host, id, inner, end: last };
    const body = charts.map((chart) => drawIdle(drawing, chart, id) + drawBars(drawing, chart, end) +
      (memory ? drawMemory(drawing, chart, most, end) : "") + (path ? drawPath(drawing, chart) : ""));
    const alt = escaped(timelines.map((t) => t.title || describe(t)).join(". "));
    host.innerHTML =
      `<svg class="pplab-ranks" aria-hidden="true" width="${LABELS}" height="${height}">${charts.map((c) => labels(c, memory && strip, caps)).join("")}</svg>` +
      `<svg class="pplab-gantt" role="img" aria-label="${alt}" width="${Math.ceil(inner + RIGHT)}" height="${height}">` +
      patterns(id) + body.join("") + axis(charts[charts.length - 1].bottom, end, scale, inner, more.length ? "" : unit) +
      (par === null ? "" : `<path class="pplab-par" d="M${px(par * scale)} ${TITLE - 4}V${charts[0].bottom + 4}"/>`) +
      `<g class="pplab-now"></g><g class="pplab-marks"></g></svg>`;
    drawing.svg = host.lastElementChild;
    const ranks = charts.flatMap(({ timeline }) => timeline.byRank.map((_, rank) => ({ timeline, rank })));
    drawing.peaks = [...host.querySelectorAll(".pplab-peak")].map((text, i) => ({ text, whole: text.textContent, ...ranks[i] }));
    drawing.marks = drawing.svg.lastElementChild;
    drawing.at = (x, y) => itemAt(drawing, x, y);
    drawing.select = (selected) => select(drawing, selected);
    drawing.step = (selected, key) => step(drawing, selected, key);
    drawing.show = (time) => show(drawing, time);
    return drawing;
  }

  /** A timeline's idle intervals: its own, if it isn't a simulation of a whole schedule and says them itself. */
  const idleOf = (timeline) => timeline.idle || pplab.idle(timeline);

  /** A stage's activations in units of a rank's share of the model and a whole microbatch: strips of schedules compare. */
  const fullStages = ({ schedule: { numRanks, numStages, slices = 1 } }) => numRanks / numStages / slices;

  function patterns(id) {
    const down = "M-1 -1L9 9M-1 7L1 9M7 -1L9 1", level = "M0 2.8H8"; // five to a row
    const lines = { fill: [down, 8], wait: [level, 5.6], drain: ["M9 -1L-1 9M1 -1L-1 1M9 7L7 9", 8] };
    const [ground, line] = IDLE_OPACITY;
    const hatch = Object.entries(lines).map(
      ([part, [d, height]]) =>
        `<pattern id="${id}-${part}" width="8" height="${height}" patternUnits="userSpaceOnUse" fill="none" stroke="none">` +
        `<path d="M0 0H8V${height}H0z" fill="currentColor" fill-opacity="${ground}"/>` +
        `<path d="${d}" stroke="currentColor" stroke-width="1.3" stroke-opacity="${line}"/></pattern>`,
    );
    return (
      `<defs>${hatch.join("")}<marker id="${id}-arrow" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="6" markerHeight="6" ` +
      `orient="auto"><path d="M0 0L8 4L0 8z" fill="currentColor"/></marker></defs>`
    );
  }

  function labels({ timeline, top, row }, strip, caps) {
    const { schedule, peakInFlight } = timeline;
    const rows = peakInFlight.map((peak, rank) => {
      const middle = top + rank * row + ROW / 2;
      const most = caps ? `/${caps[rank]}` : "";
      const held = strip ? `<text class="pplab-peak" x="${LABELS - 6}" y="${middle + ROW / 2 + strip - 4}">peak ${peak}${most}</text>` : "";
      return `<text x="${LABELS - 6}" y="${middle + 4}">rank ${rank}</text>${held}`;
    });
    const figures = () => `makespan ${timed(timeline.makespan, timeline, 5)}, bubble fraction ${timeline.bubbleFraction.toFixed(4)}`;
    const says = timeline.title || `${schedule.name}${timeline.how ? `, ${timeline.how}` : ""}: ${figures()}`;
    return `<text class="pplab-title" x="2" y="${top - 8}">${escaped(says)}</text>${rows.join("")}`;
  }

  function axis(y, end, scale, inner, unit) {
    const step = niceStep((end * 56) / (end * scale));
    const ticks = [];
    for (let i = 0; i * step <= end * (1 + 1e-9); i++) {
      const x = px(i * step * scale);
      const anchor = i === 0 ? ' text-anchor="start"' : "";
      ticks.push(`<path d="M${x} ${y + 4}v4" stroke="currentColor"/><text x="${x}" y="${y + 20}"${anchor}>${short(i * step)}</text>`);
    }
    return (
      `<g class="pplab-axis"><path d="M0 ${y + 4}H${px(inner)}" stroke="currentColor"/>${ticks.join("")}` +
      `<text x="${px(inner / 2)}" y="${y + 35}">time${unit && ` (${escaped(unit)})`}</text></g>`
    );
  }

  /** 1, 2 or 5 times a power of ten, at least `least`. */
  function niceStep(least) {
    const power = 10 ** Math.floor(Math.log10(least));
    return [1, 2, 5, 10].map((x) => x * power).find((x) => x >= least * (1 - 1e-9));
  }

  const barTop = ({ top, row }, rank) => top + rank * row + (ROW - BAR) / 2;

  function drawIdle({ x, scale }, chart, id) {
    const paths = { fill: "", wait: "", drain: "", stuck: "", other: "" };
    let at = "";
    for (const { rank, start, end, part, at: item } of chart.idle) {
      paths[part] += box(x(start), barTop(chart, rank), (end - start) * scale, BAR);
      if (part === "stuck") at += `<text x="${px(x(start) + 4)}" y="${barTop(chart, rank) + BAR / 2 + 4}">${escaped(item)}?</text>`;
    }
    const { stuck, other, ...hatched } = paths;
    const drawn = Object.entries(hatched).map(([part, d]) => d && `<path d="${d}" fill="url(#${id}-${part})"/>`);
    if (stuck) drawn.push(`<g class="pplab-stuck"><path d="${stuck}"/>${at}</g>`);
    return drawn.join("") + (other && `<path d="${other}" fill="${OTHER}"/>`);
  }

  /** One path per colour; an overlap shows its first action in the upper half, its second in the lower. */
  function drawBars({ x, scale }, chart) {
    const bars = new Map(), texts = { "#ffffff": "", "#111111": "" };
    chart.timeline.byRank.forEach((row, rank) => {
      const stages = [...new Set(row.flatMap(({ item }) => item.parts.map((part) => part.stage)))].sort((a, b) => a - b);
      const fills = new Map();
      for (const kind of "FBIW") stages.forEach((stage, i) => fills.set(kind + stage, shade(FILL[kind], i, stages.length)));
      for (const { item, start, end } of row) {
        const length = (end - start) * scale;
        if (length <= 0) continue;
        const drawn = length - Math.min(1, length / 4), height = BAR / item.parts.length;
        const size = item.parts.length > 1 ? SMALL : FONT;
        item.parts.forEach(({ kind, stage, microbatch }, half) => {
          const fill = fills.get(kind + stage), top = barTop(chart, rank) + half * height, label = String(microbatch);
          bars.set(fill, (bars.get(fill) || "") + box(x(start), top, drawn, height));
          if (drawn < label.length * size * 0.62 + 1) return;
          const small = size === SMALL ? ` font-size="${SMALL}"` : "";
          texts[ink(fill)] += `<text x="${px(x(start) + drawn / 2)}" y="${px(top + height / 2 + size * 0.36)}"${small}>${label}</text>`;
        });
      }
    });
    const paths = [...bars].map(([fill, d]) => `<path d="${d}" fill="${fill}"/>`).join("");
    const groups = Object.entries(texts).map(([fill, all]) => all && `<g class="pplab-numbers" fill="${fill}">${all}</g>`);
    return paths + groups.join("");
  }

  /** Forwards whose activations are held, a strip under each rank; one scale for all ranks and charts. */
  function drawMemory({ x, strip, caps }, chart, most, end) {
    const { timeline, top, row } = chart, room = caps ? strip - 5 : strip; // so that the line keeps off the bars
    const unit = (room * fullStages(timeline)) / most;
    let d = "", lines = "";
    for (let rank = 0; rank < timeline.schedule.numRanks; rank++) {
      const base = top + rank * row + ROW + strip;
      d += `M0 ${px(base)}`;
      for (const [time, count] of pplab.inFlight(timeline, rank)) d += `H${px(x(time))}V${px(base - count * unit)}`;
      d += `H${px(x(timeline.makespan))}V${px(base)}z`;
      if (caps) lines += `M0 ${px(base - caps[rank] * unit)}H${px(x(end))}`;
    }
    return `<path class="pplab-memory" d="${d}" fill="${FILL.F}"/>${lines && `<path class="pplab-cap" d="${lines}"/>`}`;
  }

  function drawPath({ x, scale }, chart) {
    const outline = ({ rank, start, end }) => box(x(start), barTop(chart, rank), (end - start) * scale, BAR);
    const narrowest = Math.min(...chart.path.map(({ start, end }) => (end - start) * scale).filter((length) => length > 0));
    const stroke = px(Math.max(0.8, Math.min(2, narrowest / 5))); // so that thin bars keep their colour
    return `<path class="pplab-path" stroke-width="${stroke}" d="${chart.path.map(outline).join("")}"/>`;
  }

  // ---- a moment ----------------------------------------------------------------------------------------------------

  /** Draw up to `time`: the rest is covered, messages under way are dots, and ranks say what they hold. At the end, all. */
  function show({ charts, x, inner, end, svg, peaks }, time) {
    const isWhole = time >= end, at = px(x(time)), { top } = charts[0], { bottom } = charts[charts.length - 1];
    const dots = isWhole ? [] : charts.flatMap((chart) => messages(chart, end * FLIGHT).filter(({ from, to }) => from <= time && time < to)
      .map(({ from, to, rank, next, kind }) => {
        const y = barTop(chart, rank + ((next - rank) * (time - from)) / (to - from)) + BAR / 2;
        return `<circle cx="${at}" cy="${px(y)}" r="5" fill="${FILL[kind]}"/>`;
      }));
    svg.querySelector(".pplab-now").innerHTML = isWhole ? "" : `<rect x="${at}" y="${top}" width="${px(inner - at)}" height="${bottom - top}"/>` +
      `<path d="M${at} ${top - 4}V${bottom + 4}"/>${dots.join("")}`;
    for (const peak of peaks) {
      peak.steps = peak.steps || pplab.inFlight(peak.timeline, peak.rank);
      peak.text.textContent = isWhole ? peak.whole : `holds ${peak.steps.findLast(([from]) => from <= time)[1]}`;
    }
  }

  /** A chart's messages between ranks: when each is under way, at least for `flight`, and what it brings. */
  function messages(chart, flight) {
    const sent = (span) => pplab.waitsFor(chart.timeline, span).filter(({ how }) => how === "message").map(({ span: made, arrives }) => {
      const isFor = (part) => span.item.parts.some(({ stage, microbatch }) => Math.abs(stage - part.stage) === 1 && microbatch === part.microbatch);
      const { kind } = made.item.parts.find(isFor) || made.item.parts[0];
      return { from: made.end, to: Math.max(arrives, made.end + flight), rank: made.rank, next: span.rank, kind };
    });
    return (chart.messages = chart.messages || chart.timeline.spans.flatMap(sent));
  }

  // ---- marks -------------------------------------------------------------------------------------------------------

  /** What lies at a point of the drawing: {chart, span} or {chart, idle}, or null. */
  function itemAt({ charts, scale }, x, y) {
    const chart = charts.find(({ top, bottom }) => y >= top && y < bottom);
    return chart ? itemOf(chart, Math.floor((y - chart.top) / chart.row), x / scale) : null;
  }

  function itemOf(chart, rank, time) {
    const covers = ({ start, end }) => start <= time && time < end;
    const span = chart.timeline.byRank[rank].find(covers);
    if (span) return { chart, span };
    const idle = chart.idle.find((each) => each.rank === rank && covers(each));
    return idle ? { chart, idle } : null;
  }

  /** The item that an arrow key leads to: along a rank, to the same time of another rank or chart, or to an end. */
  function step({ charts }, selected, key) {
    if (!selected) return itemsOf(charts[0], 0)[0];
    const { chart, span, idle } = selected;
    const now = span || idle, row = itemsOf(chart, now.rank);
    const place = row.findIndex((item) => (item.span || item.idle) === now);
    if (key === "Home") return row[0];
    if (key === "End") return row[row.length - 1];
    if (key === "ArrowLeft" || key === "ArrowRight") return row[place + (key === "ArrowLeft" ? -1 : 1)] || selected;
    const time = (now.start + now.end) / 2, rank = now.rank + (key === "ArrowUp" ? -1 : 1);
    const next = rank < 0 ? charts[chart.index - 1] : rank < chart.timeline.schedule.numRanks ? chart : charts[chart.index + 1];
    if (!next) return selected;
    const target = next === chart ? rank : rank < 0 ? next.timeline.schedule.numRanks - 1 : 0;
    const items = itemsOf(next, target);
    return itemOf(next, target, time) || items[items.length - 1];
  }

  const itemsOf = (chart, rank) =>
    [
      ...chart.timeline.byRank[rank].map((span) => ({ chart, span })),
      ...chart.idle.filter((idle) => idle.rank === rank).map((idle) => ({ chart, idle })),
    ].sort((a, b) => (a.span || a.idle).start - (b.span || b.idle).start || (a.span || a.idle).end - (b.span || b.idle).end);

  /** Mark an item, draw what it waits for (solid) and what waits for it (dashed), and return it in words. */
  function select(drawing, selected) {
    const { marks, x, scale } = drawing;
    if (!selected) {
      marks.innerHTML = "";
      return "";
    }
    const { chart, span, idle } = selected, { timeline } = chart;
    const middle = (rank) => barTop(chart, rank) + BAR / 2;
    const outline = (name, { rank, start, end }) =>
      `<path class="${name}" d="${box(x(start), barTop(chart, rank), Math.max((end - start) * scale, 1), BAR)}"/>`;
    const arrow = drawing.svg.querySelector("marker").id;
    const link = (name, from, to, at = to.start) => {
      const down = Math.sign(to.rank - from.rank), edge = (down * BAR) / 2;
      const [x0, x1] = [Math.max(x(from.end) - 3, x(from.start)), x(at) + (at === to.start ? 3 : 0)].map(px);
      const [y0, y1] = [middle(from.rank) + edge, middle(to.rank) - edge - 1.5 * down].map(px);
      const bend = px((y1 - y0) / 2), rise = BAR / 2 + 14; // along one rank, the link goes over the bars between
      const curve = down ? `M${x0} ${y0}C${x0} ${y0 + bend} ${x1} ${y1 - bend} ${x1} ${y1}`
        : `M${x0} ${y0 - BAR / 2}C${x0} ${y0 - rise} ${x1} ${y0 - rise} ${x1} ${y0 - BAR / 2}`;
      const line = `<path class="pplab-halo" d="${curve}"/><path class="${name}" d="${curve}" marker-end="url(#${arrow})"/>`;
      return line + outline("pplab-other", name === "pplab-from" ? from : to);
    };
    let drawn = "";
    if (span) {
      for (const { span: made, how } of pplab.waitsFor(timeline, span)) {
        drawn += how === "order" ? "" : link("pplab-from", made, span);
      }
      for (const user of pplab.neededBy(timeline, span)) {
        const isNext = user.rank === span.rank && user.position === span.position + 1;
        drawn += isNext ? "" : link("pplab-to", span, user);
      }
    } else if (idle.for) drawn += link("pplab-from", idle.for, idle, idle.end);
    marks.innerHTML = drawn + outline("pplab-selected", span || idle);
    if (!span) return tellIdle(idle);
    return tellAction(timeline, span) + (chart.path.includes(span) ? " It is on the critical path." : "");
  }

  /** What the colours and hatchings of `timelines` mean, as HTML. */
  function legend(timelines) {
    const found = new Set(timelines.flatMap((t) => t.spans.flatMap(({ item }) => item.parts.map(({ kind }) => kind))));
    const kinds = [..."FBIW"].filter((kind) => found.has(kind));
    const parts = new Set(timelines.flatMap((t) => idleOf(t).map((idle) => idle.part)));
    const idle = Object.keys(PHASE).filter((part) => parts.has(part));
    const labels = new Set(timelines.flatMap((t) => idleOf(t).filter(({ part }) => part === "other").map(({ text }) => text)));
    const swatch = (style, name) => `<li><i style="${style}"></i>${name}</li>`;
    return (
      kinds.map((kind) => swatch(`background:${FILL[kind]}`, `${NAME[kind]} ${kind}`)).join("") +
      idle.map((part) => `<li><i class="pplab-${part}box"></i>${PHASE[part]}</li>`).join("") +
      (parts.has("other") ? swatch(`background:${OTHER}`, escaped(listed([...labels]))) : "")
    );
  }

  return { begin, itemOf, LABELS, FILL, NAME, OTHER, IDLE_OPACITY, shade, ink, short, timed, percent, escaped, listed, fullStages, draw, legend };
})();
