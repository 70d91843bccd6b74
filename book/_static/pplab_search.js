// The book's search: sections in the order in which they answer a query. pplabSections comes from
// book/_ext/pplab_search.py, Stemmer and stopwords from Sphinx.
const pplabSearch = (() => {
  "use strict";
  const IN_TITLE = 6, IN_INDEX = 8, IN_CHAPTER = 2; // what a word counts there, if it counts one in the text
  const PART = 0.4; // and what a part of a name counts of the whole
  const SHOWN = 15, QUOTED = 220; // results, and characters of each
  // Words that only ask; Sphinx' own list lacks them. "I" is one after a verb, and otherwise an action's letter.
  stopwords.push(..."how what why when where which who do does did can could should would vs versus question help please".split(" "));
  const ASKS = /\b(do|can|should) (i|we)\b/gi;

  const stemmer = new Stemmer();
  const stems = new Map();
  const stem = (word) => {
    if (!stems.has(word)) stems.set(word, stemmer.stemWord(word));
    return stems.get(word);
  };

  // Words as [what is compared, its share, where it stands]. A flag or another name counts as a whole, with - and _
  // alike, and in its parts: --micro-batch-size, n_microbatches, ZeroBubble.
  const NAME = /[\p{L}\p{N}]+(?:[-_.'’&+][\p{L}\p{N}]+)*/gu;
  const words = (text) => [...text.matchAll(NAME)].flatMap(({ 0: name, index }) => {
    const whole = stem(name.toLowerCase().replace(/[-.'’&+]/g, "_"));
    const parts = name.split(/[-_.'’&+]|(?<=[a-z])(?=[A-Z])/).map((part) => part.toLowerCase());
    if (parts.length === 1) return stopwords.includes(parts[0]) ? [] : [[whole, 1, index]];
    return [[whole, 1, index], ...parts.filter((part) => part.length > 1).map((part) => [stem(part), PART, index])];
  });
  const plain = (text) => words(text).filter(([, share]) => share === 1).map(([word]) => word).join(" ");

  const sections = [];
  const places = new Map(); // word: Map of section: how much it counts there
  for (const [page, rows] of pplabSections) {
    for (const [anchor, number, title, rank, text, index] of rows) {
      const names = [title, ...title.split(/[:,?] /), ...index].map(plain);
      const section = { page, anchor, number, title, rank, text, names, of: rows[0][2] };
      const count = (said, weight) => {
        for (const [word, share] of said) {
          if (!places.has(word)) places.set(word, new Map());
          const there = places.get(word);
          there.set(section, (there.get(section) ?? 0) + share * weight);
        }
        return said.length;
      };
      section.length = count(words(text), 1);
      count(words(title), IN_TITLE);
      count(words(index.join(" , ")), IN_INDEX);
      if (anchor) count(words(rows[0][2]), IN_CHAPTER);
      sections.push(section);
    }
  }
  const usual = sections.reduce((sum, { length }) => sum + length, 0) / sections.length;

  // What is asked for: words that occur, or words that begin like one that doesn't.
  const asked = (query) => {
    const terms = new Map();
    for (const [word, share] of words(query)) {
      const begins = (other) => word.length > 3 && other.startsWith(word);
      const known = places.has(word) ? [word] : [...places.keys()].filter(begins);
      for (const each of known) terms.set(each, Math.max(terms.get(each) ?? 0, share / known.length));
    }
    return terms;
  };

  // Rare words count more (BM25); then how much of the query a section has, and whether it is what the query names.
  const find = (said) => {
    const query = said.replace(ASKS, " ");
    const terms = asked(query);
    const scores = new Map(); // section: [score, share of the query]
    let all = 0;
    for (const [word, share] of terms) {
      const there = places.get(word);
      const worth = share * Math.log(1 + sections.length / there.size);
      all += worth;
      for (const [section, count] of there) {
        const [score, part] = scores.get(section) ?? [0, 0];
        const damped = count / (count + 0.6 + 0.6 * section.length / usual);
        scores.set(section, [score + worth * damped, part + worth]);
      }
    }
    const name = plain(query);
    const nearness = (each) => (each.includes(name) ? name.length / each.length : 0);
    const named = ({ names }) => Math.max(...names.map(nearness));
    return [...scores]
      .map(([section, [score, part]]) => [section.rank * score * (part / all) ** 2 * (1 + named(section)), section])
      .sort(([a], [b]) => b - a)
      .slice(0, SHOWN)
      .map(([score, section]) => ({ ...section, score, terms }));
  };

  // The part of a text with most of the words, and those words marked.
  const quote = (text, terms) => {
    const hits = words(text).filter(([word]) => terms.has(word));
    const near = (from) => hits.filter(([, , at]) => at >= from && at < from + QUOTED - 60);
    const within = (from) => new Set(near(from).map(([word]) => word)).size;
    const best = hits.reduce((best, [, , at]) => (within(at) > within(best) ? at : best), hits[0]?.[2] ?? 0);
    const from = best < 60 ? 0 : text.indexOf(" ", best - 60) + 1;
    const said = document.createElement("p");
    said.className = "context";
    let at = from;
    for (const [, , start] of hits) {
      if (start < at || start > from + QUOTED) continue;
      const [word] = text.slice(start).match(NAME);
      said.append(text.slice(at, start), Object.assign(document.createElement("mark"), { textContent: word }));
      at = start + word.length;
    }
    said.prepend(from ? "… " : "");
    said.append(text.slice(at, Math.max(at, from + QUOTED)), from + QUOTED < text.length ? " …" : "");
    return said;
  };

  const show = () => {
    const query = new URLSearchParams(location.search).get("q");
    const out = document.getElementById("search-results");
    document.querySelectorAll('input[name="q"]').forEach((field) => (field.value = query));
    if (!query || !out) return;
    const results = find(query);
    const list = document.createElement("ul");
    list.className = "search";
    for (const { page, anchor, number, title, text, of, terms } of results) {
      const item = document.createElement("li");
      const link = Object.assign(document.createElement("a"), { href: `${page}.html${anchor}` });
      link.textContent = `${number} ${title}`.trim();
      item.append(link, anchor ? ` in ${of}` : "", quote(text, terms));
      list.append(item);
    }
    const told = document.createElement("p");
    told.setAttribute("role", "status");
    const lacking = words(query).filter(([word, share]) => share === 1 && !places.has(word));
    const named = lacking.map(([, , at]) => `“${query.slice(at).match(NAME)[0]}”`).join(", ");
    told.textContent = !results.length ? "Nothing in the book has any of these words."
      : named && `No section has ${named}. These have the other words, or words like them:`;
    out.append(told, list);
  };
  document.addEventListener("DOMContentLoaded", show);
  return find;
})();
