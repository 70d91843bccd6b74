// The explorer: settings, a chart of what they give, and its figures. A page may hold several; each lives in a
// `.pplab-explorer` element, whose data-state (as the fragment of an address: schedule=1F1B&ranks=4) it starts from. The
// one with data-page keeps its state in the page's address, so that it can be shared.

(() => {
  "use strict";

  const { short, percent, escaped, listed } = pplabChart;
  const { DEFAULTS, OVERLAP, PER, decode, encode, number, takes, scheduleOf, timelineOf } = pplabSettings;

  // ---- controls ----------------------------------------------------------------------------------------------------

  const CONTROLS = [
    { name: "schedule", label: "schedule", kind: "schedule" },
    { name: "compare", label: "compare with", kind: "schedule" },
    { name: "ranks", label: "ranks P", kind: "range", min: 1, max: 16 },
    { name: "microbatches", label: "microbatches M", kind: "range", min: 1, max: 64 },
    { name: "stages-per-rank", label: "stages per rank V", kind: "range", min: 1, max: 8 },
    { name: "forward", label: "forward F", kind: "duration" },
    { name: "backward-input", label: "input gradient I", kind: "duration" },
    { name: "backward-weight", label: "weight gradient W", kind: "duration" },
    { name: "latency", label: "latency", kind: "duration" },
    { name: "overlap", label: "F & B at once take", kind: "choice", choices: OVERLAP },
    { name: "pair", label: "their duration, if not 0", kind: "duration" },
    { name: "per", label: "F, I, W are the times of", kind: "choice", choices: PER },
    { name: "until", label: "time axis, at least to", kind: "duration" },
    { name: "zoom", label: "zoom", kind: "choice", choices: { 1: "1 ×", 2: "2 ×", 4: "4 ×", 8: "8 ×" } },
    { name: "path", label: "critical path", kind: "check" },
    { name: "memory", label: "memory", kind: "check" },
  ];

  function controlHTML({ name, label, kind, min, max, choices }, id) {
    const known = kind === "schedule" ? Object.fromEntries(pplab.schedules.map((s) => [s.name, s.name])) : choices;
    const head = `<label for="${id}">${label}</label>`;
    if (kind === "check") {
      return `<span class="pplab-control pplab-check"><input type="checkbox" id="${id}" name="${name}"><label for="${id}">${label}</label></span>`;
    }
    if (kind === "range") {
      return (
        `<span class="pplab-control" data-control="${name}">${head}<span class="pplab-pair"><input type="range" name="${name}" ` +
        `aria-label="${label}" min="${min}" max="${max}"><input type="number" id="${id}" name="${name}" min="1"></span></span>`
      );
    }
    if (kind === "duration") {
      return `<span class="pplab-control">${head}<input type="number" id="${id}" name="${name}" min="0" step="any"></span>`;
    }
    const none = name === "compare" ? '<option value="">nothing</option>' : "";
    const options = Object.entries(known).map(([value, text]) => `<option value="${value}">${text}</option>`);
    return `<span class="pplab-control">${head}<select id="${id}" name="${name}">${none}${options.join("")}</select></span>`;
  }

  // ---- figures -----------------------------------------------------------------------------------------------------

  const FIGURES = [
    ["makespan", "from the first start to the last end", (t) => short(t.makespan)],
    ["bubble fraction", "idle share of all rank-time, P × makespan", (t) => `${t.bubbleFraction.toFixed(4)} (${percent(t.bubbleFraction)})`],
    ["bubble ratio", "idle time divided by the time of work", (t) => `${t.bubbleRatio.toFixed(4)} (${percent(t.bubbleRatio)})`],
    ["span bubble", "idle share of the longest time from a rank's first start to its last end", (t) => `${t.spanBubbleFraction.toFixed(4)} (${percent(t.spanBubbleFraction)})`],
    ["peak in flight", "the most forwards that each rank holds at once", (t) => t.peakInFlight.join(", ")],
    ["the same in full stages", "counted in P-ths of the model", (t) => t.peakInFlight.map((p) => short(p * pplabChart.fullStages(t))).join(", ")],
    ["messages", "that cross from rank to rank in one step", (t) => String(pplab.numMessages(t.schedule))],
    ["parameters", "copies of the model on all ranks together", (t) => String(pplab.copies(t.schedule))],
  ];

  const FEW = ["makespan", "bubble fraction", "peak in flight", "the same in full stages"]; // next to a text

  function figuresHTML(timelines, isShort) {
    const isFine = timelines.some((t) => pplabChart.fullStages(t) !== 1);
    const rows = FIGURES.filter(([name]) => (isFine || name !== "the same in full stages") && (!isShort || FEW.includes(name)));
    const heads = timelines.map((t) => `<th scope="col">${escaped(t.schedule.name)}</th>`).join("");
    const body = rows.map(([name, of, value]) =>
      `<tr><th scope="row">${name}<small>${of}</small></th>${timelines.map((t) => `<td>${value(t)}</td>`).join("")}</tr>`);
    return `<thead><tr><td></td>${heads}</tr></thead><tbody>${body.join("")}</tbody>`;
  }

  function textHTML(timelines) {
    return timelines.map((t) => {
      const rows = t.byRank.map((row, rank) =>
        `<tr><th scope="row">rank ${rank}</th><td>${short(t.busy[rank])}</td><td>${short(t.makespan - t.busy[rank])}</td>` +
        `<td>${t.peakInFlight[rank]}</td><td class="pplab-row">${row.map((s) => escaped(s.item.text)).join(" ")}</td></tr>`);
      const { rules, source } = pplab.find(t.schedule.name);
      const path = pplab.criticalPath(t).map((s) => escaped(s.item.text)).join(" ");
      return (
        `<table class="pplab-rows"><caption>${escaped(t.schedule.name)}</caption><thead><tr><td></td><th scope="col">busy</th>` +
        `<th scope="col">idle</th><th scope="col">peak in flight</th><th scope="col">actions in order</th></tr></thead>` +
        `<tbody>${rows.join("")}</tbody></table><p>Critical path: ${path}</p>` +
        `<p>${escaped(t.schedule.name)} takes ${escaped(rules)}. Its source is: ${escaped(source)}.</p><p><a download="${escaped(t.schedule.name)}.csv" href="data:text/csv;charset=utf-8,` +
        `${encodeURIComponent(pplab.toCSV(t.schedule))}">${escaped(t.schedule.name)}.csv</a> is a file that torch and ` +
        `<code>lab.read_csv</code> can read.</p>`
      );
    }).join("");
  }

  /** What a screen reader says after a change. */
  const summary = (timelines) =>
    timelines.map((t) => `${t.schedule.name}, ${t.schedule.numRanks} ranks, ${t.schedule.numMicrobatches} microbatches: ` +
      `makespan ${short(t.makespan)}, ${percent(t.bubbleFraction)} of all rank-time idle, peak in flight ${listed(t.peakInFlight.map(String))}`).join(". ");

  function publish(root, prefix, timeline) {
    root.setAttribute(`data-${prefix}makespan`, timeline.makespan);
    root.setAttribute(`data-${prefix}bubble-fraction`, timeline.bubbleFraction);
    root.setAttribute(`data-${prefix}bubble-ratio`, timeline.bubbleRatio);
    root.setAttribute(`data-${prefix}span-bubble-fraction`, timeline.spanBubbleFraction);
    root.setAttribute(`data-${prefix}peak-in-flight`, timeline.peakInFlight.join(","));
  }

  // ---- an explorer -------------------------------------------------------------------------------------------------

  let made = 0; // explorers of the page: labels need ids that no other has

  /** The elements of an explorer, empty as yet. Controls that the root doesn't name are folded away. */
  function skeleton(root, isPage) {
    const prefix = `pplab-explorer-${++made}`;
    const shown = (root.dataset.controls || "").split(" ").filter(Boolean);
    const isFirst = ({ name }) => !shown.length || shown.includes(name);
    const html = (wanted) => CONTROLS.filter(wanted).map((control) => controlHTML(control, `${prefix}-${control.name}`)).join("");
    const rest = html((control) => !isFirst(control));
    const more = `<details class="pplab-more"><summary>More settings</summary><div class="pplab-controls">${rest}</div></details>`;
    const open = `<a class="pplab-open" href="${escaped(root.dataset.explorer)}">Open in the explorer</a>`;
    const live = document.createElement("div");
    live.className = "pplab-live";
    live.innerHTML =
      `<form class="pplab-controls" aria-label="Settings of the schedule explorer">${html(isFirst)}<div class="pplab-line">` +
      `${rest && more}<span class="pplab-buttons"><button type="reset">Reset</button>${root.dataset.explorer ? open : ""}</span></div></form>` +
      `<p class="pplab-error" role="alert"></p>` +
      `<div class="pplab-scroll" tabindex="0" role="application" aria-describedby="${prefix}-says" ` +
      `aria-label="Gantt chart: arrow keys go from action to action, Escape selects none"></div>` +
      `<ul class="pplab-legend"></ul><p class="pplab-says" id="${prefix}-says" aria-live="polite"></p>` +
      `<div class="pplab-wide"><table class="pplab-figures"></table></div>` +
      `<details class="pplab-text"><summary>${isPage ? "The rows" : "All figures, and the rows"} as text</summary>` +
      `<div class="pplab-wide"></div></details><p class="pplab-hidden" aria-live="polite"></p>`;
    return live;
  }

  const HINT = "Point at an action, or press the arrow keys in the chart, to see what it waits for and what waits for it.";

  /** Let pointer and keys select in the drawing that `scroll` shows, told in `says`. Returns what takes a new drawing. */
  function pointing(scroll, says) {
    let drawing = null, selected = null, isPinned = false;

    function select(item) {
      if ((item?.span || item?.idle) === (selected?.span || selected?.idle)) return;
      selected = item;
      says.textContent = drawing.select(item) || HINT;
    }

    const under = ({ clientX, clientY }) => {
      const place = drawing.svg.getBoundingClientRect();
      return drawing.at(clientX - place.left, clientY - place.top);
    };
    scroll.addEventListener("pointermove", (event) => drawing && !isPinned && event.pointerType === "mouse" && select(under(event)));
    scroll.addEventListener("pointerleave", () => drawing && !isPinned && select(null));
    scroll.addEventListener("click", (event) => {
      if (!drawing) return;
      const item = under(event);
      select(item);
      isPinned = Boolean(item);
    });
    scroll.addEventListener("keydown", (event) => {
      const isStep = /^(Arrow(Left|Right|Up|Down)|Home|End)$/.test(event.key);
      if (!drawing || event.ctrlKey || event.altKey || event.metaKey || !(isStep || event.key === "Escape")) return;
      event.preventDefault();
      isPinned = isStep;
      select(isStep ? drawing.step(selected, event.key) : null);
      if (selected) reveal(drawing.x((selected.span || selected.idle).start));
    });

    /** Scroll the chart's own box, and nothing else, so that the time at `x` shows. */
    function reveal(x) {
      const room = scroll.clientWidth - 120;
      if (x < scroll.scrollLeft) scroll.scrollLeft = Math.max(x - 40, 0);
      else if (x > scroll.scrollLeft + room) scroll.scrollLeft = x - room;
    }

    return (made) => {
      [drawing, selected, isPinned] = [made, null, false];
      says.textContent = HINT;
    };
  }

  /** Bring a `.pplab-explorer` to life. */
  function explorer(root) {
    const isPage = "page" in root.dataset;
    const initial = decode(root.dataset.state || "");
    let state = isPage && location.hash.includes("=") ? decode(location.hash.slice(1), initial) : { ...initial };
    let timelines = [], asked = 0, later = 0;

    const live = skeleton(root, isPage);
    root.append(live);
    const find = (selector) => live.querySelector(selector);
    const [form, error, scroll, legend, says, figures, text, spoken] = [
      "form", ".pplab-error", ".pplab-scroll", ".pplab-legend", ".pplab-says", ".pplab-figures", ".pplab-text", ".pplab-hidden",
    ].map(find);
    const take = pointing(scroll, says);

    /** Show the state in the controls: all but the one that is being typed in. */
    function fill(except) {
      for (const input of form.elements) {
        if (!input.name || input === except) continue;
        const value = state[input.name];
        if (input.type === "checkbox") input.checked = value;
        else if (input.type === "range") {
          if (value > Number(input.max)) input.max = value;
          input.value = Number.isFinite(value) ? value : input.min;
        } else input.value = Number.isNaN(value) ? "" : value;
        if (input.name === "stages-per-rank") input.disabled = !takesStages();
      }
      const control = find('[data-control="stages-per-rank"]');
      control.classList.toggle("pplab-off", !takesStages());
    }

    const names = () => [state.schedule, state.compare].filter(Boolean);
    const takesStages = () => names().some((name) => takes(name, "stages_per_rank"));

    /** Build, simulate and draw what the state says; the last good chart stays, dimmed, while there is none. */
    function update() {
      const began = performance.now();
      asked = 0;
      try {
        const schedules = [];
        for (const name of names()) {
          const schedule = scheduleOf(state, name, request);
          if (!schedule) { // one search after the other: `request` comes back here
            root.dataset.busy = "true";
            says.textContent = "The page is searching for the schedule …";
            return;
          }
          schedules.push(schedule);
        }
        timelines = schedules.map((schedule) => timelineOf(state, schedule));
      } catch (problem) {
        delete root.dataset.busy;
        root.dataset.error = error.textContent = problem.message;
        root.dataset.ready = "true";
        if (problem.name !== "ScheduleError") throw problem;
        return;
      }
      delete root.dataset.busy;
      delete root.dataset.error;
      error.textContent = "";
      draw();
      figures.innerHTML = figuresHTML(timelines, !isPage);
      publish(root, "", timelines[0]);
      for (const { name } of [...root.attributes]) if (name.startsWith("data-compare-")) root.removeAttribute(name);
      if (timelines[1]) publish(root, "compare-", timelines[1]);
      scroll.getBoundingClientRect(); // lay out now, so that the time is the whole time
      root.dataset.updateMs = (performance.now() - began).toFixed(2);
      root.dataset.ready = "true";
      clearTimeout(later);
      later = setTimeout(settle, 400);
    }

    /** What may come a moment after the chart: it isn't needed while a slider moves. */
    function settle() {
      spoken.textContent = summary(timelines);
      const all = isPage ? "" : `<table class="pplab-figures">${figuresHTML(timelines)}</table>`;
      if (text.open) text.lastElementChild.innerHTML = all + textHTML(timelines);
    }

    function draw() {
      const left = scroll.scrollLeft;
      const { until, zoom, path, memory } = state;
      const look = { width: scroll.clientWidth, until: until || 0, zoom: [1, 2, 4, 8].includes(Number(zoom)) ? Number(zoom) : 1, path, memory };
      take(pplabChart.draw(scroll, timelines, look));
      scroll.scrollLeft = left;
      legend.innerHTML = pplabChart.legend(timelines);
    }

    const request = () => (asked = asked || requestAnimationFrame(update));

    function changed(except) {
      fill(except);
      const fragment = encode(state);
      root.dataset.state = fragment;
      point(find(".pplab-open"), fragment);
      if (isPage) history.replaceState(null, "", `#${fragment}`);
      request();
    }

    form.addEventListener("input", ({ target }) => {
      const { name, type } = target;
      if (!name) return;
      if (type === "checkbox") state[name] = target.checked;
      else state[name] = typeof DEFAULTS[name] === "number" ? number(target.value) : target.value;
      if (["until", "pair"].includes(name) && Number.isNaN(state[name])) state[name] = 0;
      changed(target);
    });
    form.addEventListener("submit", (event) => event.preventDefault());
    form.addEventListener("reset", (event) => {
      event.preventDefault();
      state = { ...initial };
      changed();
    });
    text.addEventListener("toggle", () => timelines.length && settle());

    if (isPage) {
      addEventListener("hashchange", () => {
        if (!location.hash.includes("=")) return;
        state = decode(location.hash.slice(1), initial);
        root.dataset.state = encode(state);
        fill();
        request();
        const { top, bottom } = root.getBoundingClientRect();
        if (top < 0 || bottom > innerHeight) root.scrollIntoView({ block: "start" }); // smooth or not as the page's style says
      });
    }
    let width = 0;
    new ResizeObserver(() => {
      if (scroll.clientWidth === width || !timelines.length) return;
      width = scroll.clientWidth;
      draw();
    }).observe(scroll);

    fill();
    root.dataset.state = encode(state);
    point(find(".pplab-open"), encode(state));
    update();
    width = scroll.clientWidth;
  }

  /** Let a link lead to a state. Not before the page is loaded: then the theme takes each link's fragment for a selector,
   *  and fails at one that isn't. */
  function point(link, fragment) {
    if (!link) return;
    link.dataset.state = fragment;
    if (isLoaded) link.href = `${link.href.split("#")[0]}#${fragment}`;
  }

  let isLoaded = false;
  addEventListener("load", () => setTimeout(() => {
    isLoaded = true;
    document.querySelectorAll("a[data-state]").forEach((link) => point(link, link.dataset.state));
  }));

  const start = () => document.querySelectorAll(".pplab-explorer").forEach(explorer);
  if (document.readyState === "loading") document.addEventListener("DOMContentLoaded", start);
  else start();
})();
