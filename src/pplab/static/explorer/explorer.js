// The explorer: settings, a chart of what they give, and its figures. A page may hold several; each lives in a
// `.pplab-explorer` element, whose data-state (as the fragment of an address: schedule=1F1B&ranks=4) it starts from. The
// one with data-page keeps its state in the page's address, so that it can be shared. What stands in it as JSON, in a
// `.pplab-given`, are rows and timelines of the package's, the state's schedule "own" (see pplabRows.records): `lab.explore`.

(() => {
  "use strict";

  const { short, timed, percent, escaped, listed } = pplabChart;
  const { OWN, decode, encode, read, takes, scheduleOf, timelineOf, ownTimelines } = pplabSettings;

  // ---- controls ----------------------------------------------------------------------------------------------------

  const FIRST = "schedule compare ranks microbatches stages-per-rank slices more-in-flight"; // the rest is folded away,
  const IF_ROOM = "forward backward-input backward-weight overhead latency path"; // and on a phone these are
  const TIMES = ["forward", "backward-input", "backward-weight", "overhead", "latency", "overlap", "pair", "per"];
  const MOST_ZOOM = 32, ZOOM_STEP = 1.5;

  // ---- figures -----------------------------------------------------------------------------------------------------

  const FIGURES = [
    ["makespan", "from the first start to the last end", (t) => timed(t.makespan, t)],
    ["bubble fraction", "idle share of all rank-time, P × makespan", (t) => `${t.bubbleFraction.toFixed(4)} (${percent(t.bubbleFraction)})`],
    ["bubble ratio", "idle time divided by the time of work", (t) => `${t.bubbleRatio.toFixed(4)} (${percent(t.bubbleRatio)})`],
    ["span bubble", "idle share of the longest time from a rank's first start to its last end", (t) => `${t.spanBubbleFraction.toFixed(4)} (${percent(t.spanBubbleFraction)})`],
    ["peak in flight", "the most forwards that each rank holds at once", (t) => t.peakInFlight.join(", ")],
    ["the same in full stages", "counted in P-ths of the model", (t) => t.peakInFlight.map((p) => short(p * pplabChart.fullStages(t))).join(", ")],
    ["messages", "that cross from rank to rank in one step", (t) => String(pplab.numMessages(t.schedule))],
    ["parameters", "copies of the model on all ranks together", (t) => String(pplab.copies(t.schedule))],
  ];

  const OF_TIME = FIGURES.slice(0, 4).map(([name]) => name); // what rows don't have that can't run to the end
  const FEW = ["makespan", "bubble fraction", "peak in flight", "the same in full stages"]; // next to a text

  function figuresHTML(timelines, isShort) {
    const isFine = timelines.some((t) => pplabChart.fullStages(t) !== 1);
    const rows = FIGURES.filter(([name]) => (isFine || name !== "the same in full stages") && (!isShort || FEW.includes(name)));
    const heads = timelines.map((t) => `<th scope="col">${escaped(t.schedule.name)}</th>`).join("");
    const shown = (t, name, value) => (t.isStuck && OF_TIME.includes(name) ? "none: it is stuck" : value(t));
    const body = rows.map(([name, of, value]) =>
      `<tr><th scope="row">${name}<small>${of}</small></th>${timelines.map((t) => `<td>${escaped(shown(t, name, value))}</td>`).join("")}</tr>`);
    return `<thead><tr><td></td>${heads}</tr></thead><tbody>${body.join("")}</tbody>`;
  }

  function textHTML(timelines) {
    return timelines.map((t) => {
      const { name } = t.schedule, known = pplab.find(name), isMeasured = !t.costs;
      const said = ({ item, start, end }) => escaped(item.text) + (isMeasured ? ` (${short(end - start, 3)})` : "");
      const rows = t.byRank.map((row, rank) =>
        `<tr><th scope="row">rank ${rank}</th><td>${short(t.busy[rank])}</td><td>${short(t.makespan - t.busy[rank])}</td>` +
        `<td>${t.peakInFlight[rank]}</td><td class="pplab-row">${row.map(said).join(" ")}</td></tr>`);
      const path = t.isStuck ? "" : `<p>Critical path: ${pplab.criticalPath(t).map((s) => escaped(s.item.text)).join(" ")}</p>`;
      const from = known ? `<p>${escaped(name)} takes ${escaped(known.rules)}. Its source is: ${escaped(known.source)}.</p>` : "";
      return (
        `<table class="pplab-rows"><caption>${escaped(name)}</caption><thead><tr><td></td><th scope="col">busy</th>` +
        `<th scope="col">idle</th><th scope="col">peak in flight</th><th scope="col">actions in order${isMeasured ? ", with what each took" : ""}</th></tr></thead>` +
        `<tbody>${rows.join("")}</tbody></table>${isMeasured ? mediansHTML(t) : ""}${path}${from}` +
        (t.isStuck ? "" : `<p><a download="${escaped(name)}.csv" href="data:text/csv;charset=utf-8,` +
        `${encodeURIComponent(pplab.toCSV(t.schedule))}">${escaped(name)}.csv</a> is a file that torch and ` +
        `<code>lab.read_csv</code> can read.</p>`)
      );
    }).join("");
  }

  /** What a measured action took, by stage and kind. */
  function mediansHTML(timeline) {
    const took = new Map();
    for (const { item, start, end } of timeline.spans) {
      const what = item.parts.map(({ stage, kind }) => `${stage}${kind}`).join(";");
      took.set(what, [...(took.get(what) || []), end - start]);
    }
    const median = (values) => values.sort((a, b) => a - b)[values.length >> 1];
    const row = ([what, values]) =>
      `<tr><th scope="row">${what}</th>${[Math.min(...values), median(values), Math.max(...values)].map((x) => `<td>${escaped(timed(x, timeline, 4))}</td>`).join("")}</tr>`;
    const heads = ["stage and kind", "shortest", "median", "longest"].map((name) => `<th scope="col">${name}</th>`).join("");
    return `<table class="pplab-rows pplab-took"><thead><tr>${heads}</tr></thead><tbody>${[...took].sort().map(row).join("")}</tbody></table>`;
  }

  /** What a screen reader says after a change. */
  const summary = (timelines) =>
    timelines.map((t) => t.isStuck ? t.title : `${t.schedule.name}, ${t.schedule.numRanks} ranks, ${t.schedule.numMicrobatches} microbatches: ` +
      `makespan ${short(t.makespan)}, ${percent(t.bubbleFraction)} of all rank-time idle, peak in flight ${listed(t.peakInFlight.map(String))}`).join(". ");

  function publish(root, prefix, timeline) {
    root.setAttribute(`data-${prefix}makespan`, timeline.makespan);
    root.setAttribute(`data-${prefix}bubble-fraction`, timeline.bubbleFraction);
    root.setAttribute(`data-${prefix}bubble-ratio`, timeline.bubbleRatio);
    root.setAttribute(`data-${prefix}span-bubble-fraction`, timeline.spanBubbleFraction);
    root.setAttribute(`data-${prefix}peak-in-flight`, timeline.peakInFlight.join(","));
  }

  // ---- an explorer -------------------------------------------------------------------------------------------------

  /** The elements of an explorer. Controls that the root doesn't name are folded away. */
  function begin(root, isPage) {
    const live = pplabChart.begin(root);
    const [schedule, compare, more, rest, text] = [
      "[name=schedule]", "[name=compare]", ".pplab-more", ".pplab-more > div", ".pplab-text > summary",
    ].map((selector) => live.querySelector(selector));
    schedule.prepend(...pplab.schedules.map(({ name }) => new Option(name)));
    compare.append(...pplab.schedules.map(({ name }) => new Option(name)));
    const first = (root.dataset.controls || (innerWidth < 700 ? FIRST : `${FIRST} ${IF_ROOM}`)).split(" ");
    for (const control of live.querySelectorAll(".pplab-control")) {
      if (!first.includes(control.querySelector("[name]").name)) rest.append(control);
    }
    more.hidden = !rest.childElementCount;
    if (isPage) text.textContent = "The rows as text";
    return live;
  }

  const HINT = "Point at an action, or press the arrow keys in the chart, to see what it waits for and what waits for it.";

  /** Let pointer and keys select in the drawing that `scroll` shows, told in `says`, and a mouse that is pressed draw the
   *  playhead along. Returns what takes a new drawing. */
  function pointing(scroll, says, zoomBy, clock) {
    let drawing = null, selected = null, isPinned = false, pressed = 0, isDrawn = false;

    function select(item) {
      if ((item?.span || item?.idle) === (selected?.span || selected?.idle)) return;
      selected = item;
      says.textContent = drawing.select(item) || HINT;
    }

    const under = ({ clientX, clientY }) => {
      const place = drawing.svg.getBoundingClientRect();
      return drawing.at(clientX - place.left, clientY - place.top);
    };
    scroll.addEventListener("pointermove", (event) => {
      if (!drawing || event.pointerType !== "mouse") return;
      isDrawn = event.buttons === 1 && (isDrawn || Math.abs(event.clientX - pressed) > 3);
      if (isDrawn) clock.seek((event.clientX - drawing.svg.getBoundingClientRect().left) / drawing.scale);
      else if (!isPinned) select(under(event));
    });
    scroll.addEventListener("pointerdown", ({ clientX }) => ([pressed, isDrawn] = [clientX, false]));
    scroll.addEventListener("pointerleave", () => drawing && !isPinned && select(null));
    scroll.addEventListener("click", (event) => {
      if (!drawing || isDrawn) return;
      const item = under(event);
      select(item);
      isPinned = Boolean(item);
    });
    scroll.addEventListener("keydown", (event) => {
      const factor = { "+": ZOOM_STEP, "=": ZOOM_STEP, "-": 1 / ZOOM_STEP, 0: 0 }[event.key];
      if (factor !== undefined && drawing && !event.ctrlKey && !event.altKey && !event.metaKey) {
        event.preventDefault();
        const { left, width } = scroll.getBoundingClientRect(), now = selected && (selected.span || selected.idle);
        zoomBy(factor, now ? left + pplabChart.LABELS + drawing.x(now.start) - scroll.scrollLeft : left + width / 2);
        return;
      }
      if (event.key === " ") {
        event.preventDefault();
        clock.toggle();
      }
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

    const take = (made, isSame) => {
      const kept = isSame && isPinned ? selected : null; // zoomed: the same items, elsewhere
      [drawing, selected, isPinned] = [made, null, Boolean(kept)];
      if (kept) select({ ...kept, chart: made.charts[kept.chart.index] });
      else says.textContent = HINT;
    };
    return { take, reveal };
  }

  /** Let two fingers zoom the chart that `scroll` shows. */
  function pinching(scroll, zoomBy) {
    const down = new Map(); // pointer -> x, y
    const apart = ([a, b]) => Math.hypot(a.x - b.x, a.y - b.y);
    scroll.addEventListener("pointerdown", ({ pointerId, pointerType, clientX: x, clientY: y }) => {
      if (pointerType === "touch") down.set(pointerId, { x, y });
    });
    scroll.addEventListener("pointermove", ({ pointerId, clientX: x, clientY: y }) => {
      if (!down.has(pointerId)) return;
      const before = [...down.values()];
      down.set(pointerId, { x, y });
      const after = [...down.values()];
      if (after.length === 2) zoomBy(apart(after) / apart(before) || 1, (after[0].x + after[1].x) / 2);
    });
    for (const end of ["pointerup", "pointercancel", "pointerleave"]) scroll.addEventListener(end, ({ pointerId }) => down.delete(pointerId));
  }

  /** The records in a text: JSON of the package's, or rows. */
  function recordsIn(text, name = "") {
    if (!/^\s*[{[]/.test(text)) return [{ schedule: pplabRows.read(text, name.replace(/\.\w+$/, "") || undefined) }];
    let data;
    try {
      data = JSON.parse(text);
    } catch (wrong) {
      throw new pplab.ScheduleError(`this begins like JSON and isn't any (${wrong.message})`, "give CSV, or what lab.timeline_to_dict has written");
    }
    return pplabRows.records(data);
  }

  function givenTo(root) {
    const json = root.querySelector(".pplab-given");
    return json ? recordsIn(json.textContent) : [];
  }

  /** Bring a `.pplab-explorer` to life. */
  function explorer(root) {
    const isPage = "page" in root.dataset;
    const initial = decode(root.dataset.state || "");
    let given = givenTo(root), problem = ""; // records to show as own rows; what is wrong with a file
    let state = isPage && location.hash.includes("=") ? decode(location.hash.slice(1), initial) : { ...initial };
    let timelines = [], asked = 0, later = 0;
    let chosen = initial.schedule === OWN ? "1F1B" : initial.schedule; // what an empty box of rows shows
    let moment = state.time || Infinity; // where the next chart's playhead is to stand; null: where it stands

    const live = begin(root, isPage);
    const find = (selector) => live.querySelector(selector);
    const [form, own, error, scroll, legend, says, figures, text, spoken] = [
      "form", ".pplab-own", ".pplab-error", ".pplab-scroll", ".pplab-legend", ".pplab-says", ".pplab-figures", ".pplab-text", ".pplab-hidden",
    ].map(find);
    const clock = pplabClock.make(find(".pplab-clock"), showAt, (time) => {
      state.time = drawing && time < drawing.end ? Number(time.toPrecision(4)) : 0;
      clearTimeout(zoomed);
      zoomed = setTimeout(remember, 300);
    });
    const { take, reveal } = pointing(scroll, says, zoomBy, clock);
    let drawing = null, showTickets = null;

    /** Show the state in the controls: all but the one that is being typed in. */
    function fill(except) {
      for (const input of form.elements) {
        if (!input.name || input === except) continue;
        const value = state[input.name];
        if (input.type === "checkbox") input.checked = value;
        else if (input.type === "range") {
          if (input.name === "more-in-flight") input.max = Math.max(state.microbatches - 1, value, 1); // then it is GPipe
          if (value > Number(input.max)) input.max = value;
          input.value = Number.isFinite(value) ? value : input.min;
        } else input.value = Number.isNaN(value) ? "" : String(value);
        if (input.name === "rows") input.rows = Math.min(Math.max(value.split("\n").length, 3), 9);
      }
      const isFixed = state.schedule === OWN && !state.rows && given.length > 0; // measured, or several: shown as they are
      for (const name of ["ranks", "microbatches"]) find(`[data-control="${name}"]`).hidden = !named().length;
      find('[data-control="stages-per-rank"]').hidden = !anyTakes("stages_per_rank");
      find('[data-control="more-in-flight"]').hidden = !anyTakes("in_flight");
      find('[data-control="slices"]').hidden = form.elements.attention.closest(".pplab-control").hidden = !anyTakes("slices");
      own.hidden = state.schedule !== OWN;
      for (const part of own.querySelectorAll("label, textarea")) part.hidden = isFixed;
      const isMeasured = isFixed && !named().length && given.every(({ timeline }) => timeline);
      for (const name of TIMES) form.elements[name].closest(".pplab-control").hidden = isMeasured; // nothing takes them
    }

    const names = () => [state.schedule, state.compare].filter(Boolean);
    const isGiven = () => given.length === 1 && pplab.toCSV(given[0].schedule).trim() === state.rows.trim();
    const named = () => names().filter((name) => name !== OWN); // the sizes of own rows are theirs
    const anyTakes = (option) => named().some((name) => takes(name, option));

    /** Build, simulate and draw what the state says; the last good chart stays, dimmed, while there is none. */
    function update() {
      const began = performance.now();
      asked = 0;
      let stuck = "";
      try {
        if (problem) throw new pplab.ScheduleError(problem);
        if (state.rows.trim() && !isGiven()) given = []; // the reader has changed them
        const isOwn = state.schedule === OWN, isEmpty = isOwn && !state.rows.trim() && !given.length;
        if (!isOwn) chosen = state.schedule;
        const schedules = [...(isEmpty ? [chosen] : []), ...named()].map((name) => scheduleOf(state, name));
        if (isEmpty) form.elements.rows.placeholder = pplab.toCSV(schedules[0]);
        const mine = isOwn && !isEmpty ? ownTimelines(state, given) : { timelines: [], problem: "" };
        timelines = [...mine.timelines, ...schedules.map((schedule) => timelineOf(state, schedule))];
        stuck = mine.problem;
      } catch (wrong) {
        root.dataset.error = error.textContent = wrong.message;
        root.dataset.ready = "true";
        if (wrong.name !== "ScheduleError") throw wrong;
        return;
      }
      delete root.dataset.error;
      error.textContent = stuck;
      if (stuck) root.dataset.stuck = stuck;
      else delete root.dataset.stuck;
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

    function draw(isSame = false) {
      const left = scroll.scrollLeft;
      const { until, path, memory } = state;
      drawing = pplabChart.draw(scroll, timelines, { width: scroll.clientWidth, until: until || 0, zoom: zoomOf(state.zoom), path, memory });
      take(drawing, isSame);
      scroll.scrollLeft = left;
      drawTickets();
      const turns = () => timelines.flatMap(({ spans }) => spans.flatMap(({ start, end }) => [start, end]));
      clock.fit({ end: drawing.end, turns, told: (time) => timed(time, timelines[0], 3) }, moment ?? undefined);
      moment = null;
      if (!isSame) legend.innerHTML = pplabChart.legend(timelines);
    }

    function drawTickets() {
      const host = find(".pplab-tickets"), why = state.tickets ? pplabTickets.refusal(timelines[0]) : "";
      host.textContent = why;
      showTickets = state.tickets && !why ? pplabTickets.draw(host, drawing) : null;
    }

    function showAt(time) {
      drawing.show(time);
      showTickets?.(time);
      if (time < drawing.end) reveal(drawing.x(time));
    }

    const zoomOf = (zoom) => Math.min(Math.max(Number(zoom) || 1, 1), MOST_ZOOM);

    /** Zoom by a factor, 0 for all at once; what lies at `clientX` of the window stays there. */
    function zoomBy(factor, clientX) {
      if (!drawing || root.dataset.error) return;
      const at = clientX - scroll.getBoundingClientRect().left - pplabChart.LABELS;
      const time = (scroll.scrollLeft + at) / drawing.scale;
      state.zoom = Math.round(1000 * zoomOf(factor * zoomOf(state.zoom))) / 1000;
      draw(true);
      scroll.scrollLeft = time * drawing.scale - at;
      fill();
      clearTimeout(zoomed);
      zoomed = setTimeout(remember, 300); // browsers refuse an address that changes with every turn of a wheel
    }
    let zoomed = 0;

    live.querySelector(".pplab-zoom").addEventListener("click", ({ target }) => {
      const factor = { in: ZOOM_STEP, out: 1 / ZOOM_STEP, whole: 0 }[target.dataset.zoom];
      const { left, width } = scroll.getBoundingClientRect();
      if (factor !== undefined) zoomBy(factor, left + width / 2);
    });
    scroll.addEventListener("wheel", (event) => { // a touchpad's pinch is a wheel with ctrl
      if (!event.ctrlKey && !event.metaKey) return;
      event.preventDefault();
      zoomBy(Math.exp(-event.deltaY / (event.deltaMode ? 10 : 300)), event.clientX);
    }, { passive: false });
    pinching(scroll, zoomBy);

    const request = () => (asked = asked || requestAnimationFrame(update));

    /** Put the state into the addresses that hold it, and into the browser's history: Back leads to the one before. */
    function remember(isNew = false) {
      const before = root.dataset.state, fragment = encode(state);
      root.dataset.state = fragment;
      point(find(".pplab-open"), fragment);
      try {
        if (isPage && isNew === true) history.replaceState({ explorer: before }, ""); // other scripts may have written there
        if (isPage) history[isNew === true ? "pushState" : "replaceState"]({ explorer: fragment }, "", `#${fragment}`);
      } catch {
        // a frame of a notebook has no address of its own
      }
    }

    let touched = {};
    function changed(except) {
      problem = "";
      if (state.schedule === OWN && !state.rows && !given.length && timelines.length && except?.name !== "rows") { // something to begin with
        state.rows = pplab.toCSV(timelines[0].schedule);
      }
      fill(except);
      const now = performance.now(), isSame = except && except.name === touched.name && now - touched.at < 1000; // a slider that moves
      touched = { name: except?.name, at: now };
      remember(!isSame);
      request();
    }

    live.addEventListener("input", ({ target }) => {
      const { name, type } = target;
      if (!name) return;
      state[name] = type === "checkbox" ? target.checked : read(name, target.value);
      if (["until", "pair"].includes(name) && Number.isNaN(state[name])) state[name] = 0;
      changed(target);
    });

    /** Show what a reader opened, dropped or pasted: [{name, text}], of CSV or of JSON. */
    function open(files) {
      let opened = [];
      try {
        for (const { name, text } of files) opened.push(...recordsIn(text, name));
      } catch (wrong) {
        if (!(wrong instanceof pplab.ScheduleError)) throw wrong;
        state.schedule = OWN;
        changed();
        problem = files.length > 1 || files[0].name ? `${files.map(({ name }) => name).join(", ")}: ${wrong.message}` : wrong.message;
        return;
      }
      const [first] = opened, isRows = opened.length === 1 && !first.timeline;
      given = opened;
      Object.assign(state, { schedule: OWN, rows: isRows ? pplab.toCSV(first.schedule) : "" });
      changed();
    }

    const chooser = find("input[type=file]");
    find('[data-do="open"]').addEventListener("click", () => chooser.click());
    const openFiles = async (files) => open(await Promise.all([...files].map(async (file) => ({ name: file.name, text: await file.text() }))));
    chooser.addEventListener("change", async () => {
      await openFiles(chooser.files);
      chooser.value = "";
    });
    root.addEventListener("dragover", (event) => event.preventDefault());
    root.addEventListener("drop", (event) => {
      event.preventDefault();
      if (event.dataTransfer.files.length) openFiles(event.dataTransfer.files);
      else if (event.dataTransfer.getData("text")) open([{ name: "", text: event.dataTransfer.getData("text") }]);
    });
    scroll.addEventListener("paste", (event) => open([{ name: "", text: event.clipboardData.getData("text") }]));

    form.addEventListener("submit", (event) => event.preventDefault());
    form.addEventListener("reset", (event) => {
      event.preventDefault();
      state = { ...initial };
      moment = state.time || Infinity;
      given = givenTo(root);
      changed();
    });
    text.addEventListener("toggle", () => timelines.length && settle());

    if (isPage) {
      addEventListener("popstate", ({ state: kept }) => { // Back, Forward, or a link to a state
        if (!kept?.explorer && !location.hash.includes("=")) return;
        state = kept?.explorer ? decode(kept.explorer) : decode(location.hash.slice(1), initial);
        moment = state.time || Infinity;
        problem = "";
        root.dataset.state = encode(state);
        fill();
        request();
        if (kept) return; // the browser scrolls
        const { top, bottom } = root.getBoundingClientRect();
        if (top < 0 || bottom > innerHeight) root.scrollIntoView({ block: "start" }); // smooth or not as the page's style says
      });
    }
    let width = 0;
    new ResizeObserver(() => {
      if (scroll.clientWidth === width || !timelines.length) return;
      width = scroll.clientWidth;
      draw(true);
    }).observe(scroll);

    if (state.schedule === OWN && !state.rows && given.length === 1 && !given[0].timeline) state.rows = pplab.toCSV(given[0].schedule);
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
