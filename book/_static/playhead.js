// A playhead on the charts of time in cells' outputs, on the explorers' clock. What it knows of a chart is the chart's
// metadata, which pplab_drawings.py has read from the shapes: so charts that the page's own Python draws have one, too.
(() => {
  "use strict";

  const STEPS = 24; // from start to end, where nothing starts or ends

  const plain = (text) => text.replace(/[&<]/g, (sign) => ({ "&": "&amp;", "<": "&lt;" })[sign]);

  /** What a chart shows, its bars one by one. */
  function read(svg) {
    const chart = JSON.parse(svg.querySelector("metadata").textContent);
    const panels = chart.panels.map(({ groups, messages, ...panel }) => {
      const bars = groups.flatMap(({ bars: some, ...alike }) =>
        some.map(([label, start, end]) => ({ ...alike, label, start, end })));
      const sent = messages.chains.flatMap((chain) =>
        chain.slice(1).map((to, i) => ({ from: bars[chain[i]], to: bars[to], takes: messages.takes })));
      return { ...panel, bars, messages: sent.filter(({ from, to }) => from.row !== to.row) };
    });
    return { ...chart, panels, xAt: (time) => chart.zero + time / chart.scale };
  }

  // ---- a moment ----------------------------------------------------------------------------------------------------

  const isOn = (time) => (bar) => bar.start <= time && time < bar.end;

  /** The future is covered, but for what is under way; messages are dots. */
  function drawn({ panels, xAt, colours }, time) {
    const x = xAt(time);
    const hole = (bar) => `M${x} ${bar.top}V${bar.bottom}H${xAt(bar.end)}V${bar.top}z`;
    const isFlying = ({ from, takes }) => from.end <= time && time < from.end + takes;
    const dot = ({ from, to, takes }) => {
      const [y, down] = [from, to].map((bar) => (bar.top + bar.bottom) / 2), way = (time - from.end) / takes;
      return `<circle cx="${x}" cy="${y + (down - y) * way}" r="3.6" fill="${colours[from.kind]}"/>`;
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
      const does = now.map(({ kind, label }) => `${kind} ${label}`.trim()).join(" and ") || "idle";
      const colour = now.length ? now[0].fill : "none", held = begun.length - ended.length;
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
    pplabClock.drag(track, (share) => clock.seek((left + share * (right - left) - chart.zero) * chart.scale), bar);
    addEventListener("beforeprint", () => clock.fit(given, end));
    return clock;
  }

  const offerAll = (root) => root.querySelectorAll(".pplab-figure > svg:has(> metadata)").forEach(offer);

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
