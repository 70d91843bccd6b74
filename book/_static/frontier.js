// Time against memory: what is picked on the chart, or in the list below it, is drawn under them (pplab.course.frontier_view).
(() => {
  "use strict";

  const lasts = (lasting, item) => lasting[item.parts.map(({ stage, kind }) => `${stage}${kind}`).join("")];

  /** The timeline of an order that Python has simulated: its rows, and when each of their items starts. */
  function timelineOf({ name, unit, rows, starts, lasting }) {
    const schedule = pplab.schedule(rows.map((row) => row.split(" ")), name);
    const begins = starts.flat();
    const ends = schedule.rows.flat().map((item, i) => begins[i] + lasts(lasting, item));
    return Object.assign(pplab.recorded(schedule, begins, ends), { unit, how: "simulated" });
  }

  function open(panel) {
    const orders = JSON.parse(panel.querySelector("script").textContent);
    const label = panel.querySelector("label"), list = label.querySelector("select");
    const says = panel.querySelector(".pplab-told"), host = panel.querySelector(".pplab-scroll");
    const targets = orders.map((_, i) => panel.querySelector(`[id="point-${panel.dataset.name}-${i}"]`));
    const pick = (number) => {
      list.value = number;
      targets.forEach((target, i) => target.classList.toggle("pplab-on", i === Number(number)));
      says.textContent = orders[number].says;
      pplabChart.draw(host, [timelineOf(orders[number])], { width: host.clientWidth });
    };
    label.hidden = false;
    list.addEventListener("change", () => pick(list.value));
    targets.forEach((target, i) => {
      for (const event of ["pointerenter", "click"]) target.addEventListener(event, () => pick(i));
    });
    return () => pick(list.value);
  }

  for (const view of document.querySelectorAll(".pplab-frontier")) {
    const panels = [...view.querySelectorAll(".pplab-panel")], draw = panels.map(open);
    const all = view.querySelector(".pplab-of-all"), chosen = all.querySelector("select");
    const show = () => {
      panels.forEach((panel, i) => { panel.hidden = i !== chosen.selectedIndex; });
      draw[chosen.selectedIndex]();
    };
    all.hidden = panels.length < 2;
    chosen.addEventListener("change", show);
    show();
  }
})();
