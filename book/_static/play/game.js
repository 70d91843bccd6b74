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

  let made = 0; // games of the page: labels need ids that no other has

  /** The element of a game, with its level's title or the choice of one, and its buttons; `id` begins the ids in it. */
  function begin(root, only, buttons, body) {
    const id = `pplab-game-${++made}`, live = document.createElement("div");
    const choice = `<span class="pplab-control"><label for="${id}">level</label><select id="${id}" class="pplab-level"></select></span>`;
    const all = root.dataset.game ? `<a class="pplab-open" href="${escaped(root.dataset.game)}">All levels</a>` : "";
    live.className = "pplab-live";
    live.innerHTML = `<div class="pplab-controls">${only ? `<strong>${escaped(only.title)}</strong>` : choice}` +
      `<span class="pplab-buttons">${buttons.map(button).join("")}${all}</span></div><p class="pplab-task"></p>${body(id)}`;
    root.append(live);
    return live;
  }

  const button = (name) => `<button type="button" data-do="${name}">${name}</button>`;

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

  return { memory, begin, button, options, beside, start };
})();
