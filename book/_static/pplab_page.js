// What the book's pages need beyond the theme's scripts: paper, and the glossary's definitions.
(() => {
  "use strict";

  // Paper is light, whatever the theme on the screen: charts and code take their colours from the theme's name.
  const root = document.documentElement;
  let theme = null; // of the screen, while the page is on paper
  const answers = []; // of guesses, folded on the screen: they belong to the text
  const toPaper = () => {
    if (theme !== null) return;
    theme = root.dataset.theme;
    root.dataset.theme = "light";
    answers.push(...document.querySelectorAll("details.answer:not([open])"));
    for (const answer of answers) answer.open = true;
  };
  const toScreen = () => {
    if (theme === null) return;
    root.dataset.theme = theme;
    theme = null;
    for (const answer of answers.splice(0)) answer.open = false;
  };

  window.addEventListener("beforeprint", toPaper);
  window.addEventListener("afterprint", toScreen);
  window.matchMedia("print").addEventListener("change", (paper) => (paper.matches ? toPaper() : toScreen()));

  // Save a page's source rather than show it, where the browser allows that: not from a page opened as a file.
  if (location.protocol !== "file:") {
    window.addEventListener("load", () => {
      for (const link of document.querySelectorAll("a.btn-download-source-button, a.btn-download-notebook-button")) {
        link.download = "";
        link.removeAttribute("target");
      }
    });
  }

  // The chevron that the theme's script adds to a folded box is a drawing next to the button's words.
  window.addEventListener("load", () => {
    for (const icon of document.querySelectorAll("svg.tb-icon")) icon.setAttribute("aria-hidden", "true");
  });

  // A table that is wider than a phone anyway gives its last column room, so that its rows aren't a screen high.
  window.addEventListener("load", () => {
    for (const table of document.querySelectorAll(".pst-scrollable-table-container")) {
      if (table.scrollWidth > table.clientWidth) table.classList.add("pplab-wide");
    }
  });

  // A link to the glossary shows its definition: to a pointer over it, to the keyboard's focus, and to a first tap.
  document.addEventListener("DOMContentLoaded", () => {
    const given = document.getElementById("pplab-terms");
    if (!given) return;
    const definitions = JSON.parse(given.textContent);
    const box = Object.assign(document.createElement("div"), { id: "pplab-term", hidden: true });
    document.body.append(box);
    let shown = null; // the link whose definition it is
    let timer = 0; // until it comes or goes
    const hide = () => {
      clearTimeout(timer);
      shown?.removeAttribute("aria-describedby");
      shown = null;
      box.hidden = true;
    };
    const soon = (what) => {
      clearTimeout(timer);
      timer = setTimeout(what, 200); // time to move from the link to the box
    };
    const show = (link) => {
      clearTimeout(timer);
      if (shown === link) return;
      hide();
      shown = link;
      const more = Object.assign(document.createElement("a"), { href: link.href, textContent: "In the glossary" });
      box.replaceChildren(definitions[link.hash.slice(1)], " ", more);
      box.hidden = false;
      link.setAttribute("aria-describedby", box.id);
      const { left, top, bottom } = link.getClientRects()[0];
      const fits = bottom + box.offsetHeight + 12 < innerHeight || top < box.offsetHeight + 12;
      box.style.left = `${scrollX + Math.max(8, Math.min(left, root.clientWidth - box.offsetWidth - 8))}px`;
      box.style.top = `${scrollY + (fits ? bottom + 4 : top - box.offsetHeight - 4)}px`;
    };
    for (const link of document.querySelectorAll('a.reference[href*="#term-"]')) {
      let tapped = false; // by a finger, while the definition wasn't shown
      link.addEventListener("pointerdown", (e) => (tapped = e.pointerType === "touch" && shown !== link));
      link.addEventListener("click", (e) => {
        if (tapped) e.preventDefault();
        if (tapped) show(link);
        tapped = false;
      });
      link.addEventListener("pointerenter", (e) => e.pointerType === "mouse" && soon(() => show(link)));
      link.addEventListener("pointerleave", (e) => e.pointerType === "mouse" && soon(hide));
      link.addEventListener("focus", () => show(link));
      link.addEventListener("blur", () => soon(hide));
    }
    box.addEventListener("pointerenter", () => clearTimeout(timer));
    box.addEventListener("pointerleave", (e) => e.pointerType === "mouse" && soon(hide));
    document.addEventListener("keydown", (e) => e.key === "Escape" && hide());
    document.addEventListener("pointerdown", (e) => e.target.closest?.("a, #pplab-term") ?? hide());
  });
})();
