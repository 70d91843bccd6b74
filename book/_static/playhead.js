// A playhead on the charts of time in cells' outputs, on the explorers' clock. What it knows of a chart it reads from the
// shapes that pplab.plot has drawn, once a reader turns to it: so charts that the page's own Python draws have one, too.
(() => {
  "use strict";

  const CHARTS = '.pplab-figure > svg:is([aria-label*="Gantt chart"], [aria-label*="over time"])';
  const KINDS = { // the package's palette (the page's test compares)
    forward: [47, 109, 181], backward: [240, 161, 58], "input gradient": [207, 49, 49], "weight gradient": [169, 219, 192],
  };
  const GAP = 1.2; // points by which a bar is drawn shorter, at most
  const STEPS = 24; // from start to end, where nothing starts or ends
  const FLIGHT = 1 / 60; // of the whole time: so long a message is seen, if it doesn't take longer

  const plain = (text) => text.replace(/[&<]/g, (sign) => ({ "&": "&amp;", "<": "&lt;" })[sign]);
  const number = (element, name) => Number(element.getAttribute(name));

  /** The kind of action that a colour stands for: one of the palette's, or that mixed with white, for a later stage. */
  function kindOf(fill) {
    const isMixed = (base) => {
      const shares = base.map((channel, i) => (fill[i] - channel) / (255 - channel));
      return Math.max(...shares) - Math.min(...shares) < 0.08 && shares[0] > -0.05 && shares[0] < 0.38;
    };
    return Object.keys(KINDS).find((kind) => isMixed(KINDS[kind])) || "something else";
  }

  // ---- what a drawing says -----------------------------------------------------------------------------------------

  /** A drawing's axis of time, where its panels lie, and its texts; nothing where it has no such axis. */
  function axisOf(svg) {
    const texts = [...svg.querySelectorAll("text")].map((text) => {
      return { x: number(text, "x"), y: number(text, "y"), says: text.textContent };
    });
    const boxes = [...svg.querySelectorAll("clipPath > rect")].map((rect) => {
      const [left, top, width, height] = ["x", "y", "width", "height"].map((name) => number(rect, name));
      return { left, top, right: left + width, bottom: top + height, clip: `url(#${rect.parentNode.id})` };
    }).sort((a, b) => a.top - b.top);
    const last = boxes.at(-1), below = texts.filter(({ y }) => y > last?.bottom);
    const unit = below.map(({ says }) => /^time(?: \((.+)\))?$/.exec(says)).find(Boolean);
    const [first, ...ticks] = below.filter(({ y, says }) => y < last.bottom + 20 && says && !isNaN(says));
    if (!unit || !ticks.length || boxes.some(({ left }) => left !== last.left)) return null;
    const next = ticks.at(-1), scale = (next.says - first.says) / (next.x - first.x);
    const timeAt = (x) => Number(first.says) + (x - first.x) * scale;
    const xAt = (time) => first.x + (time - first.says) / scale;
    return { boxes, texts, timeAt, xAt, end: timeAt(last.right), unit: unit[1] ? ` ${unit[1]}` : "" };
  }

  /** The same, and what its panels show, top to bottom. */
  function read(svg) {
    const axis = axisOf(svg), shapes = [...svg.querySelectorAll("path[clip-path]")].flatMap(boxesOf);
    const panels = axis.boxes.map((box) => panelOf(box, shapes.filter(({ clip }) => clip === box.clip), axis));
    const ends = panels.flatMap(({ bars }) => bars.map(({ end }) => end)); // an axis may go on
    return { ...axis, panels, end: ends.length ? Math.max(...ends) : axis.end };
  }

  /** The rectangles of a path: where they lie, and their colour, which idle time has none of. */
  function boxesOf(path) {
    const { fill, fillOpacity } = getComputedStyle(path), clip = path.getAttribute("clip-path");
    const colour = fill.startsWith("rgb") && fillOpacity === "1" ? fill.match(/\d+/g).map(Number) : null;
    return path.getAttribute("d").split("M").slice(1).flatMap((part) => {
      const at = part.match(/-?[\d.]+(?:e-?\d+)?/g).map(Number);
      const [xs, ys] = [0, 1].map((odd) => [...new Set(at.filter((_, i) => i % 2 === odd))].sort((a, b) => a - b));
      if (xs.length !== 2 || ys.length !== 2) return []; // a line, an arrow
      return [{ left: xs[0], right: xs[1], top: ys[0], bottom: ys[1], colour, clip }];
    });
  }

  /** One chart of a drawing: its name, its rows' names, and what they do. */
  function panelOf(box, shapes, { texts, timeAt, end }) {
    const { left, top, right, bottom } = box;
    const names = texts.filter(({ x, y }) => x < left && y > top && y < bottom);
    const rows = names.sort((a, b) => a.y - b.y).map(({ says }) => says);
    const title = texts.find(({ x, y }) => Math.abs(x - left) < 1 && y < top && y > top - 12);
    const rowOf = (shape) => Math.floor((((shape.top + shape.bottom) / 2 - top) / (bottom - top)) * rows.length);
    const last = Math.max(...shapes.filter(({ colour }) => !colour).map((idle) => idle.right)); // where the step ends
    const startsIn = (row) => shapes.filter((each) => rowOf(each) === row).map((each) => each.left);
    const starts = rows.map((_, row) => [...startsIn(row), last, right]);
    const bars = shapes.filter(({ colour }) => colour).map((bar) => {
      const row = rowOf(bar), ends = Math.min(...starts[row].filter((x) => x > bar.right - 0.1 && x < bar.right + GAP));
      const isIn = ({ x, y }) => x > bar.left && x < bar.right && y > bar.top && y < bar.bottom;
      const label = texts.find(isIn)?.says, kind = kindOf(bar.colour);
      return { ...bar, row, kind, label, start: timeAt(bar.left), end: timeAt(isFinite(ends) ? ends : bar.right) };
    });
    return { ...box, rows, name: title ? title.says.split(":")[0] : "", bars, messages: messagesOf(bars, end) };
  }

  /** What goes from row to row: a microbatch's forwards follow each other, and so do its backwards. None where a bar is
   *  too narrow to say whose it is, or where one begins before the one that it would wait for has ended. */
  function messagesOf(bars, end) {
    const chains = new Map();
    for (const bar of bars.filter(({ kind }) => kind in KINDS && kind !== "weight gradient")) {
      const chain = `${bar.kind === "forward"} ${bar.label}`;
      chains.set(chain, [...(chains.get(chain) || []), bar]);
      if (!bar.label) return [];
    }
    const pairs = [...chains.values()].flatMap((chain) => {
      const inTurn = chain.sort((a, b) => a.start - b.start);
      return inTurn.slice(1).map((to, i) => ({ from: inTurn[i], to })).filter(({ from, to }) => from.row !== to.row);
    });
    const waits = Math.min(...pairs.map(({ from, to }) => to.start - from.end)); // so long a message takes, at most
    return waits < -end / 200 ? [] : pairs.map((pair) => ({ ...pair, takes: Math.max(waits, end * FLIGHT) }));
  }

  // ---- a moment ----------------------------------------------------------------------------------------------------

  const isOn = (time) => (bar) => bar.start <= time && time < bar.end;

  /** The future is covered, but for what is under way; messages are dots. */
  function drawn({ panels, xAt }, time) {
    const x = xAt(time);
    const hole = (bar) => `M${x} ${bar.top}V${bar.bottom}H${bar.right}V${bar.top}z`;
    const isFlying = ({ from, takes }) => from.end <= time && time < from.end + takes;
    const dot = ({ from, to, takes }) => {
      const [y, down] = [from, to].map((bar) => (bar.top + bar.bottom) / 2), way = (time - from.end) / takes;
      return `<circle cx="${x}" cy="${y + (down - y) * way}" r="3.6" fill="rgb(${KINDS[from.kind]})"/>`;
    };
    return panels.map(({ top, bottom, right, bars, messages }) => {
      const holes = bars.filter(isOn(time)).map(hole).join("");
      const future = `<path class="pplab-future" d="M${x} ${top}H${right + 1}V${bottom - 1}H${x}z${holes}"/>`;
      return `${future}<path d="M${x} ${top - 2}V${bottom}"/>${messages.filter(isFlying).map(dot).join("")}`;
    }).join("");
  }

  /** What each rank does, and for how many forwards it holds the activations. */
  function told({ panels }, time) {
    const row = ({ bars }, name, place) => {
      const own = bars.filter((bar) => bar.row === place), now = own.filter(isOn(time));
      const last = bars.some(({ kind }) => kind === "weight gradient") ? "weight gradient" : "input gradient";
      const begun = own.filter(({ kind, start }) => kind === "forward" && start <= time);
      const ended = own.filter(({ kind, end }) => ["backward", last].includes(kind) && end <= time);
      const does = now.map(({ kind, label = "" }) => `${kind} ${label}`.trim()).join(" and ") || "idle";
      const colour = now.length ? `rgb(${now[0].colour})` : "none", held = begun.length - ended.length;
      return `<span><i style="background:${colour}"></i>${plain(name)}: ${plain(does)}, holds ${held}</span>`;
    };
    return panels.filter(({ bars }) => bars.length).map((panel) => {
      const title = panels.length > 1 ? `<b>${plain(panel.name)}</b>` : "";
      return title + panel.rows.map((name, place) => row(panel, name, place)).join("");
    }).join("");
  }

  // ---- on the page -------------------------------------------------------------------------------------------------

  const opens = new Map(); // by drawing: what makes its clock
  const nameOf = (svg) => svg.closest('[id^="fig-"]')?.id || "chart";

  /** Put a button under a chart; the rest comes when a reader turns to it. */
  function offer(svg) {
    const figure = svg.parentElement, bar = document.createElement("div");
    if (opens.has(svg)) return;
    Object.assign(bar, { className: "pplab-offer", role: "group", ariaLabel: "Playhead" });
    bar.innerHTML = '<button type="button" aria-label="play">▶</button>';
    let clock = null;
    const open = () => (clock = clock || playhead(svg, bar));
    opens.set(svg, open);
    svg.addEventListener("pointerenter", open, { once: true });
    bar.firstChild.addEventListener("click", () => {
      if (clock) return; // its own button hears it
      open().toggle();
      bar.firstChild.focus();
    });
    figure.after(bar);
  }

  function playhead(svg, bar) {
    const chart = read(svg), { end, unit, panels } = chart;
    const top = svg.querySelector(":scope > g[transform]") || svg; // what all shapes lie in
    const add = (kind, attributes) => {
      const made = top.appendChild(document.createElementNS(svg.namespaceURI, kind));
      Object.entries(attributes).forEach(([name, value]) => made.setAttribute(name, value));
      return made;
    };
    const { left, right, top: y } = panels[0], size = { width: right - left, height: panels.at(-1).bottom - y };
    const track = add("rect", { class: "pplab-hand", x: left, y, ...size }), layer = add("g", { class: "pplab-moment" });
    const says = Object.assign(document.createElement("p"), { className: "pplab-told", hidden: true });
    bar.after(says);
    const show = (time, isGoing) => {
      layer.innerHTML = time < end ? drawn(chart, time) : "";
      says.ariaLive = isGoing ? "off" : "polite";
      says.innerHTML = told(chart, time);
      says.hidden = says.hidden && time >= end;
    };
    const clock = pplabClock.make(bar, show, (time) => pplabClock.remember(time, end, nameOf(svg)));
    const found = panels.flatMap(({ bars }) => bars.flatMap((each) => [each.start, each.end]));
    const turns = () => (found.length ? found : Array.from({ length: STEPS }, (_, i) => (i * end) / STEPS));
    const given = { end, turns, rounded: end / 5000, told: (time) => Number(time.toPrecision(3)) + unit };
    clock.fit(given);
    pplabClock.drag(track, (share) => clock.seek(chart.timeAt(left + share * (right - left))), bar);
    addEventListener("beforeprint", () => clock.fit(given, end));
    return clock;
  }

  const offerAll = (root) => [...root.querySelectorAll(CHARTS)].filter(axisOf).forEach(offer);

  function go() { // where the address says
    const svg = [...opens.keys()].find((each) => !isNaN(pplabClock.asked(nameOf(each))) && !each.closest("[hidden]"));
    if (!svg) return;
    for (let fold = svg.closest("details"); fold; fold = fold.parentElement.closest("details")) fold.open = true;
    opens.get(svg)().seek(pplabClock.asked(nameOf(svg)));
    svg.scrollIntoView({ block: "center" });
  }

  document.addEventListener("pplab-output", ({ target }) => offerAll(target));
  addEventListener("hashchange", go);
  offerAll(document);
  go();
})();
