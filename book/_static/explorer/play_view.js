// The game's view: a level, a tray of actions for each rank, the chart of what is placed, the score. The rules are play.js.

(() => {
  "use strict";

  const { FILL, NAME, ink, short, escaped } = pplabChart;
  const { play } = pplab;
  const STORE = "pplab-play"; // moves by level, and which levels are solved, kept in this browser

  function stored() {
    try {
      return JSON.parse(localStorage.getItem(STORE)) || {};
    } catch {
      return {}; // no storage, or not ours: the game starts anew
    }
  }

  function store(all) {
    try {
      localStorage.setItem(STORE, JSON.stringify(all));
    } catch {
      // no storage: the game goes on, and is forgotten with the page
    }
  }

  /** What is placed as something to draw; once complete, it is a simulation like any other. */
  function drawable(state) {
    const { level, spans } = state;
    if (play.isComplete(state)) return pplab.simulate(play.schedule(state), level.costs);
    const byRank = Array.from({ length: level.numRanks }, (_, rank) => spans.filter((span) => span.rank === rank));
    const idle = byRank.flatMap((row, rank) => row.flatMap(({ start }, i) => {
      const end = i ? row[i - 1].end : 0;
      return start > end ? [{ rank, start: end, end: start, part: i ? "wait" : "fill" }] : [];
    }));
    const { numRanks, numStages, numMicrobatches } = level;
    const title = `${spans.length} of ${level.numActions} actions placed`;
    const makespan = play.score(state).makespan;
    return { schedule: { numRanks, numStages, numMicrobatches }, byRank, spans, idle, title, makespan, peakInFlight: byRank.map(() => 0) };
  }

  function game(root) {
    const live = document.createElement("div");
    live.className = "pplab-live";
    live.innerHTML =
      `<div class="pplab-controls"><span class="pplab-control"><label for="pplab-level">level</label><select id="pplab-level"></select></span>` +
      `<span class="pplab-buttons">${["undo", "hint", "start again", "next level"].map((name) => `<button type="button" data-do="${name}">${name}</button>`).join("")}</span></div>` +
      `<p class="pplab-task"></p><div class="pplab-scroll" tabindex="0" role="group" aria-label="Chart of what is placed"></div>` +
      `<ul class="pplab-legend"></ul><p class="pplab-says" role="status"></p><div class="pplab-tray"></div>` +
      `<div class="pplab-wide"><table class="pplab-figures"></table></div>` +
      `<p class="pplab-buttons"><a class="pplab-csv" download="mine.csv">mine.csv</a><span class="pplab-python">: <code></code></span>` +
      `<label class="pplab-check"><input type="checkbox" class="pplab-reference"> show the reference</label></p>`;
    root.append(live);
    const [choice, task, scroll, legend, says, tray, figures, csv, python, reference] = [
      "select", ".pplab-task", ".pplab-scroll", ".pplab-legend", ".pplab-says", ".pplab-tray", ".pplab-figures", ".pplab-csv", ".pplab-python", ".pplab-reference",
    ].map((selector) => live.querySelector(selector));
    const button = (name) => live.querySelector(`[data-do="${name}"]`);
    const kept = stored();
    let state;

    const wanted = () => new URLSearchParams(location.hash.slice(1)).get("level");
    const known = (id) => play.levels.find((level) => level.id === id);

    function open(level) {
      state = play.replay(level, kept[level.id]?.moves || []);
      reference.checked = false;
      show(level.cap ? `No rank may hold more forwards than ${level.cap.join(", ")}.` : "");
    }

    function show(message) {
      const { level } = state, score = play.score(state);
      const isSolved = score.isComplete && score.isFast && score.isLean;
      kept[level.id] = { moves: state.moves, isSolved: isSolved || Boolean(kept[level.id]?.isSolved) };
      store(kept);
      choice.innerHTML = play.levels.map(({ id, title }, i) =>
        `<option value="${id}"${id === level.id ? " selected" : ""}>${i + 1}. ${escaped(title)}${kept[id]?.isSolved ? " ✓" : ""}</option>`).join("");
      const { forward, backwardInput, backwardWeight, latency } = level.costs;
      const b = level.costs.of("B", 0);
      const takes = level.kinds.includes("B") ? `F takes ${short(forward)}, B ${short(b)}` : `F takes ${short(forward)}, I ${short(backwardInput)}, W ${short(backwardWeight)}`;
      task.textContent = `${level.text} ${takes}${latency ? `, a message ${short(latency)}` : ""}.`;
      draw();
      drawTray();
      figures.innerHTML = figuresHTML(score);
      button("undo").disabled = button("start again").disabled = !state.moves.length;
      button("hint").disabled = score.isComplete;
      button("next level").hidden = !isSolved || level === play.levels[play.levels.length - 1];
      csv.hidden = python.hidden = !score.isComplete;
      python.lastChild.textContent = level.inPython;
      csv.href = `data:text/csv;charset=utf-8,${encodeURIComponent(play.toCSV(state))}`;
      const stuck = play.isStuck(state) ? "Nothing more can be placed: take back a move." : "";
      const solved = isSolved ? "Solved. " : "";
      says.textContent = [message, stuck, score.isComplete ? solved + score.text : ""].filter(Boolean).join(" ");
      Object.assign(root.dataset, {
        level: level.id, placed: state.moves.length, makespan: score.makespan, complete: score.isComplete,
        fast: score.isFast, lean: score.isLean, solved: isSolved, ready: true,
      });
    }

    function draw() {
      const { level } = state, mine = drawable(state);
      const shown = reference.checked ? [mine, level.referenceTimeline] : [mine];
      const { makespan } = level.par;
      pplabChart.draw(scroll, shown, { width: scroll.clientWidth, until: makespan, memory: false, par: makespan });
      legend.innerHTML = `${pplabChart.legend(shown)}<li><i class="pplab-parline"></i>the reference's makespan</li>`;
    }

    /** Buttons for what isn't placed, a line for each rank. One that can't come next stays, and says why when pressed. */
    function drawTray() {
      const { level } = state, left = play.remaining(state);
      tray.innerHTML = Array.from({ length: level.numRanks }, (_, rank) => {
        const holds = play.held(state, rank).length, most = level.cap ? ` of ${level.cap[rank]}` : "";
        const buttons = left.filter((each) => each.rank === rank).map(({ text, refused }) => {
          const { kind, microbatch, stage } = pplab.parse(text).parts[0];
          const name = `${text}: ${NAME[kind]} of microbatch ${microbatch} on stage ${stage}${refused ? ", not yet" : ""}`;
          return `<button type="button" data-rank="${rank}" data-text="${text}" aria-label="${name}"` +
            `${refused ? ` class="pplab-not" title="${escaped(refused)}"` : ""} style="--pplab-kind:${FILL[kind]};--pplab-ink:${ink(FILL[kind])}">${text}</button>`;
        });
        return `<div role="group" aria-label="rank ${rank}, holds ${holds}${most}"><span>rank ${rank} <small>holds ${holds}${most}</small></span>${buttons.join("")}</div>`;
      }).join("");
    }

    function figuresHTML({ isComplete, makespan, peakInFlight, spanBubbleFraction, par }) {
      const rows = [
        ["makespan", "from the first start to the last end", short(makespan), short(par.makespan)],
        ["peak in flight", "forwards held at once, per rank", peakInFlight.join(", "), par.peakInFlight.join(", ")],
        ["span bubble", "idle, of the longest span of any rank", isComplete ? spanBubbleFraction.toFixed(4) : "–", par.spanBubbleFraction.toFixed(4)],
      ];
      const body = rows.map(([name, of, mine, theirs]) => `<tr><th scope="row">${name}<small>${of}</small></th><td>${mine}</td><td>${theirs}</td></tr>`);
      const name = state.level.reference.name;
      return `<thead><tr><td></td><th scope="col">yours</th><th scope="col">${escaped(name)}</th></tr></thead><tbody>${body.join("")}</tbody>`;
    }

    function place(rank, text) {
      const at = [...tray.children[rank].querySelectorAll("button")].findIndex((b) => b.dataset.text === text);
      const { state: next, refused } = play.place(state, rank, text);
      root.dataset.refused = refused || "";
      if (refused) {
        says.textContent = refused;
        return;
      }
      state = next;
      const { start, end } = state.spans[state.spans.length - 1];
      show(`${text} runs on rank ${rank} from ${short(start)} to ${short(end)}.`);
      const buttons = tray.children[rank].querySelectorAll("button"); // the one that had the focus is gone
      const following = buttons[Math.min(at, buttons.length - 1)] || tray.querySelector("button") || button("undo");
      following.focus({ preventScroll: true });
    }

    tray.addEventListener("click", ({ target }) => {
      const { rank, text } = target.dataset;
      if (text) place(Number(rank), text);
    });
    tray.addEventListener("keydown", (event) => {
      const { target, key } = event, [lines, line] = [[...tray.children], target.parentElement];
      const step = { ArrowLeft: [0, -1], ArrowRight: [0, 1], ArrowUp: [-1, 0], ArrowDown: [1, 0] }[key];
      if (!step || !target.dataset.text) return;
      event.preventDefault();
      const at = [...line.querySelectorAll("button")].indexOf(target) + step[1];
      const buttons = lines[lines.indexOf(line) + step[0]]?.querySelectorAll("button") || [];
      buttons[Math.min(Math.max(at, 0), buttons.length - 1)]?.focus();
    });
    live.addEventListener("click", ({ target }) => {
      const what = target.dataset.do;
      if (what === "undo") {
        const [, text] = state.moves[state.moves.length - 1];
        state = play.undo(state);
        show(`${text} is taken back.`);
      } else if (what === "start again") {
        state = play.start(state.level);
        show("");
      } else if (what === "next level") {
        go(play.levels[play.levels.indexOf(state.level) + 1]);
      } else if (what === "hint") {
        const found = play.hint(state);
        if (!found) return;
        says.textContent = `You could place ${found.text} on rank ${found.rank}.`;
        tray.querySelector(`[data-text="${found.text}"]`).focus();
      }
    });
    choice.addEventListener("change", () => go(known(choice.value)));
    reference.addEventListener("change", draw);
    addEventListener("hashchange", () => known(wanted()) && wanted() !== state.level.id && open(known(wanted())));

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
    open(known(wanted()) || known(root.dataset.level) || play.levels[0]);
    width = scroll.clientWidth;
  }

  const start = () => document.querySelectorAll(".pplab-play").forEach(game);
  if (document.readyState === "loading") document.addEventListener("DOMContentLoaded", start);
  else start();
})();
