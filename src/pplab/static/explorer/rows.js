// Rows that a reader brings: read from text, checked, and run as far as they go. What `pplab.validate` and `lab.read_csv`
// do, and in their words: the page's tests compare. No DOM.

var pplabRows = (() => {
  "use strict";

  const { ScheduleError, needs, textOf, run, durationsOf, costs } = pplab;

  // ---- text ----------------------------------------------------------------------------------------------------------

  const LOWERED = /^(\d+(SEND|RECV|WAIT_SEND)_[FB]\d+|\d+(UNSHARD|RESHARD|(WAIT_)?REDUCE_GRAD))$/;

  /** The schedule of a text in torch's form: row i is rank i, blank cells and communication are left out. Blanks separate
   *  actions, too, and a line may begin with its rank, as `print(schedule)` writes it; a line about the whole is left out. */
  function read(text, name = "your rows") {
    const rows = linesOf(text).map((cells, rank) =>
      cells.flatMap((raw, column) => {
        const cell = raw.trim();
        if (!cell || LOWERED.test(cell)) return [];
        try {
          return [pplab.parse(cell)];
        } catch (error) {
          throw new ScheduleError(`CSV row ${rank + 1} (rank ${rank}), column ${column + 1}: ${error.message}`,
            "write one action per cell, without headers, or leave the cell blank");
        }
      }));
    if (!rows.some((row) => row.length)) {
      throw new ScheduleError("the CSV holds no action", "give one row per rank, such as 0F0,0F1,0B0,0B1");
    }
    return pplab.schedule(rows, name);
  }

  /** The cells of every line, but of blank ones at the end. */
  function linesOf(text) {
    const lines = text.replace(/^\uFEFF/, "").split(/\r\n|\r|\n/);
    while (lines.length && !lines[lines.length - 1].replace(/[",]/g, "").trim()) lines.pop();
    const grid = lines.findIndex((line) => /^rank +0\b/.test(line));
    if (grid >= 0) return lines.slice(grid).map((line) => line.replace(/^rank +\d+:?/, "").trim().split(/ +/));
    return lines.map((line) => {
      const cells = cellsOf(line);
      return cells.length > 1 ? cells : (cells[0] || "").trim().split(/[\t ]+/);
    });
  }

  /** The cells of a line of CSV. A cell may be quoted. */
  function cellsOf(line) {
    const cells = [""];
    let isQuoted = false;
    for (let i = 0; i < line.length; i++) {
      const c = line[i], last = cells.length - 1;
      if (c === '"' && isQuoted && line[i + 1] === '"') cells[last] += line[++i];
      else if (c === '"' && (isQuoted || cells[last] === "")) isQuoted = !isQuoted;
      else if (c === "," && !isQuoted) cells.push("");
      else cells[last] += c;
    }
    return cells;
  }

  // An address holds rows in characters that it needs no escape for: 0F0.(0F1-0B0)~1F0 are two ranks. `lab.explore` writes it.
  const packed = (cell) => cell.trim().replace(";", "-").replace(/\)OVERLAP_[FBIW]_[FBIW]$/, ")");
  const pack = (text) => linesOf(text).map((cells) => cells.map(packed).filter(Boolean).join(".")).join("~");
  const unpack = (text) => text.replace(/~/g, "\n").replace(/\./g, ",").replace(/\((\d+([FBIW])\d+)-(\d+([FBIW])\d+)\)(?!O)/g, "($1;$3)OVERLAP_$2_$4");

  // ---- faults --------------------------------------------------------------------------------------------------------

  /** Throws ScheduleError of the first fault, unless every rank can run its row to the end. */
  function validate(schedule) {
    checkPlacement(schedule);
    checkKinds(schedule);
    checkActions(schedule);
    checkOrder(schedule);
    const { rows, needs } = schedule.turns, noTime = needs.map(() => 0);
    const [starts] = run(rows, needs, noTime, noTime);
    const stuck = new Map(); // of every rank that can't finish its row: the action at which it stands
    rows.forEach((row, rank) => starts[row[row.length - 1]] === null && stuck.set(rank, row.find((i) => starts[i] === null)));
    if (stuck.size) throw deadlock(schedule, stuck);
  }

  function checkKinds({ actions }) {
    const sent = actions.find(({ kind }) => kind.length > 1);
    if (!sent) return;
    throw new ScheduleError(`rank ${sent.rank}: ${textOf(sent)} is communication, and a schedule holds computation only`,
      "leave it out: pplab.lower derives sends and receives");
  }

  /** The ranks of every pipeline that shares no microbatch with another one: more than one under data parallelism. */
  function replicasOf({ rows, placement }) {
    if (placement.every(Number.isInteger)) return [rows.map((_, rank) => rank)];
    let found = []; // ranks, and the microbatches that they work on
    rows.forEach((row, rank) => {
      let ranks = [rank], microbatches = new Set(row.flatMap((item) => item.parts.map((a) => a.microbatch)));
      for (const other of found.filter(([, theirs]) => [...theirs].some((m) => microbatches.has(m)))) {
        found = found.filter((each) => each !== other);
        [ranks, microbatches] = [[...other[0], ...ranks], new Set([...other[1], ...microbatches])];
      }
      found.push([ranks, microbatches]);
    });
    return found.map(([ranks]) => ranks.sort((a, b) => a - b));
  }

  /** Whether these ranks, a replica, hold every stage once, or every stage twice on mirrored ranks. */
  function isPlaced(placement, ranks) {
    const held = placement.map((place) => [place].flat().filter((rank) => ranks.includes(rank)));
    const isMirrored = (place) =>
      place.length === 2 && place[0] < place[1] && ranks.indexOf(place[0]) + ranks.indexOf(place[1]) === ranks.length - 1;
    return held.every(isMirrored) || held.every((place) => place.length < 2);
  }

  /** Every stage on one rank of every replica, or on two mirrored ones (bidirectional). */
  function checkPlacement({ placement, numStages, rows, actions }) {
    const gap = placement.findIndex((place) => Array.isArray(place) && !place.length);
    if (gap >= 0) {
      throw new ScheduleError(`no rank runs stage ${gap}, though the schedule has stages up to ${numStages - 1}`,
        `add stage ${gap}'s actions, or number the stages without a gap`);
    }
    const empty = rows.findIndex((row) => !row.length);
    if (empty >= 0) throw new ScheduleError(`rank ${empty} has nothing to run`, "remove its row, or place a stage on it");
    if (placement.every(Number.isInteger)) return;
    if (replicasOf({ rows, placement }).every((ranks) => isPlaced(placement, ranks))) return;
    const stage = placement.findIndex(Array.isArray);
    const ofStage = (rank) => actions.filter((each) => each.rank === rank && each.stage === stage);
    const ranks = [...placement[stage]].sort((a, b) => ofStage(a).length - ofStage(b).length);
    const rank = ranks[0], home = ranks[ranks.length - 1], stray = textOf(ofStage(rank)[0]);
    throw new ScheduleError(`rank ${rank} runs ${stray}, but stage ${stage} lives on rank ${home}`,
      `move ${stray} to rank ${home}'s row (a stage has one rank; only a bidirectional schedule keeps each stage on ` +
      "two ranks, r and P-1-r, and only replicas, which share no microbatch, hold it again)");
  }

  /** Each stage has each microbatch's F once, and either its B or its I and W once, all on one rank. */
  function checkActions(schedule) {
    const { numStages, numMicrobatches, placement, actions } = schedule;
    const found = Array.from({ length: numStages * numMicrobatches }, () => new Map()); // kind -> rank
    for (const action of actions) {
      const { stage, kind, microbatch, rank } = action, kinds = found[stage * numMicrobatches + microbatch];
      if (kinds.has(kind)) {
        const other = kinds.get(kind), text = textOf(action);
        const where = other === rank ? `rank ${rank} runs ${text} twice` : `${text} is on ranks ${other} and ${rank}`;
        throw new ScheduleError(where, "remove one of the two");
      }
      kinds.set(kind, rank);
    }
    found.forEach((kinds, i) => {
      const stage = Math.floor(i / numMicrobatches), place = placement[stage];
      checkMicrobatch(stage, i % numMicrobatches, kinds, Number.isInteger(place) ? place : null);
    });
  }

  function checkMicrobatch(stage, m, kinds, home) {
    const name = (kind) => `${stage}${kind}${m}`;
    const rank = kinds.size ? [...kinds.values()][0] : home;
    if (new Set(kinds.values()).size > 1) {
      const names = [...kinds].map(([kind, r]) => `${name(kind)} on rank ${r}`).join(", ");
      throw new ScheduleError(`stage ${stage} works on microbatch ${m} on several ranks: ${names}`,
        "put them on one rank: a backward needs what its forward kept there");
    }
    const isSplit = kinds.has("I") || kinds.has("W");
    if (kinds.has("B") && isSplit) {
      throw new ScheduleError(
        `rank ${rank} runs both ${name("B")} and ${name(kinds.has("I") ? "I" : "W")}, and B already is I and W`,
        `keep ${name("B")}, or ${name("I")} and ${name("W")}`,
      );
    }
    const kind = (isSplit ? ["F", "I", "W"] : ["F", "B"]).find((wanted) => !kinds.has(wanted));
    if (kind === undefined) return;
    const has = [...kinds.keys()].map(name).join(", ") || "nothing of it";
    const [runs, row] = rank === null ? ["no rank runs any of it", `a row with stage ${stage}`] : [`rank ${rank} runs ${has}`, `rank ${rank}'s row`];
    throw new ScheduleError(`${name(kind)} is missing: ${runs}`,
      `add ${name(kind)} to ${row}${kind === "B" ? ` (or ${name("I")} and ${name("W")})` : ""}`);
  }

  /** Within a row, F before B or I, and I before W. */
  function checkOrder(schedule) {
    schedule.rows.forEach((row, rank) => {
      const done = new Set();
      for (const { parts } of row) {
        for (const part of parts) {
          const own = needs(part, schedule.numStages).pop();
          if (!own || own.stage !== part.stage) continue;
          if (own.kinds.some((kind) => done.has(`${own.stage}${kind}${own.microbatch}`))) continue;
          const needed = `${own.stage}${own.kinds.join("/")}${own.microbatch}`;
          throw new ScheduleError(`rank ${rank} runs ${textOf(part)} before ${needed}, which it needs`,
            `move ${needed} in front of ${textOf(part)}`);
        }
        for (const part of parts) done.add(textOf(part));
      }
    });
  }

  /** The error for ranks that are stuck, each at an action: the circle of ranks that wait for each other. It blames a rank that
   *  could break the circle: one whose row has something that is waited for behind what it is stuck at. */
  function deadlock(schedule, stuck) {
    const { actions, makers } = schedule;
    const name = (i) => textOf(actions[i]);
    const awaited = (rank) => name(makers[stuck.get(rank)]);
    const holder = (rank) => actions[makers[stuck.get(rank)]].rank;
    let rank = Math.min(...stuck.keys());
    const seen = [];
    while (!seen.includes(rank)) {
      seen.push(rank);
      rank = holder(rank);
    }
    const circle = seen.slice(seen.indexOf(rank));
    const waits = circle.map((r) => `rank ${r} waits at ${name(stuck.get(r))} for ${awaited(r)}`);
    const waiter = circle.find((r) => awaited(r) !== name(stuck.get(holder(r))));
    const blamed = holder(waiter);
    return new ScheduleError(`deadlock: ${waits.join("; ")}`,
      `on rank ${blamed}, run ${awaited(waiter)} before ${name(stuck.get(blamed))}`);
  }

  // ---- how far rows get that can't run to the end -------------------------------------------------------------------------

  /** What ranks run before nothing more can, drawn like a timeline, and where each one stands then: an idle interval whose
   *  part is "stuck". Any rows will do: each thing that an action needs is waited for by an item that takes no time, and
   *  what is missing by one that waits forever. */
  function reach(schedule, given = costs()) {
    const { rows, numStages, numMicrobatches, actions, turns } = schedule;
    const name = ({ kinds, ...need }) => textOf({ ...need, kind: kinds.join("/") });
    const first = new Map([...actions].reverse().map((each) => [textOf(each), each])); // of every action, where it is
    const needed = [...actions, null].fill(null), lags = needed.map(() => 0), durations = [...durationsOf(schedule, given), 0];
    const never = actions.length, asked = new Map(); // an item of no row; and of those that only wait: what for
    const waiting = turns.rows.map((row, rank) => row.flatMap((i) => {
      const isSent = actions[i].kind.length > 1; // communication, which waits for nothing here
      const before = (isSent ? [] : needs(actions[i], numStages)).map((need) => {
        const maker = need.kinds.map((kind) => first.get(name({ ...need, kinds: [kind] }))).find((found) => found !== undefined);
        asked.set(needed.length, name(need));
        lags.push(maker && maker.rank !== rank ? given.latency : 0);
        durations.push(0);
        return needed.push(maker ? maker.id : never) - 1;
      });
      return [...before, i];
    }));
    const [starts, ends] = run(waiting, needed, durations, lags);
    const done = waiting.map((row) => row.filter((i) => actions[i]?.id === i && starts[i] !== null));
    const ran = pplab.schedule(rows.map((row, rank) => row.slice(0, done[rank].length)), schedule.name);
    Object.assign(ran, { numStages, numMicrobatches });
    const times = [starts, ends].map((each) => done.flat().map((i) => each[i]));
    const timeline = Object.assign(pplab.recorded(ran, ...times), { costs: given });
    const end = (timeline.makespan || 1) * 1.25; // some room to show where ranks stand
    const stuck = waiting.flatMap((row, rank) => {
      const stands = row.find((i) => starts[i] === null);
      if (stands === undefined) return [];
      const at = rows[rank][done[rank].length].text, start = ends[done[rank][done[rank].length - 1]] ?? 0;
      return [{ rank, start, end, part: "stuck", at, for: null, text: `it waits at ${at} for ${asked.get(stands)}, which never runs` }];
    });
    const others = pplab.idle(timeline).filter(({ rank, part }) => part !== "drain" || done[rank].length === rows[rank].length);
    const numRun = ran.rows.flat().length, numAll = rows.flat().length;
    const title = `${schedule.name}: stuck after ${numRun} of ${numAll} actions`;
    return Object.assign(timeline, { idle: [...others, ...stuck], end, isStuck: true, title });
  }

  // ---- timelines of the package's --------------------------------------------------------------------------------------

  const isNumber = (x) => typeof x === "number" && x >= 0 && x <= 1e100;

  /** Whether these are spans on so many ranks: each a rank, a text, a start and an end. */
  function areSpans(spans, numRanks) {
    const isSpan = ([rank, text, ...at]) =>
      Number.isInteger(rank) && rank >= 0 && rank < numRanks && typeof text === "string" && at.length === 2 && at.every(isNumber);
    return Array.isArray(spans) && spans.every((span) => Array.isArray(span) && isSpan(span));
  }

  /** What a record says, as `lab.timeline_to_dict` writes them: a schedule, and where it has `spans`, its timeline. Also the
   *  timelines of what `lab.run_to_dict` writes. Returns records that can be shown; throws ScheduleError for anything else. */
  function records(data) {
    const found = Array.isArray(data) ? data : data?.timelines || [data];
    const expected = "expected what lab.timeline_to_dict, lab.run_to_dict or lab.to_csv have written";
    if (!Array.isArray(found) || !found.length) throw new ScheduleError("the file holds no timeline", expected);
    return found.map((each) => {
      const isRow = (row) => Array.isArray(row) && row.every((item) => typeof item === "string");
      if (!Array.isArray(each?.rows) || !each.rows.every(isRow)) throw new ScheduleError("the file holds something other than timelines", expected);
      for (const name of ["schedule", "unit", "how"]) {
        if (typeof (each[name] ?? "") !== "string") throw new ScheduleError(`the file's "${name}" is no text`, expected);
      }
      const schedule = pplab.schedule(each.rows, each.schedule ?? "your rows");
      if (!each.spans) return { schedule, unit: each.unit ?? "" };
      const items = schedule.rows.flatMap((row, rank) => row.map(({ text }) => `${rank} ${text}`));
      const { spans, others = [] } = each;
      const fits = areSpans(spans, schedule.numRanks) && spans.length === items.length && spans.every(([rank, text], i) => `${rank} ${text}` === items[i]);
      if (!fits) throw new ScheduleError("the file's spans are not those of its rows", expected);
      if (!areSpans(others, schedule.numRanks)) throw new ScheduleError('the file\'s "others" are no spans', expected);
      if (!spans.some(([, , start, end]) => end > start)) throw new ScheduleError("the file's spans take no time", expected);
      validate(schedule);
      return { schedule, timeline: recordedOf(schedule, each) };
    });
  }

  function recordedOf(schedule, { spans, others = [], unit = "", how = "measured" }) {
    const timeline = pplab.recorded(schedule, spans.map(([, , start]) => start), spans.map(([, , , end]) => end));
    const labels = others.filter(([, text]) => /^[a-z]/i.test(text));
    const shown = labels.map(([rank, text, start, end]) => ({ rank, text, start, end, part: "other", for: null }));
    const end = Math.max(timeline.makespan, ...shown.map((each) => each.end));
    return Object.assign(timeline, { unit: unit ?? "", how: how ?? "measured", idle: [...shown, ...pplab.idle(timeline)], end });
  }

  return { read, pack, unpack, validate, reach, records };
})();
