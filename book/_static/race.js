// Plays the race on the first page, on the explorers' clock. The builder (pplab_front.py) has drawn all of it: what hasn't
// happened yet is covered, and memory, messages and words are those of the moment.
(() => {
  "use strict";

  const STEP = 0.1; // seconds from one moment to the next, for arrow keys and the clock's pace
  const BOW = 7; // pixels by which a message swerves from the line of time
  const still = matchMedia("(prefers-reduced-motion: reduce)");

  /** What shows a lane at a time. Rows are drawn `row` pixels apart. */
  function lane(section, { end: ends, held, done, sent }, { end, of, row, colours }) {
    const [says, dots] = ["p > span", ".pplab-dots"].map((what) => section.querySelector(what));
    const bars = section.querySelectorAll(".pplab-gb"), atEnd = says.textContent;

    return (now) => {
      const time = Math.min(now, ends), isGoing = time < Math.min(ends, end), at = `${(100 * time) / end}%`;
      section.style.setProperty("--at", at);
      section.classList.toggle("pplab-going", isGoing);
      says.textContent = isGoing ? `${done.filter((each) => each <= time).length} of ${of} done` : atEnd;
      bars.forEach((bar, rank) => {
        const shares = held[rank].filter(([since]) => since <= time).map(([, share]) => share), share = shares.at(-1);
        bar.style.setProperty("--now", share);
        bar.style.setProperty("--most", Math.max(...shares));
        bar.classList.toggle("pplab-over", share > 1);
      });
      const flying = isGoing ? sent.filter(([leaves, arrives]) => leaves <= time && time < arrives) : [];
      dots.innerHTML = flying.map(([leaves, arrives, from, to, down]) => {
        const way = (time - leaves) / (arrives - leaves), y = row * (from + (to - from) * way + 0.4);
        const x = BOW * Math.sin(Math.PI * way);
        return `<circle cx="${at}" cy="${y}" r="4.5" fill="${colours[down]}" transform="translate(${x})"/>`;
      }).join("");
    };
  }

  function race(root) {
    const told = JSON.parse(root.dataset.race), { end } = told;
    const views = [...root.querySelectorAll(".pplab-lane")].map((section, i) => lane(section, told.lanes[i], told));
    const { asked } = pplabClock;
    const bar = root.querySelector(".pplab-clock");
    const clock = pplabClock.make(bar, (time) => views.forEach((show) => show(time)), (time) => pplabClock.remember(time, end));
    const turns = () => Array.from({ length: Math.ceil(end / STEP) }, (_, i) => i * STEP);
    const given = { end, turns, told: (time) => `${time.toFixed(2)} s` };
    clock.fit(given, isNaN(asked()) ? end : asked());

    for (const track of root.querySelectorAll(".pplab-track")) pplabClock.drag(track, (share) => clock.seek(share * end), bar);
    addEventListener("hashchange", () => isNaN(asked()) || clock.seek(asked()));
    addEventListener("beforeprint", () => clock.fit(given, end));
    if (still.matches || location.hash) return; // who asked for a moment, or for no motion, sees it play when they say so
    new IntersectionObserver(([{ isIntersecting }], seen) => {
      if (!isIntersecting) return;
      seen.disconnect();
      clock.toggle();
    }, { threshold: 0.3 }).observe(root);
  }

  document.querySelectorAll(".pplab-race").forEach(race);
})();
