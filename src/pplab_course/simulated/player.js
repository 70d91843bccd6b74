// The debugger's view: `told` has one run of a file, or two (sends that wait, and sends that don't). A run has events in the order of
// time, [rank, time, kind, lines from inside to outside, number of message or action, start], and messages, [rank, peer, kind, event that
// posted it, number of its match, when posted, when done, samples].
"use strict";
(() => {
  const root = document.querySelector(".pplab-debugger");
  const MESSAGE = new Set(["post", "stand", "go", "F", "B", "fail", "end"]);
  const LANE = 62, LEFT = 52, TOP = 18, BAR = 26;
  let run = told.runs[0], at = 0, guessing = false, score = [0, 0];

  try { // the book's own theme; the rest is the frame's
    const { theme } = parent.document.documentElement.dataset;
    if (parent !== window && theme) document.documentElement.dataset.theme = theme;
  } catch { /* a frame that may not look around */ }

  const make = (tag, properties = {}, ...children) => {
    const made = Object.assign(document.createElement(tag), properties);
    made.append(...children);
    return made;
  };
  const button = (text, label, act) => {
    const made = make("button", { type: "button", textContent: text, title: label, onclick: act });
    made.setAttribute("aria-label", label);
    return made;
  };
  const escaped = (text) => String(text).replace(/[&<>]/g, (sign) => ({ "&": "&amp;", "<": "&lt;", ">": "&gt;" })[sign]);
  const colour = (rank) => `var(--rank-${rank})`;
  const code = (line) => run.source[line - 1].split("  #")[0].trim();

  // ---- what is always there -------------------------------------------------------------------------------------------
  const verdict = make("div", { className: "verdict" });
  const slider = make("input", { type: "range", min: 0, oninput: () => show(+slider.value) });
  slider.setAttribute("aria-label", "moment of the run");
  const time = make("span");
  const who = make("select");
  who.setAttribute("aria-label", "whose lines are stepped through");
  const sends = make("input", { type: "checkbox", onchange: () => open(told.runs[sends.checked ? 0 : 1], true) });
  const guesses = make("input", { type: "checkbox", onchange: () => { guessing = guesses.checked; ask(null); } });
  const guess = make("div", { className: "guess", hidden: true });
  guess.setAttribute("aria-live", "polite");
  const listing = make("div", { className: "code", tabIndex: 0 });
  listing.setAttribute("aria-label", "the file, with a mark at each rank's line");
  const lanes = make("div", { className: "lanes", tabIndex: 0 });
  const stands = make("ul", { className: "stands" });
  stands.setAttribute("aria-live", "polite");
  const printed = make("pre");
  const bar = make("div", { className: "bar" },
    button("|◀", "to the start (Home)", () => show(0)),
    button("◀◀", "back to the message before (Shift and left)", () => step(-1, true)),
    button("◀", "a line back (left)", () => step(-1)),
    slider,
    button("▶", "a line on (right)", () => step(1)),
    button("▶▶", "on to the next message (Shift and right)", () => step(1, true)),
    button("▶|", "to the end (End)", () => show(run.events.length - 1)),
    who, time);
  const options = make("div", { className: "bar" }, make("label", {}, guesses, " guess who goes on before each message"));
  if (told.runs.length > 1) options.append(make("label", {}, sends, " sends wait for their receive"));
  if (told.link) options.append(make("a", { href: told.link, target: "_blank", textContent: "a link to this run" }));
  root.append(verdict, bar, options, guess, make("div", { className: "both" }, listing, make("div", {}, lanes, stands, printed)));

  // ---- drawing --------------------------------------------------------------------------------------------------------
  let scale, width, byRank, marks = [];
  const x = (t) => LEFT + t * scale, y = (rank) => TOP + rank * LANE;

  /** Show another run, at its end; `near` keeps the moment. */
  function open(chosen, near = false) {
    const moment = near ? run.events[at][1] : Infinity;
    run = chosen;
    sends.checked = run.waits;
    byRank = Array.from({ length: run.P }, () => []);
    run.events.forEach(([rank], i) => byRank[rank].push(i));
    const last = Math.max(1e-9, run.events.at(-1)[1]);
    const shortest = run.events.reduce((least, [, t, kind, , , start]) => kind === "F" && t > start ? Math.min(least, t - start) : least, last);
    width = Math.max(420, Math.min(6000, last / shortest * 26));
    scale = width / last;
    verdict.className = `verdict ${run.right ? "right" : ""}`;
    const [first, ...more] = run.says, shown = run.events.filter((event) => event[2] === "line").length;
    if (run.circle.length) more.push("So the circle is closed: this is a deadlock.");
    more.push(...run.hints);
    if (shown < run.lines) more.push(`Of the ${run.lines.toLocaleString("en")} lines that have run, the debugger shows ${shown.toLocaleString("en")}: the first and the last ones.`);
    verdict.replaceChildren(make("p", {}, make("strong", {}, `${run.right ? "✓" : "✗"} ${first}`)), ...more.map((words) => make("p", { textContent: words })));
    listing.replaceChildren(...run.source.map((line, i) => make("div", {}, make("i", { textContent: i + 1 }), line || " ")));
    who.replaceChildren(new Option("all ranks", ""), ...byRank.map((_, rank) => new Option(`rank ${rank}`, rank)));
    slider.max = run.events.length - 1;
    const then = run.events.findLastIndex((event) => event[1] <= moment);
    show(near ? Math.max(0, then) : run.events.length - 1);
  }

  function arrow(x1, y1, x2, y2, style) {
    const angle = Math.atan2(y2 - y1, x2 - x1), tip = (turn) => `${x2 - 6 * Math.cos(angle + turn)},${y2 - 6 * Math.sin(angle + turn)}`;
    return `<path d="M${x1},${y1}L${x2},${y2}M${tip(0.45)}L${x2},${y2}L${tip(-0.45)}" fill="none" ${style}/>`;
  }

  lanes.addEventListener("scroll", () => lanes.querySelector(".labels")?.setAttribute("transform", `translate(${lanes.scrollLeft})`));

  /** Ranks one below the other: what they computed, for whom they waited, and messages between them. */
  function draw() {
    const now = run.events[at][1], out = [], labels = [];
    for (let rank = 0; rank < run.P; rank++) {
      labels.push(`<rect x="0" y="${y(rank)}" width="${LEFT - 4}" height="${BAR}" style="fill:var(--pst-color-background)"/><text x="2" y="${y(rank) + 17}" font-weight="600">rank ${rank}</text><rect x="${LEFT - 8}" y="${y(rank)}" width="4" height="${BAR}" fill="${colour(rank)}"/>`);
      out.push(`<line x1="${LEFT}" x2="${LEFT + width}" y1="${y(rank) + 13}" y2="${y(rank) + 13}" stroke="currentColor" stroke-opacity=".25"/>`);
    }
    run.events.forEach(([rank, t, kind, , number, start], i) => {
      if (kind === "F" && rank === 0 && number % run.M === 0) {
        out.push(`<path d="M${x(start)},0V${y(run.P) - 20}" stroke="currentColor" stroke-opacity=".4" stroke-dasharray="2 3"/><text x="${x(start) + 4}" y="10" opacity=".7">step ${number / run.M + 1}</text>`);
      }
      if (kind === "F" || kind === "B") {
        const wide = Math.max(1.5, x(t) - x(start) - 1), dim = i > at ? 0.2 : 1;
        out.push(`<rect x="${x(start)}" y="${y(rank)}" width="${wide}" height="${BAR}" rx="2" fill="${kind === "F" ? "#2f6db5" : "#f0a13a"}" opacity="${dim}"/>`);
        if (wide > 17) out.push(`<text x="${x(start) + wide / 2}" y="${y(rank) + 17}" text-anchor="middle" style="fill:${i > at ? "currentColor" : kind === "F" ? "#fff" : "#000"}">${kind}${number % run.M}</text>`);
      }
      if (kind === "go" && t > start && i <= at) out.push(`<rect x="${x(start)}" y="${y(rank) + 10}" width="${x(t) - x(start)}" height="6" fill="currentColor" opacity=".3"/>`);
    });
    for (const [from, peer, kind, posted, match, t, done] of run.messages) {
      if (posted > at) continue;
      const down = peer > from, edge = y(from) + (down ? BAR : 0);
      const met = match !== null && run.messages[match][3] <= at;
      if (met && kind === "send") out.push(arrow(x(t), edge, x(Math.max(run.messages[match][5], t)) + 3, y(peer) + (down ? 0 : BAR), 'stroke="currentColor" stroke-opacity=".6"'));
      if (met) continue;
      const dashes = `stroke="${run.circle.includes(from) ? "var(--bad)" : "#b8860b"}" stroke-width="2" stroke-dasharray="4 3"`, far = edge + (down ? 22 : -22);
      out.push(kind === "send" ? arrow(x(t), edge, x(t) + 10, far, dashes) : arrow(x(t) - 12, far, x(t) - 2, edge, dashes));
      out.push(`<text x="${x(t) + (kind === "send" ? 12 : -10)}" y="${far + 4}" style="fill:var(--bad)">?</text>`);
    }
    out.push(`<line x1="${x(now)}" x2="${x(now)}" y1="4" y2="${y(run.P) - 20}" stroke="var(--bad)" stroke-width="1.5"/>`);
    const height = y(run.P) - 8;
    lanes.innerHTML = `<svg width="${LEFT + width + 24}" height="${height}" role="img" aria-label="what each rank has computed, and its messages, up to ${now.toFixed(3)} seconds">${out.join("")}<g class="labels" transform="translate(${lanes.scrollLeft})">${labels.join("")}</g></svg>`;
    if (x(now) < lanes.scrollLeft + 60 || x(now) > lanes.scrollLeft + lanes.clientWidth - 40) lanes.scrollLeft = x(now) - lanes.clientWidth * 0.7;
  }

  const SAYS = { line: "is", F: "has run a forward", B: "has run a backward", end: "has ended", fail: "has failed" };

  /** What a rank does at this moment, in words. */
  function stand(rank) {
    const i = byRank[rank].findLast((each) => each <= at);
    if (i === undefined) return "hasn't begun";
    const [, , kind, lines, number] = run.events[i], message = ["post", "stand", "go"].includes(kind) && number !== null && run.messages[number];
    const what = message ? `${message[2] === "send" ? "send to" : "receive from"} rank ${message[1]}${message[7] ? ` (samples ${message[7][0]} to ${message[7][1] - 1})` : ""}` : "the barrier";
    const its = message ? `its ${what}` : what;
    const says = { stand: `waits for ${its}`, post: `has posted ${its}`, go: `goes on: ${its} is done` }[kind] || SAYS[kind];
    const calls = lines.slice(0, 2).reverse().map((line) => `<code>${escaped(code(line))}</code>`).join(" › ");
    return says + (lines.length ? ` in line ${lines.slice(0, 2).reverse().join(" › ")}: ${calls}` : "");
  }

  function show(i) {
    at = Math.max(0, Math.min(run.events.length - 1, i));
    guess.hidden = true;
    slider.value = at;
    slider.setAttribute("aria-valuetext", `${run.events[at][1].toFixed(3)} seconds, event ${at + 1} of ${run.events.length}`);
    marks.forEach((mark) => mark.remove());
    listing.querySelector(".now")?.classList.remove("now");
    marks = [];
    const words = [];
    for (let rank = 0; rank < run.P; rank++) {
      const event = run.events[byRank[rank].findLast((each) => each <= at)];
      for (const [depth, line] of (event?.[3] || []).entries()) {
        const mark = make("span", { className: `mark${depth ? " outer" : ""}`, textContent: depth ? "" : rank });
        mark.style.cssText = `left:${rank * 1.1 + 0.1}em;background:${colour(rank)}`;
        listing.children[line - 1].append(mark);
        marks.push(mark);
      }
      words.push(`<li><span class="chip" style="background:${colour(rank)}">rank ${rank}</span>${stand(rank)}</li>`);
    }
    stands.innerHTML = words.join("");
    const row = listing.children[run.events[at][3][0] - 1];
    row?.classList.add("now");
    if (row && (row.offsetTop < listing.scrollTop || row.offsetTop > listing.scrollTop + listing.clientHeight - 40)) listing.scrollTop = row.offsetTop - listing.clientHeight / 2;
    time.textContent = `${run.events[at][1].toFixed(3)} s, ${at + 1} of ${run.events.length}`;
    printed.textContent = at === run.events.length - 1 ? run.printed : "";
    draw();
  }

  // ---- stepping -------------------------------------------------------------------------------------------------------
  function step(by, messages = false) {
    let i = at + by;
    while (run.events[i] && ((who.value !== "" && run.events[i][0] !== +who.value) || (messages && !MESSAGE.has(run.events[i][2])))) i += by;
    if (!run.events[i]) return;
    if (guessing && by > 0 && messages) ask(i);
    else show(i);
  }

  /** Have the reader say which rank that waits goes on next; with null, ask nothing. */
  function ask(then) {
    guess.hidden = true;
    const waiting = byRank.map((events) => run.events[events.findLast((each) => each <= at)]?.[2] === "stand");
    if (then === null || !waiting.some(Boolean)) return then !== null && show(then);
    const next = run.events.findIndex((event, i) => i > at && event[2] === "go" && waiting[event[0]]);
    const answered = (rank) => {
      const truth = next < 0 ? -1 : run.events[next][0], is = truth < 0 ? "nobody goes on: they wait for ever" : `rank ${truth} goes on`;
      score = [score[0] + (rank === truth), score[1] + 1];
      show(next < 0 ? run.events.length - 1 : next);
      guess.replaceChildren(`${rank === truth ? "Right" : "No"}: ${is}. ${score[0]} of ${score[1]} guesses are right. `, button("Go on", "go on", () => ask(at)));
      guess.hidden = false;
      guess.lastChild.focus();
    };
    const choices = waiting.flatMap((is, rank) => is ? [button(`rank ${rank}`, `rank ${rank}`, () => answered(rank)), " "] : []);
    guess.replaceChildren("Of the ranks that wait, which one goes on next? ", ...choices, button("nobody", "nobody", () => answered(-1)));
    guess.hidden = false;
    guess.querySelector("button").focus();
  }

  document.addEventListener("keydown", (event) => {
    if (event.target.matches("[type=range], select") || event.altKey || event.ctrlKey || event.metaKey) return;
    const moves = { ArrowLeft: () => step(-1, event.shiftKey), ArrowRight: () => step(1, event.shiftKey), Home: () => show(0), End: () => show(run.events.length - 1) };
    if (!moves[event.key]) return;
    event.preventDefault();
    moves[event.key]();
  });
  open(run);
  new IntersectionObserver((seen, watch) => { // what nobody looks at has no size yet, and can't be scrolled to its line
    if (!seen.some((each) => each.isIntersecting)) return;
    watch.disconnect();
    if (guess.hidden) show(at);
  }).observe(root);
})();
