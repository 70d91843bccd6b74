// The game's view: a level, the chart of what is placed, buttons for what may come next, the score. The rules are play.js.
// A `.pplab-play` with data-level is that one level, in a chapter; one without is the whole game, whose level is in the
// page's address. A page may hold several.

(() => {
  "use strict";

  const { FILL, NAME, ink, short, percent, escaped, listed } = pplabChart;
  const { play } = pplab;
  const memory = pplabGame.memory("pplab-play"); // its moves, its hints and whether it was ever found

  /** What is placed as something to draw; once complete, it is a simulation like any other. */
  function drawable({ level, timeline }, { isComplete, peakInFlight }) {
    if (isComplete) return timeline;
    const schedule = { ...timeline.schedule, numStages: level.numStages };
    const idle = pplab.idle(timeline).filter(({ part }) => part !== "drain");
    return { ...timeline, schedule, idle, peakInFlight, title: `${timeline.spans.length} of ${level.numActions} actions placed` };
  }

  /** What a player who has placed nothing yet needs to know. */
  const howTo = ({ kinds, numStages, numRanks }) =>
    `Press an action to place it. 0F2 is the forward of microbatch 2 on ${numStages > numRanks ? "stage" : "rank"} 0, and ${kinds.includes("B") ? "0B2 its backward" : "0I2 and 0W2 are the halves of its backward"}. ` +
    "If it is only outlined, it can't run yet: press it, and the game says why.";

  function game(root) {
    const only = root.dataset.level && play.level(root.dataset.level);
    const live = pplabGame.begin(root, only);
    const [choice, task, scroll, legend, says, tray, figures, csv, python, reference] = [
      "select", ".pplab-task", ".pplab-scroll", ".pplab-legend", ".pplab-says", ".pplab-tray", ".pplab-figures", ".pplab-csv", ".pplab-python", ".pplab-reference",
    ].map((selector) => live.querySelector(selector));
    const button = (name) => live.querySelector(`[data-do="${name}"]`), buttons = () => [...tray.querySelectorAll("button")];
    let state;

    /** Show the level that the address names, or the first one; say so when it names none. */
    function arrive() {
      const asked = new URLSearchParams(location.hash.slice(1)).get("level"), found = play.level(asked);
      if (found && found === state?.level) return;
      open(found || play.levels[0], asked && !found ? `There is no level ${asked}: this is the first one.` : "");
    }

    function open(level, message = "") {
      const { moves = [], hints = [] } = memory.all()[level.id] || {};
      state = play.replay(level, moves, hints);
      reference.checked = false;
      show(message);
    }

    function show(message) {
      const { level } = state, score = play.score(state), { isComplete, isSolved, isFound } = score;
      const wasFound = Boolean(memory.all()[level.id]?.isSolved); // the name that browsers have kept since the first edition
      memory.keep(level.id, { moves: state.moves, hints: state.hints, isSolved: isFound || wasFound });
      if (choice) choice.innerHTML = pplabGame.options(play.levels, level, memory.all());
      task.textContent = level.task;
      if (!isSolved) reference.checked = false; // it is the answer
      draw();
      drawTray();
      tray.hidden = isComplete;
      figures.innerHTML = figuresHTML(score);
      button("undo").disabled = button("start again").disabled = !state.moves.length;
      button("hint").disabled = isComplete;
      button("next level").hidden = only || !isSolved || level === play.levels[play.levels.length - 1];
      reference.parentElement.hidden = !isSolved;
      reference.nextElementSibling.textContent = `compare with ${level.reference.name}`;
      python.hidden = only || !isComplete;
      python.lastChild.textContent = level.inPython;
      csv.href = `data:text/csv;charset=utf-8,${encodeURIComponent(play.toCSV(state))}`;
      const stuck = play.isStuck(state) ? "Nothing more can be placed: take back a move." : "";
      const how = !message && !state.moves.length ? howTo(level) : "";
      says.textContent = [message, how, stuck, isComplete ? score.text : ""].filter(Boolean).join(" ");
      says.classList.toggle("pplab-end", isSolved);
      Object.assign(root.dataset, {
        shows: level.id, placed: state.moves.length, hints: state.hints.length, makespan: score.makespan,
        complete: isComplete, solved: isSolved, found: isFound, ready: true,
      });
    }

    function draw() {
      const { level } = state, mine = drawable(state, play.score(state));
      const shown = reference.checked ? [mine, level.referenceTimeline] : [mine];
      const { par: { makespan: par }, cap: caps } = level;
      pplabChart.draw(scroll, shown, { width: scroll.clientWidth, until: par, memory: Boolean(caps), par, caps });
      legend.innerHTML =
        `${pplabChart.legend(shown)}<li><i class="pplab-parline"></i>finish ${level.isBefore ? "before" : "by"} ${short(par)}</li>` +
        (caps ? `<li><i class="pplab-heldbox"></i>forwards held</li><li><i class="pplab-capline"></i>memory for them</li>` : "");
    }

    /** A line for each stage of each rank, and in it a button for each kind: the next microbatch's. They keep their places to
     *  the end, and one that can't come next says why when pressed. */
    function drawTray() {
      const { level } = state, focused = buttons().indexOf(document.activeElement);
      tray.style.cssText = `--pplab-kinds:${level.kinds.length};--pplab-stages:${level.numStages / level.numRanks}`;
      tray.innerHTML = play.slots(state).map((slots, rank) => {
        const holds = level.cap ? `holds ${play.held(state, rank).length} of ${level.cap[rank]}` : "";
        const drawn = slots.map(({ text, kind, stage, microbatch, isOver, refused }) => {
          const name = `${text}: ${NAME[kind]} of microbatch ${microbatch} on stage ${stage}${isOver ? ", the last, is placed" : refused ? ", not yet" : ""}`;
          return `<button type="button" data-rank="${rank}" data-text="${text}" aria-label="${name}"` +
            `${refused ? ` class="pplab-not" title="${escaped(refused)}"` : ""} style="--pplab-kind:${FILL[kind]};--pplab-ink:${ink(FILL[kind])}">${isOver ? "✓" : text}</button>`;
        });
        return `<div role="group" aria-label="rank ${rank} ${holds}"><span>rank ${rank} <small>${holds}</small></span>${drawn.join("")}</div>`;
      }).join("");
      buttons()[focused]?.focus({ preventScroll: true }); // it has been made anew
    }

    /** The reference's name, its peaks and its bubble are part of the answer, so they come when it is found. */
    function figuresHTML({ isComplete, isSolved, makespan, peakInFlight, bubbleFraction, spanBubbleFraction, par }) {
      const { level } = state;
      const asked = `${level.isBefore && !isSolved ? "before " : ""}${short(par.makespan)}`;
      const most = isSolved ? par.peakInFlight : level.cap;
      const rows = [["makespan", "from the first start to the last end", short(makespan), asked]];
      if (level.cap) rows.push(["forwards held", "at most, per rank", peakInFlight.join(", "), most.join(", ")]);
      if (level.isAboutSpan) rows.push(["span bubble", "idle between a rank's first action and its last", isComplete ? percent(spanBubbleFraction) : "–", percent(par.spanBubbleFraction)]);
      else if (isSolved) rows.push(["bubble fraction", "idle, of all rank-time", percent(bubbleFraction), percent(par.bubbleFraction)]);
      const body = rows.map(([name, of, mine, theirs]) => `<tr><th scope="row">${name}<small>${of}</small></th><td>${mine}</td><td>${theirs}</td></tr>`);
      const other = isSolved ? escaped(level.reference.name) : "asked for";
      return `<thead><tr><td></td><th scope="col">yours</th><th scope="col">${other}</th></tr></thead><tbody>${body.join("")}</tbody>`;
    }

    function place(rank, text) {
      const { state: next, refused } = play.place(state, rank, text);
      root.dataset.refused = refused || "";
      if (refused) {
        says.textContent = refused;
        return;
      }
      state = play.settle(next);
      const { start, end } = play.spanOf(state, text), forced = state.moves.slice(next.moves.length).map(([, each]) => each);
      const told = forced.length ? ` ${listed(forced)} followed by ${forced.length > 1 ? "themselves" : "itself"}, without an alternative.` : "";
      show(`${text} runs on rank ${rank} from ${short(start)} to ${short(end)}.${told}`);
      if (tray.hidden) button(button("next level").hidden ? "undo" : "next level").focus({ preventScroll: true });
    }

    tray.addEventListener("click", ({ target }) => {
      const { rank, text } = target.dataset;
      if (text) place(Number(rank), text);
    });
    tray.addEventListener("keydown", (event) => {
      const next = event.target.dataset.text && pplabGame.beside(tray, event.target, event.key);
      if (!next) return;
      event.preventDefault();
      next.focus();
    });
    live.addEventListener("click", ({ target }) => {
      const what = target.dataset.do;
      if (what === "undo") {
        const { moves } = state;
        state = play.undo(state);
        const [[, text], ...others] = moves.slice(state.moves.length);
        show(`${text} is taken back${others.length ? `, and so is what followed by itself: ${listed(others.map(([, each]) => each))}` : ""}.`);
      } else if (what === "start again") {
        state = play.start(state.level); // and no hint is taken
        show("");
      } else if (what === "next level") {
        go(play.levels[play.levels.indexOf(state.level) + 1]);
      } else if (what === "hint") {
        const found = play.hint(state);
        if (!found) return;
        state = found.state;
        show(`You could place ${found.text} on rank ${found.rank}.`);
        tray.querySelector(`[data-text="${found.text}"]`).focus({ preventScroll: true });
      }
    });
    choice?.addEventListener("change", () => go(play.level(choice.value)));
    reference.addEventListener("change", draw);
    if (!only) addEventListener("hashchange", arrive);

    function go(level) {
      history.replaceState(null, "", `#level=${level.id}`);
      open(level);
    }

    let width = 0;
    new ResizeObserver(() => {
      if (scroll.clientWidth === width) return;
      width = scroll.clientWidth;
      draw();
    }).observe(scroll);
    if (only) open(only);
    else arrive();
    width = scroll.clientWidth;
  }

  // As explorer.js's links: before the page is loaded, the theme takes a link's fragment for a selector, and fails.
  addEventListener("load", () => setTimeout(() => document.querySelectorAll(".pplab-play[data-level]").forEach((root) => {
    const link = root.querySelector("a.pplab-open");
    if (link) link.href += `#level=${root.dataset.level}`;
  })));

  pplabGame.start(".pplab-play", game);
})();
