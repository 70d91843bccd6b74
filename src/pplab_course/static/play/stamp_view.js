// The view of stamp.js: the actions of one microbatch, what an interval looks like, the block and the chart that comes of
// it. A `.pplab-stamp` with data-level is that one level, in a chapter; one without has them all. A page may hold several.

(() => {
  "use strict";

  const { FILL, NAME, ink } = pplabChart;
  const { stamp } = pplab;
  const memory = pplabGame.memory("pplab-stamp"); // by level its starts, its interval and whether it was ever solved
  const MOST = 99; // the latest start, and the longest interval

  const isUnit = (x) => Number.isInteger(x) && x >= 0 && x <= MOST;

  /** The state that the browser has kept of a level, or its start. */
  function kept(level) {
    const fresh = stamp.start(level), { starts, interval } = memory.all()[level.id] || {};
    const isOurs = starts && Object.keys(fresh.starts).every((key) => isUnit(starts[key])) && isUnit(interval) && interval > 0;
    if (!isOurs) return fresh;
    return { ...fresh, interval, starts: Object.fromEntries(Object.keys(fresh.starts).map((key) => [key, starts[key]])) };
  }

  /** The block alone, as something to draw. */
  function drawable({ level, starts }) {
    const keys = Object.keys(starts).sort((a, b) => starts[a] - starts[b]);
    const rows = [...new Set(level.placement)].sort().map((rank) => keys.filter((key) => stamp.rankOf({ level }, key) === rank));
    const begins = rows.flat().map((key) => starts[key]);
    const timeline = pplab.recorded(pplab.schedule(rows.map((row) => row.map((key) => `${key}0`))), begins, begins.map((x) => x + 1));
    return Object.assign(timeline, { idle: [], title: "your block: one microbatch" });
  }

  function game(root) {
    const only = root.dataset.level && stamp.level(root.dataset.level), live = pplabGame.begin(root, only);
    const find = (selector) => live.querySelector(selector);
    const [choice, task, tray, along, interval, says, beat, whole, view, legend, figures, python] = [
      ".pplab-level", ".pplab-task", ".pplab-tray", ".pplab-along", ".pplab-interval", ".pplab-says", ".pplab-beat", ".pplab-made",
      ".pplab-view", ".pplab-legend", ".pplab-figures", ".pplab-more code",
    ].map(find);
    const [one, many] = live.querySelectorAll(".pplab-scroll");
    const does = (name) => find(`[data-do="${name}"]`);
    let state, judged, selected, width = 0;

    function open(level) {
      state = kept(level);
      selected = Object.keys(state.starts)[0];
      view.previousElementSibling.querySelector("span").textContent = level.numMicrobatches;
      show();
    }

    /** Show the state; `message` says what was done to it. */
    function show(message = "") {
      const { level, starts } = state;
      judged = stamp.judge(state);
      const { problem, isSolved, text } = judged, wasSolved = Boolean(memory.all()[level.id]?.isSolved);
      memory.keep(level.id, { starts, interval: state.interval, isSolved: isSolved || wasSolved });
      if (choice) choice.innerHTML = pplabGame.options(stamp.levels, level, memory.all());
      task.textContent = level.task;
      if (document.activeElement !== interval) interval.value = state.interval;
      const beats = stamp.beat(state);
      drawTray(beats);
      drawBeat(beats);
      draw();
      figures.innerHTML = problem ? "" : figuresHTML();
      whole.hidden = Boolean(problem);
      python.textContent = stamp.inPython(state);
      does("next level").hidden = only || !isSolved || level === stamp.levels[stamp.levels.length - 1];
      says.textContent = [message, text].filter(Boolean).join(" ");
      says.classList.toggle("pplab-end", isSolved);
      Object.assign(root.dataset, {
        shows: level.id, selected, start: starts[selected], makespan: judged.makespan ?? "", peak: judged.peak?.join() ?? "",
        problem: problem ?? "", solved: isSolved, ready: true,
      });
    }

    /** Buttons for the actions, a line for each rank, in the order of their starts when the level began. */
    function drawTray(beats) {
      const meets = new Set(beats.flat().filter((keys) => keys.length > 1).flat());
      const hadFocus = tray.contains(document.activeElement);
      tray.innerHTML = beats.map((_, rank) => {
        const own = Object.keys(state.starts).filter((key) => stamp.rankOf(state, key) === rank);
        const buttons = own.map((key) => {
          const kind = key.slice(-1), at = state.starts[key];
          const name = `${key}, ${NAME[kind]} on stage ${key.slice(0, -1)}, starts at ${at}${meets.has(key) ? ", and meets another" : ""}`;
          return `<button type="button" data-key="${key}" aria-label="${name}" aria-pressed="${key === selected}"${meets.has(key) ? ' class="pplab-meets"' : ""}` +
            ` style="--pplab-kind:${FILL[kind]};--pplab-ink:${ink(FILL[kind])}">${key} <small>at ${at}</small></button>`;
        });
        return `<div role="group" aria-label="rank ${rank}"><span>rank ${rank}</span>${buttons.join("")}</div>`;
      }).join("");
      if (hadFocus) tray.querySelector(`[data-key="${selected}"]`).focus({ preventScroll: true });
      does("earlier").disabled = !state.starts[selected];
      does("later").disabled = Math.max(...Object.values(state.starts)) >= MOST;
      for (const name of ["earlier", "later"]) does(name).textContent = `${selected} ${name}`;
    }

    /** What each rank does in every interval: two actions in one unit meet, and W runs in those that are free. */
    function drawBeat(beats) {
      const head = beats[0].map((_, unit) => `<th scope="col">${unit}</th>`).join("");
      const cell = (keys) => {
        if (!keys.length) return `<td class="pplab-free">·</td>`;
        return `<td${keys.length > 1 ? ' class="pplab-meets"' : ""}>${keys.map((key) => `<b style="background:${FILL[key.slice(-1)]};color:${ink(FILL[key.slice(-1)])}">${key}</b>`).join(" ")}</td>`;
      };
      beat.innerHTML = `<caption>Every interval, unit by unit: W runs where nothing stands</caption><thead><tr><td></td>${head}</tr></thead><tbody>` +
        `${beats.map((row, rank) => `<tr><th scope="row">rank ${rank}</th>${row.map(cell).join("")}</tr>`).join("")}</tbody>`;
    }

    function draw() {
      const { level } = state, block = drawable(state);
      width = live.clientWidth;
      const drawing = pplabChart.draw(one, [block], { width, memory: false, until: Math.max(block.makespan, judged.problem ? 0 : level.makespan) });
      const span = block.spans.find(({ item }) => item.text === `${selected}0`);
      drawing.select({ chart: drawing.charts[0], span });
      if (judged.problem) return;
      const timeline = stamp[view.value](state, level.numMicrobatches);
      timeline.title = `makespan ${timeline.makespan}`;
      const caps = timeline.peakInFlight.map(() => level.cap);
      whole.hidden = false; // its width is asked for
      pplabChart.draw(many, [timeline], { width, until: level.makespan, par: level.makespan, caps });
      legend.innerHTML = `${pplabChart.legend([timeline])}<li><i class="pplab-parline"></i>finish by ${level.makespan}</li>` +
        `<li><i class="pplab-heldbox"></i>forwards held</li><li><i class="pplab-capline"></i>memory for them</li>`;
    }

    function figuresHTML() {
      const { level, interval } = state, { lifespans, bound, peak, makespan } = judged;
      const lives = peak.map((_, rank) => lifespans.filter((_, stage) => level.placement[stage] === rank).map((x) => `⌈${x}/${interval}⌉`).join(" + "));
      const rows = peak.map((held, rank) => `<tr><th scope="row">rank ${rank}</th><td>${lives[rank]} = ${bound[rank]}</td><td>${held}</td><td>${level.cap}</td></tr>`);
      return `<thead><tr><td></td><th scope="col">lifespan / interval</th><th scope="col">held</th><th scope="col">limit</th></tr></thead>` +
        `<tbody>${rows.join("")}<tr><th scope="row">makespan</th><td></td><td>${makespan}</td><td>${level.makespan}</td></tr></tbody>`;
    }

    function move(by) {
      const next = stamp.move(state, selected, by, !along.checked);
      if (next === state || Math.max(...Object.values(next.starts)) > MOST) return;
      state = next;
      show(`${selected} starts at ${state.starts[selected]}.`);
    }

    function choose(key) {
      selected = key;
      show();
    }

    tray.addEventListener("click", ({ target }) => {
      const key = target.closest("button")?.dataset.key;
      if (!key) return;
      target.closest("button").focus({ preventScroll: true });
      choose(key);
    });
    tray.addEventListener("keydown", (event) => {
      const key = event.target.dataset.key, moves = { "+": 1, "=": 1, "-": -1 }[event.key];
      const next = key && pplabGame.beside(tray, event.target, event.key);
      if (!key || !(next || moves) || event.ctrlKey || event.metaKey || event.altKey) return;
      event.preventDefault();
      if (next) return choose(next.dataset.key);
      selected = key;
      move(moves);
    });
    live.addEventListener("click", ({ target }) => {
      const what = target.dataset.do;
      if (what === "earlier") move(-1);
      else if (what === "later") move(1);
      else if (what === "start again") {
        state = stamp.start(state.level);
        choose(Object.keys(state.starts)[0]);
      } else if (what === "next level") open(stamp.levels[stamp.levels.indexOf(state.level) + 1]);
    });
    interval.addEventListener("input", () => {
      const units = Number(interval.value);
      if (!isUnit(units) || units < 1) {
        says.textContent = `An interval is a whole number of units from 1 to ${MOST}, not ${interval.value || "nothing"}.`;
        return;
      }
      state = { ...state, interval: units };
      show(`The next microbatch follows ${units} later.`);
    });
    interval.addEventListener("blur", () => (interval.value = state.interval));
    choice?.addEventListener("change", () => open(stamp.level(choice.value)));
    view.addEventListener("change", draw);
    new ResizeObserver(() => live.clientWidth !== width && draw()).observe(live);
    open(only || stamp.levels[0]);
  }

  pplabGame.start(".pplab-stamp", game);
})();
