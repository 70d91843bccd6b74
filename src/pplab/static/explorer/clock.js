// A playhead: a button, a slider and the time, over views that show a moment. One plays at a time on a page: who starts
// says so by the document's event `pplab-play`, and the others stop.

var pplabClock = (() => {
  "use strict";

  const still = matchMedia("(prefers-reduced-motion: reduce)"); // then time goes in jumps, and nothing flies
  const JUMPS = 24, PER_SECOND = 5, SHORTEST = 5, LONGEST = 18; // jumps to the end; moments a second, and seconds to the end

  /** Fill `bar` with the controls: `show(time, isGoing)` draws a moment, `rest(time)` hears where time stands when it stops. */
  function make(bar, show, rest) {
    bar.innerHTML = '<button type="button"></button><input type="range" min="0" step="any" aria-label="time"><output></output>';
    const [button, slider, says] = bar.children;
    let end = 0, now = Infinity, exact = 0, before = 0, isGoing = false;
    let moments = () => [], told = String; // when something starts or ends, in order; a time in words

    function put(time) {
      now = Math.min(Math.max(time, 0), end);
      slider.value = now;
      says.textContent = slider.ariaValueText = told(now);
      [button.textContent, button.ariaLabel] = isGoing ? ["❚❚", "pause"] : ["▶", "play"];
      show(now, isGoing);
    }

    function tick(at) {
      if (!isGoing) return;
      const seconds = Math.min(Math.max(moments().length / PER_SECOND, SHORTEST), LONGEST);
      exact += (Math.min(at - before, 100) / 1000 / seconds) * end; // a page in the background stands still
      before = at;
      const jump = end / JUMPS;
      put(still.matches ? Math.floor(exact / jump + 1e-9) * jump : exact);
      if (now < end) requestAnimationFrame(tick);
      else seek(end);
    }

    function toggle() {
      if (isGoing) return seek(now);
      document.dispatchEvent(new CustomEvent("pplab-play", { detail: { source: bar } }));
      [isGoing, exact, before] = [true, now < end ? now : 0, performance.now()];
      put(exact);
      requestAnimationFrame(tick);
    }

    function seek(time) { // and stay there
      isGoing = false;
      put(time);
      rest(now);
    }

    document.addEventListener("pplab-play", ({ detail }) => detail.source !== bar && isGoing && seek(now));
    button.addEventListener("click", toggle);
    slider.addEventListener("input", () => seek(Number(slider.value)));
    bar.addEventListener("keydown", (event) => {
      const does = {
        " ": toggle,
        ArrowLeft: () => seek(moments().findLast((moment) => moment < now - 1e-9) ?? 0),
        ArrowRight: () => seek(moments().find((moment) => moment > now + 1e-9) ?? end),
      }[event.key];
      if (event.target !== slider || !does) return;
      event.preventDefault();
      does();
    });

    /** What is shown has changed. It starts or ends at `turns()`, of which those are one that differ by `rounded` at most.
     *  Time stays where it stands, or goes to `time`; at the end it stays at the end. */
    function fit(given, time = now < end ? now : Infinity) {
      const { turns, rounded = 0 } = given, isLast = (turn, i, all) => !(all[i + 1] - turn <= rounded);
      let found = null;
      moments = () => (found = found || [0, ...turns()].sort((a, b) => a - b).filter(isLast));
      ({ end, told } = given);
      slider.max = end;
      put(time);
    }

    return { fit, seek, toggle, now: () => now };
  }

  /** Let a pressed pointer take the time along: `seek` hears where it is, in shares of the track's width. Then keys move it.
   *  A finger drags on a track that says so by its `touch-action`, and taps on the others. */
  function drag(track, seek, bar) {
    const go = ({ clientX }) => {
      const { left, width } = track.getBoundingClientRect();
      seek((clientX - left) / width);
      bar.querySelector("input").focus({ preventScroll: true });
    };
    track.addEventListener("click", go);
    track.addEventListener("pointerdown", (event) => {
      if (event.button || (event.pointerType === "touch" && getComputedStyle(track).touchAction === "auto")) return;
      track.setPointerCapture(event.pointerId);
      track.onpointermove = go;
      track.onlostpointercapture = () => (track.onpointermove = null);
      go(event);
      event.preventDefault(); // or the focus would go
    });
  }

  /** The page's address may hold a time: `#t=2.5`, or `#fig-1-3:t=2.5` for what has a name. NaN if it doesn't. */
  const prefix = (name) => `#${name && `${name}:`}t=`;
  const asked = (name = "") => Number(location.hash.startsWith(prefix(name)) ? location.hash.slice(prefix(name).length) : NaN);

  let waiting; // browsers refuse an address that changes with each movement of a hand
  function remember(time, end, name = "") {
    clearTimeout(waiting);
    if (time >= end && isNaN(asked(name))) return; // it played by itself
    const address = time < end ? prefix(name) + time.toPrecision(4) : location.pathname;
    waiting = setTimeout(() => history.replaceState(null, "", address), 300);
  }

  return { make, drag, asked, remember };
})();
