// What both games' views share: the levels that a browser remembers, the head of a game, and a tray of actions.

var pplabGame = (() => {
  "use strict";

  const { escaped } = pplabChart;

  /** What this browser keeps under `name`, by level; it forgets where it has no storage, or something that isn't ours. */
  function memory(name) {
    function all() {
      try {
        return JSON.parse(localStorage.getItem(name)) || {};
      } catch {
        return {};
      }
    }
    function keep(id, progress) {
      try {
        localStorage.setItem(name, JSON.stringify({ ...all(), [id]: progress })); // others of the page keep theirs, too
      } catch {
        // the game goes on, and is forgotten with the page
      }
    }
    return { all, keep };
  }

  /** The element of a game, with its level's title, or the choice of one. */
  function begin(root, only) {
    const live = pplabChart.begin(root);
    // what the theme lays over a page keeps off a game in sight (see explorer.css)
    new IntersectionObserver(([{ isIntersecting }]) => root.toggleAttribute("data-in-sight", isIntersecting)).observe(live);
    if (only) live.querySelector(".pplab-control").outerHTML = `<strong>${escaped(only.title)}</strong>`;
    return live;
  }

  /** The levels as options, with a mark at those that are solved. */
  const options = (levels, chosen, kept) => levels.map((level, i) =>
    `<option value="${level.id}"${level === chosen ? " selected" : ""}>${i + 1}. ${escaped(level.title)}${kept[level.id]?.isSolved ? " ✓" : ""}</option>`).join("");

  /** The button of a tray, a line of buttons for each rank, to which an arrow key leads; undefined for other keys. */
  function beside(tray, from, key) {
    const step = { ArrowLeft: [0, -1], ArrowRight: [0, 1], ArrowUp: [-1, 0], ArrowDown: [1, 0] }[key];
    if (!step) return undefined;
    const lines = [...tray.children], line = from.parentElement;
    const at = [...line.querySelectorAll("button")].indexOf(from) + step[1];
    const buttons = lines[lines.indexOf(line) + step[0]]?.querySelectorAll("button") || [];
    return buttons[Math.min(Math.max(at, 0), buttons.length - 1)] || from;
  }

  /** Begin the games, once their elements are there. */
  function start(selector, game) {
    const all = () => document.querySelectorAll(selector).forEach(game);
    if (document.readyState === "loading") document.addEventListener("DOMContentLoaded", all);
    else all();
  }

  return { memory, begin, options, beside, start };
})();
