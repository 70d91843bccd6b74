// A playhead: a button, a slider and the time, over views that show a moment. One plays at a time on a page: who starts
// says so by the document's event `pplab-play`, and the others stop.

var pplabClock = (() => {
  "use strict";

  const still = matchMedia("(prefers-reduced-motion: reduce)"); // then time goes in jumps, and nothing flies
  const JUMPS = 24, PER_SECOND = 5, SHORTEST = 5, LONGEST = 18; // jumps to the end; moments a second, and seconds to the end

  /** Fill `bar` with the controls: `show(time)` draws a moment, `rest(time)` hears where time stands when it stops. */
  function make(bar, show, rest) {
    bar.innerHTML = '<button type="button"></button><input type="range" min="0" step="any" aria-label="time"><output></output>';
    const [button, slider, says] = bar.children;
    let end = 0, now = Infinity, exact = 0, before = 0, isGoing = false;
    let moments = () => [], told = String; // when something starts or ends; a time in words

    function put(time) {
      now = Math.min(Math.max(time, 0), end);
      slider.value = now;
      says.textContent = slider.ariaValueText = told(now);
      show(now);
    }

    function label() {
      button.textContent = isGoing ? "❚❚" : "▶";
      button.ariaLabel = isGoing ? "pause" : "play";
    }

    function tick(at) {
      if (!isGoing) return;
      const seconds = Math.min(Math.max(moments().length / PER_SECOND, SHORTEST), LONGEST);
      exact += (Math.min(at - before, 100) / 1000 / seconds) * end; // a page in the background stands still
      before = at;
      const jump = end / JUMPS;
      put(still.matches ? Math.floor(exact / jump + 1e-9) * jump : exact);
      if (now < end) requestAnimationFrame(tick);
      else stop();
    }

    function stop() {
      if (!isGoing) return;
      isGoing = false;
      label();
      rest(now);
    }

    function toggle() {
      if (isGoing) return stop();
      document.dispatchEvent(new CustomEvent("pplab-play", { detail: { source: bar } }));
      [isGoing, exact, before] = [true, now < end ? now : 0, performance.now()];
      label();
      requestAnimationFrame(tick);
    }

    function seek(time) {
      isGoing = false;
      put(time);
      label();
      rest(now);
    }

    document.addEventListener("pplab-play", ({ detail }) => detail.source !== bar && stop());
    button.addEventListener("click", toggle);
    slider.addEventListener("input", () => seek(Number(slider.value)));
    bar.addEventListener("keydown", (event) => {
      const isBack = event.key === "ArrowLeft" || event.key === "ArrowDown", isOn = event.key === "ArrowRight" || event.key === "ArrowUp";
      if (event.target !== slider || !(isBack || isOn || event.key === " ")) return;
      event.preventDefault();
      if (event.key === " ") toggle();
      else if (isBack) seek(moments().findLast((moment) => moment < now - 1e-9) ?? 0);
      else seek(moments().find((moment) => moment > now + 1e-9) ?? end);
    });

    /** What is shown has changed: time stays where it stands, or goes to `time`; at the end it stays at the end. */
    function fit(given, time = now < end ? now : Infinity) {
      ({ end, moments, told } = given);
      slider.max = end;
      put(time);
      label();
    }

    return { fit, seek, toggle, now: () => now };
  }

  return { make };
})();
