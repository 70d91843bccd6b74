// Cells of a chapter's page that are run, edited and judged where they stand.
// Nothing is loaded before a reader asks for it. Then come plain scripts, so that a page opened as a file can load them, too: the
// chapter's cells (named by this script's data-cells), Python in pieces, and the editor.
(() => {
  "use strict";
  const script = document.currentScript;
  const here = script.src.replace(/[^/]*$/, "");
  const chapter = location.pathname.split("/").pop().replace(/\.html$/, "");
  const NOTEBOOK = Object.assign(document.createElement("a"), { href: `${here}../../book/how_to_use.html`, textContent: "run the chapter's notebook" });
  const SLOW = 1000, LARGE = 1e9; // ms until a running cell says how long; bytes of Python's memory, which never shrinks

  const make = (tag, name = "", text = "") => Object.assign(document.createElement(tag), { className: name, textContent: text });
  const button = (name, text, act) => Object.assign(make("button", name, text), { type: "button", onclick: act });

  /** What the reader has done, by cell; a browser may refuse to keep it, and a second tab may have changed it. */
  const kept = {
    trouble: "",
    key: (id) => `pplab:${chapter}:${id}`,
    get(id) { try { return JSON.parse(localStorage.getItem(this.key(id))) || {}; } catch { return {}; } },
    set(id, values) {
      const all = Object.entries({ ...this.get(id), ...values }).filter(([, value]) => value !== null);
      try {
        if (all.length) localStorage.setItem(this.key(id), JSON.stringify(Object.fromEntries(all)));
        else localStorage.removeItem(this.key(id));
      } catch {
        this.trouble = "Your browser has no room to keep what you write: download it before you leave. ";
        tally();
      }
    },
  };
  addEventListener("storage", ({ key }) => {
    if (!key?.startsWith(kept.key(""))) return;
    kept.trouble = "You are working on this chapter in a second tab, too. The tab that changes an answer last keeps it: reload this one before you go on. ";
    tally();
  });

  // ---- what is loaded on demand -----------------------------------------------------------------------------------
  const loading = {};
  const load = (name) => (loading[name] ??= new Promise((done, fail) => {
    const refused = () => { delete loading[name]; fail(new Error(`${name} could not be loaded from ${here}: is the whole folder _static there?`)); };
    document.head.append(Object.assign(make("script"), { src: here + name, onload: done, onerror: refused }));
  }));
  const sources = async () => (await load(script.dataset.cells), globalThis.pplabChapter);

  /** A zip archive's files: {name: a promise of its bytes}. */
  function unzip(bytes) {
    const view = new DataView(bytes.buffer, bytes.byteOffset), text = new TextDecoder(), files = {};
    let end = bytes.length - 22;
    while (view.getUint32(end, true) !== 0x06054b50) end--;
    for (let at = view.getUint32(end + 16, true), left = view.getUint16(end + 10, true); left; left--) {
      const [size, length, extra, note] = [view.getUint32(at + 20, true), ...[28, 30, 32].map((i) => view.getUint16(at + i, true))];
      const local = view.getUint32(at + 42, true);
      const from = local + 30 + view.getUint16(local + 26, true) + view.getUint16(local + 28, true);
      const stored = bytes.subarray(from, from + size);
      const inflated = () => new Response(new Blob([stored]).stream().pipeThrough(new DecompressionStream("deflate-raw"))).arrayBuffer();
      files[text.decode(bytes.subarray(at + 46, at + 46 + length))] = view.getUint16(at + 10, true) ? inflated().then((made) => new Uint8Array(made)) : stored;
      at += 46 + length + extra + note;
    }
    return files;
  }

  const decoded = (text) => Uint8Array.fromBase64 ? Uint8Array.fromBase64(text) : Uint8Array.from(atob(text), (c) => c.charCodeAt(0));

  // ---- Python -----------------------------------------------------------------------------------------------------
  const python = { worker: null, ready: null, files: null, module: null, reply: null };

  function lacking() {
    const names = ["WebAssembly", "Worker", "DecompressionStream"].filter((name) => !globalThis[name]);
    return names.length && `This browser has no ${names.join(" and no ")}, without which Python can't run in the page: open the notebook.`;
  }

  const started = (say) => (python.ready ??= start(say).catch((error) => { halt(); throw error; }));

  async function start(say) {
    if (lacking()) throw new Error(lacking());
    if (!python.files) {
      const { pieces } = await sources();
      let there = 0;
      const coming = () => say(`Python is loaded: ${there++} of ${pieces.length} parts`);
      coming();
      await Promise.all(pieces.map((name) => load(name).then(coming)));
      const found = unzip(decoded(pieces.map((name) => globalThis.pplabPieces[name]).join("")));
      const names = Object.keys(found);
      python.files = Object.fromEntries((await Promise.all(Object.values(found))).map((bytes, i) => [names[i], bytes]));
      delete globalThis.pplabPieces;
    }
    const files = python.files;
    const url = URL.createObjectURL(new Blob([files["pyodide.asm.js"], "\n;", files["pyodide.js"], "\n;", files["worker.js"]], { type: "text/javascript" }));
    try {
      const worker = (python.worker = new Worker(url));
      const ready = await new Promise((done, fail) => {
        const forbidden = "The site that serves this page forbids what Python needs (its content policy has to allow worker-src blob: and 'wasm-unsafe-eval'): open the notebook, or a copy of the book of your own.";
        worker.onerror = (event) => fail(new Error(event.message ? `Python didn't start: ${event.message}` : forbidden));
        worker.onmessage = ({ data }) => {
          if (data.progress) say(`${data.progress} …`);
          else if (data.ready) done(data.ready);
          else fail(new Error(/content security policy|unsafe-eval/i.test(data.failed) ? forbidden : `Python didn't start: ${data.failed}`));
        };
        python.reply = (data) => fail(new Error(data.failed)); // if it is stopped meanwhile
        worker.postMessage({ start: {
          wasm: files["pyodide.asm.wasm"], stdlib: files["stdlib.zip"], app: files["app.zip"], module: python.module,
          lock: new TextDecoder().decode(files["pyodide-lock.json"]),
        } });
      });
      python.module = ready.module; // compiled once per page
      worker.onmessage = ({ data }) => python.reply?.(data);
    } finally {
      URL.revokeObjectURL(url);
    }
  }

  /** Ask Python for something; `tell` gets a running cell's events. Resolves to its answer; rejects if it was stopped. */
  function ask(message, tell) {
    return new Promise((done, fail) => {
      python.reply = (data) => {
        if (data.event) return tell(data.event);
        python.reply = null;
        if (data.stopped) return fail(new Stopped());
        if (data.failed) {
          halt();
          return fail(new Error(`Python itself has ended, and starts anew with the next cell: ${data.failed.split("\n").find((line) => line.trim())}`));
        }
        if (data.memory > LARGE) {
          tell(["stream", "stderr", "Python held more than a gigabyte: it starts anew with the next cell.\n"]);
          halt();
        }
        done(data.done);
      };
      python.worker.postMessage(message);
    });
  }

  class Stopped extends Error {}

  /** End Python, whatever it does; the next cell starts it anew. */
  function halt() {
    python.worker?.terminate();
    const { reply } = python;
    Object.assign(python, { worker: null, ready: null, reply: null });
    for (const cell of cells) cell.ran = false;
    reply?.({ stopped: true, failed: "stopped" });
  }

  // ---- cells ------------------------------------------------------------------------------------------------------
  let cells = [], busy = Promise.resolve();

  class Cell {
    constructor(id, node) {
      Object.assign(this, { id, node, ran: false, editor: null, running: false });
      if (!node) return;
      this.asks = node.classList.contains("live-asks");
      this.needs = [...node.classList].find((name) => name.startsWith("live-needs-"))?.slice("live-needs-".length);
      this.input = node.querySelector(":scope > .cell_input, :scope > details .cell_input");
      this.code = this.input?.querySelector("pre");
      this.output = node.querySelector(".cell_output");
      this.recorded = [...(this.output?.childNodes || [])];
      this.printed = this.code?.textContent.trimEnd();
      const { text, of, verdict } = kept.get(id);
      if (text !== undefined && of === this.printed) this.text = text; // else the book's cell has changed since
      this.dress();
      if (this.text !== undefined && verdict) {
        this.clear();
        this.judge(verdict);
        this.output.style.minHeight = "";
        this.mark();
      } else if (this.text !== undefined && this.recorded.length) this.outdated("changed since it ran");
      if (kept.get(`${id}-mine`).text) this.addMine();
    }

    /** This cell, and below it the reader's own and one that came with the address. */
    get both() { return [this, ...[this.mine, this.lent].filter(Boolean).flatMap((each) => each.both)]; }

    /** An empty cell below, for what the reader wants to try; it is kept as an edit is. One that is `lent` isn't. */
    addMine(kind = "mine") {
      const node = make("div", "cell live live-own"), id = `${this.id}-${kind}`;
      node.id = `cell-${id}`;
      node.innerHTML = '<div class="cell_input"><div><div class="highlight"><pre></pre></div></div></div>';
      (kind === "lent" && this.mine || this).node.after(node);
      const made = (this[kind] = new Cell(id, node));
      Object.assign(made, { given: { source: "" }, leave: () => { node.remove(); this[kind] = null; cells = cells.filter((each) => each.node !== node); this.mark(); } });
      made.back.textContent = "Remove";
      if (cells.length) cells.splice(cells.indexOf(this) + this.both.indexOf(made), 0, made);
      this.mark();
      return made;
    }

    /** The text that runs: the reader's, or else the book's. */
    get source() { return this.text ?? this.given?.source ?? this.printed; }

    dress() {
      const bar = make("div", "live-bar");
      this.note = make("span", "live-note");
      this.note.setAttribute("role", "status");
      this.go = button("live-run", this.asks ? "Check" : "Run", () => (this.running ? halt() : run(this)));
      this.go.title = "with what it needs from above";
      this.pen = button("live-edit", "", () => (this.editor ? this.close() : this.edit()));
      this.back = button("live-back", "As printed", () => this.restore());
      this.plus = button("live-plus", "New cell", () => { this.addMine(); this.mine.edit(); });
      if (this.needs) this.note.append(`needs ${this.needs}: `, NOTEBOOK.cloneNode(true));
      else bar.append(this.go, ...(this.code ? [this.pen] : []), this.back, this.plus);
      bar.append(this.note);
      (this.input?.parentElement === this.node ? this.input : this.node.querySelector(":scope > details > :last-child"))?.after(bar);
      if (!bar.parentElement) this.node.prepend(bar);
      if (this.text !== undefined) this.shown(this.text);
      this.mark();
    }

    /** Show a text as the cell's code, without the editor. */
    shown(text) {
      this.coloured ??= [...this.code.childNodes];
      this.code.replaceChildren(...(text === this.printed ? this.coloured : [text]));
    }

    mark() {
      const edited = this.text !== undefined;
      this.back.hidden = !edited && !this.replaced && !this.leave;
      this.plus.hidden = !this.replaced || !!this.mine || this.asks || !!this.leave;
      this.pen.textContent = this.editor ? "Close" : this.asks ? "Answer" : "Edit";
      this.node.classList.toggle("live-edited", edited);
      tally();
    }

    async edit() {
      if (!this.editor) {
        try {
          await load("editor.js");
        } catch (error) {
          return void (this.note.textContent = error.message);
        }
        const box = make("div", "live-editor"), shown = this.code.closest(".highlight").parentElement;
        shown.hidden = true;
        this.input.append(box);
        this.editor = globalThis.pplabEditor.edit(box, this.source, {
          label: this.asks ? "Your answer, in Python" : "The cell, in Python",
          onRun: (ahead) => run(this, ahead),
          onLeave: () => this.go.focus(),
          onChange: (text) => this.changed(text),
        });
        if (!matchMedia("(pointer: coarse)").matches) this.note.textContent ||= "Ctrl+Enter runs it, Shift+Enter runs it and goes on, Escape leaves";
        this.mark();
      }
      this.editor.focus();
      const dots = this.source.indexOf(this.asks ? "..." : "...  # yours");
      this.editor.dispatch({ selection: dots < 0 ? { anchor: 0 } : { anchor: dots, head: dots + 3 }, scrollIntoView: true });
      setTimeout(() => { // once more when wrapped lines have their heights
        const node = this.editor?.domAtPos(this.editor.state.selection.main.head).node;
        (node?.parentElement.closest(".cm-line") ?? node)?.scrollIntoView({ block: "nearest" });
      }, 200);
    }

    /** Close the editor; the text stays. */
    close() {
      this.editor.destroy();
      this.editor = null;
      this.input.querySelector(".live-editor").remove();
      this.code.closest(".highlight").parentElement.hidden = false;
      this.shown(this.source);
      this.mark();
    }

    changed(text) {
      this.text = text.trimEnd() === this.printed ? undefined : text;
      this.ran = false;
      if (this.replaced) this.outdated("changed since it ran");
      kept.set(this.id, this.text === undefined ? { text: null, of: null, verdict: null } : { text, of: this.printed, verdict: null });
      this.mark();
    }

    /** Tell that what is shown isn't what the cell would say now. */
    outdated(why) {
      this.node.classList.add("live-old");
      this.note.textContent = why;
    }

    restore() {
      this.editor?.dispatch({ changes: { from: 0, to: this.editor.state.doc.length, insert: this.printed } });
      if (this.code) {
        this.changed(this.printed);
        this.shown(this.printed);
      }
      kept.set(this.id, { right: null });
      this.recall();
      this.ran = false;
      this.note.textContent = "";
      this.leave?.();
      this.mark();
    }

    /** Show what the book has recorded. */
    recall() {
      this.output?.replaceChildren(...this.recorded);
      this.replaced = false;
      this.node.classList.remove("live-mine", "live-old");
    }

    /** Make an empty place for what comes, and keep what the book has recorded. */
    clear() {
      if (!this.output) this.node.append((this.output = make("div", "cell_output docutils container")));
      this.output.style.minHeight = `${this.output.offsetHeight}px`; // what is below doesn't jump
      this.output.replaceChildren();
      this.replaced = true;
      this.node.classList.add("live-mine");
      this.node.classList.remove("live-old");
      this.stream = null;
    }

    show([kind, ...what]) {
      if (kind === "stream") return this.print(what[1]);
      if (kind === "progress") return void (this.progress = what[0] && `, ${what[0]}`);
      this.stream = null;
      if (kind === "error") return this.fail(...what);
      const [bundle] = what, text = bundle["text/plain"] || "";
      const drawn = bundle["application/vnd.pplab.page+html"] || bundle["text/html"] || bundle["image/svg+xml"];
      if (drawn) {
        this.output.append(Object.assign(make("div", "output text_html"), { innerHTML: drawn }));
        this.output.dispatchEvent(new Event("pplab-output", { bubbles: true })); // charts of time get a playhead
      }
      else if (/^[✓✗…] /.test(text)) this.judge(text);
      else {
        this.print(`${(bundle["text/markdown"] || text).replace(/^```\w*\n|\n```$/g, "")}\n`);
        this.stream = null;
      }
    }

    judge(text) {
      this.output.append(make("p", `live-verdict ${{ "✓": "right", "✗": "wrong" }[text[0]] || ""}`, text));
      if (!this.asks) return;
      kept.set(this.id, { right: text[0] === "✓" || null, verdict: text });
      tally();
    }

    print(text) {
      if (!this.stream) {
        const box = make("div", "output stream highlight-myst-ansi notranslate");
        this.stream = box.appendChild(make("div", "highlight")).appendChild(make("pre"));
        this.output.append(box);
      }
      this.stream.append(text);
    }

    /** An error: its last line, and on demand what led to it. */
    fail(name, last, whole, absent) {
      const box = make("div", "output live-error"), more = make("details"), lines = last.split("\n");
      box.append(make("strong", "", lines.pop()));
      if (lines.length) box.append(make("pre", "", lines.join("\n"))); // where the syntax is wrong
      const above = name === "NameError" && cells.slice(0, cells.indexOf(this)).find((cell) => cell.needs)?.needs;
      const told = make("p", "", `${absent ? "This cell" : "A cell above"} needs ${absent || above}, which the page can't have: `);
      told.append(NOTEBOOK.cloneNode(true));
      if (absent || above) box.append(told);
      else this.tellLost(box, last);
      more.append(make("summary", "", "Where it happened"), make("pre", "", whole));
      if (whole.trim() !== last) box.append(more);
      this.output.append(box);
    }

    /** A name that is missing since the reader has replaced the cell that makes it. */
    tellLost(box, last) {
      const [, missing] = last.match(/^NameError: name '(\w+)'/) || [];
      if (!missing) return;
      const name = new RegExp(`\\b${missing}\\b`);
      const lost = cells.slice(0, cells.indexOf(this)).findLast(({ text, given }) => text !== undefined && name.test(given.source) && !name.test(text));
      if (!lost) return;
      const told = make("p", "", "A cell above makes it, as printed. You have changed that cell: ");
      told.append(button("", "print it again", () => { lost.restore(); run(this); }));
      box.append(told);
    }
  }

  /** Run a cell, and before it those above that it needs and that haven't run. One runs at a time. */
  function run(cell, ahead = false) {
    cell.running = true;
    cell.go.textContent = "Stop";
    return (busy = busy.then(async () => {
      const began = performance.now(), say = (text) => { cell.note.textContent = text; };
      const clock = setInterval(() => {
        if (performance.now() - began > SLOW && cell.timed) say(`running, ${Math.round((performance.now() - began) / 1000)} s${cell.progress} …`);
      }, 500);
      try {
        await started(say);
        await know();
        const measured = await prepared(cell, say);
        say("running …");
        cell.timed = true;
        cell.progress = "";
        cell.clear();
        await evaluate(cell, (event) => cell.show(event));
        const taken = `made here in ${((performance.now() - began) / 1000).toFixed(2)} s`;
        say(measured ? `${taken}, with values that the book has measured` : taken);
      } catch (error) {
        say(error instanceof Stopped ? "Stopped. What ran before runs again with the next cell." : error.message);
        if (cell.replaced && !cell.output.childNodes.length) cell.recall();
      }
      clearInterval(clock);
      cell.running = cell.timed = false;
      if (cell.output) cell.output.style.minHeight = "";
      cell.go.textContent = cell.asks ? "Check" : "Run";
      cell.mark();
      const next = ahead && cells.slice(cells.indexOf(cell) + 1).find(({ go }) => go?.isConnected && go.offsetParent);
      if (!next) return;
      next.go.focus({ preventScroll: true }); // what the cell has made stays in view
      next.go.scrollIntoView({ block: "nearest" });
    }));
  }

  /** Cells below that have used what a cell's former text made run again when they are needed, and say so. */
  async function spread(cell) {
    const texts = cells.map((each) => each.source), from = cells.indexOf(cell);
    for (const [which, each] of cells.entries()) {
      if (which <= from || !each.ran || !(await ask({ needed: texts, which })).includes(from)) continue;
      each.ran = false;
      if (each.replaced) each.outdated("a cell above has changed since it ran");
    }
  }

  /** Run a cell's text, and bind what it can't make here to what it made when the book was recorded. */
  async function evaluate(cell, tell) {
    await ask({ run: cell.source }, tell);
    if (cell.given.measured && python.worker) await ask({ recall: cell.given.measured });
    cell.ran = !!python.worker;
    if (cell.ran && (cell.evaluated ??= cell.source) !== cell.source) await spread(cell);
    cell.evaluated = cell.source;
  }

  /** Give every cell the book's source, and put those that aren't on the page in their places. */
  async function know() {
    const known = new Map(cells.map((cell) => [cell.id, cell]));
    const told = (given) => Object.assign(known.get(given.id) || new Cell(given.id, null), { given });
    cells = (await sources()).cells.flatMap((given) => told(given).both);
  }

  /** Run what a cell needs from above; returns whether some of it was measured when the book was recorded. */
  async function prepared(cell, say) {
    const which = cells.indexOf(cell), above = await ask({ needed: cells.map((each) => each.source), which });
    let measured = false;
    for (const each of above.map((i) => cells[i]).filter((one) => !one.given.asks)) {
      measured ||= !!each.given.measured;
      if (each.ran) continue;
      say("running what it needs from above …");
      const events = [];
      await evaluate(each, (event) => events.push(event));
      if (each.text === undefined || !each.node) continue;
      each.clear(); // the reader's own text: what it says isn't what is recorded
      events.forEach((event) => each.show(event));
    }
    return measured;
  }

  // ---- the page ---------------------------------------------------------------------------------------------------
  let line = null;

  function tally() {
    if (!line) return;
    const asked = cells.filter((cell) => cell.asks), right = asked.filter((cell) => kept.get(cell.id).right).length;
    line.firstChild.textContent = `${kept.trouble}${right} of ${asked.length} answers are right. `;
    for (const each of line.querySelectorAll("button")) each.hidden = !cells.some((cell) => cell.text !== undefined || cell.replaced);
  }

  /** The chapter's code as a notebook, with the reader's answers and edits. */
  async function download() {
    await know();
    const code = cells.filter((cell) => cell.source).map((cell) => ({ cell_type: "code", execution_count: null, id: cell.id, metadata: {}, outputs: [], source: cell.source }));
    const head = { cell_type: "markdown", id: "answers", metadata: {}, source: `# ${document.querySelector("h1").firstChild.textContent} ${chapter}: my answers\n\nThe chapter's code, with what I changed in its page.` };
    const notebook = { cells: [head, ...code], metadata: { kernelspec: { display_name: "Python 3", language: "python", name: "python3" } }, nbformat: 4, nbformat_minor: 5 };
    const url = URL.createObjectURL(new Blob([JSON.stringify(notebook, null, 1)], { type: "application/x-ipynb+json" }));
    Object.assign(make("a"), { href: url, download: `${chapter}_answers.ipynb` }).click();
    setTimeout(() => URL.revokeObjectURL(url), 1000);
  }

  /** A run of the debugger that the address brings: a cell with the file and one that runs it, for the reader to run or not. */
  async function lend() {
    const packed = location.hash.match(/^#shared=([\w-]+=*)$/)?.[1];
    if (!packed || lacking()) return;
    const debug = cells.find(({ printed }) => printed?.includes("simulated.debug("));
    try {
      const bytes = decoded(packed.replaceAll("-", "+").replaceAll("_", "/"));
      const inflated = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("deflate"));
      const { text, ...settings } = JSON.parse(await new Response(inflated).text());
      const given = Object.entries(settings).filter(([name, value]) => /^\w+$/.test(name) && Number.isFinite(value)).map(([name, value]) => `, ${name}=${value}`);
      const call = `from pplab_course import simulated\n\nsimulated.debug("shared.py"${given.join("")})`;
      let last = debug;
      for (const [source, says] of [[`%%writefile shared.py\n${text}`, "Somebody has shared this file."], [call, "Run shows what the shared file does."]]) {
        last = last.addMine("lent");
        last.text = source;
        last.shown(source);
        last.note.textContent = says;
        last.mark();
      }
      last.node.scrollIntoView({ block: "center" });
    } catch {
      debug.note.textContent = "The address of a shared run is damaged: ask for it again.";
    }
  }

  document.addEventListener("DOMContentLoaded", () => {
    cells = [...document.querySelectorAll("div.cell.live")].flatMap((node) => new Cell(node.id.slice("cell-".length), node).both);
    line = document.querySelector(".live-tally");
    line?.replaceChildren(
      make("span"),
      button("live-download", "Download them as a notebook", download), " ",
      button("live-reset", "Everything as printed", () => cells.forEach((cell) => cell.node && cell.back && cell.restore())),
    );
    tally();
    lend();
  });
  globalThis.pplabLive = { python, run: (id) => run(cells.find((cell) => cell.id === id)), cells: () => cells, halt };
})();
