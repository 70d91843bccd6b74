"""Runs a chapter's cells in the book's page, in Pyodide: a small stand-in for IPython.

The cells of a page share one namespace. What a page can't have, such as torch or processes, is absent until a cell uses
it, so that a cell which only imports it goes on. `run(source, emit)` runs one cell and calls emit with events:

    "stream", "stdout" or "stderr", text
    "progress", how far long work has come; "" when it is done
    "display", {MIME type: text}
    "error", the exception's name, its last line, the whole traceback, what it needs that the page can't have or ""
"""

import ast
import dis
import json
import linecache
import pprint
import re
import sys
import time
import traceback
from functools import cache
from io import TextIOBase
from pathlib import Path

ABSENT = {
    *("torch", "transformers", "datasets", "numpy", "ortools", "PIL", "safetensors", "IPython"),
    *("multiprocessing", "_multiprocessing", "processes", "threads", "sockets"),
}
PAGE = "application/vnd.pplab.page+html"
FILE = re.compile(r"%%writefile (\S+)\n")  # the head of a cell that is a file
MOST_PRINTED = 200_000  # characters of a cell
MOST_SHOWN = 500, 20_000_000  # displays of a cell, and their characters: charts have many
MOST_FRAMES = 400  # of calls within calls; the browser's own stack ends soon after

space: dict = {}  # the namespace
_count = 0


class OutputLimit(RuntimeError):
    """A cell printed too much."""


class NotInThePage(ImportError):
    """A cell used what the page can't have."""

    def __init__(self, what: str):
        super().__init__(f"this needs {what}, which the page can't have: open the notebook", name=what)


class NoInput(RuntimeError):
    """A cell asked for typed input."""


class Shown:
    """Passes on what a cell shows, as much as a page can take while its reader looks on."""

    def __init__(self, emit):
        self.emit, self.count, self.size = emit, 0, 0

    def __call__(self, kind: str, *what) -> None:
        if kind == "display":
            self.count, self.size = self.count + 1, self.size + sum(map(len, what[0].values()))
            if self.count > MOST_SHOWN[0] or self.size > MOST_SHOWN[1] or len(what[0]["text/plain"]) > MOST_PRINTED:
                most = f"{MOST_SHOWN[0]} outputs, or {MOST_PRINTED:,} characters in one of them"
                raise OutputLimit(f"more than {most}: the cell was stopped")
        self.emit(kind, *what)


OutputLimit.__module__ = NotInThePage.__module__ = NoInput.__module__ = "builtins"  # a last line is name and words


class Absent:
    """What an import of an absent module binds."""

    def __init__(self, what: str):
        self._what = what

    def _use(self, *_, **__):
        raise NotInThePage(self._what)

    __call__ = __iter__ = __enter__ = __getitem__ = __len__ = __bool__ = __mro_entries__ = _use

    def __getattr__(self, name: str):
        if name.startswith("__"):  # Python asks whether it has a length, a representation ...
            raise AttributeError(name)
        self._use()


class Stream(TextIOBase):
    """Standard output or error: passed on in pieces, some each second."""

    def __init__(self, name: str, emit):
        self.name, self.emit, self.waiting, self.size, self.last = name, emit, [], 0, 0.0

    def writable(self) -> bool:
        return True

    def write(self, text: str) -> int:
        self.size += len(text)
        if self.size > MOST_PRINTED:
            raise OutputLimit(f"more than {MOST_PRINTED:,} characters of output: the cell was stopped")
        self.waiting.append(text)
        if time.monotonic() - self.last > 0.1:
            self.flush()
        return len(text)

    def progress(self, text: str, seconds: float) -> None:
        """Long work tells how far it has come: `lab.forms.progress_line` asks for this."""
        self.emit("progress", text)

    def flush(self) -> None:
        if self.waiting:
            self.emit("stream", self.name, "".join(self.waiting))
            self.waiting.clear()
            self.last = time.monotonic()


class NoKeyboard(TextIOBase):
    """Standard input."""

    def readable(self) -> bool:
        return True

    def readline(self, size: int = -1) -> str:
        raise NoInput("the page has no keyboard input for a cell: put the value into the cell")


def prepare() -> None:
    """Import what every chapter starts with; charts are kept in the page's form only, and nothing starts a process."""
    from pplab_drawings import dressed

    import pplab_course
    from pplab_course import figures, notebook  # noqa: F401

    pplab_course.has_processes = False
    figures.figure_picture = lambda figure: None
    figures.bundle = lambda page, pictures, text: ({PAGE: dressed(page), "text/plain": text}, {})
    _without_processes()
    sys.setrecursionlimit(MOST_FRAMES)
    space.update(__name__="__main__", __builtins__=__builtins__, display=display, get_ipython=lambda: None)


def _without_processes() -> None:
    """In a worker, these end it or wait for ever: here they say that they are absent."""
    import socket
    import subprocess
    import threading

    def absent(what: str):
        def use(*_, **__):
            raise NotInThePage(what)

        return use

    for name in ("listen", "connect", "bind"):
        setattr(socket.socket, name, absent("sockets"))
    subprocess.Popen.__init__ = absent("processes")
    threading.Thread.start = absent("threads")


def run(source: str, emit) -> str:
    """Run a cell; returns "ok", "error", or "absent" where it used what the page can't have."""
    global _count
    _count += 1
    name, emit = f"<cell {_count}>", Shown(emit)
    space["display"] = lambda *things: display(*things, emit=emit)
    streams = sys.stdin, sys.stdout, sys.stderr
    sys.stdin, sys.stdout, sys.stderr = NoKeyboard(), Stream("stdout", emit), Stream("stderr", emit)
    try:
        _execute(source, name, emit)
        return "ok"
    except BaseException as error:
        _flush()
        lines = traceback.format_exception(error)
        own = next((i for i, line in enumerate(lines) if '"<cell' in line), 1)  # leaves out the frames of this file
        last = _placed("".join(traceback.format_exception_only(error)).strip(), name)
        what = _absent(error, source)
        emit("error", type(error).__name__, last, _placed("".join(lines[:1] + lines[own:]), name), what)
        return "absent" if what else "error"
    finally:
        _flush()
        if plt := sys.modules.get("matplotlib.pyplot"):
            plt.close("all")
        sys.stdin, sys.stdout, sys.stderr = streams


def _placed(text: str, name: str) -> str:
    """A traceback's text, with the page's words for its cells."""
    return re.sub(r'File "<cell \d+>"', "In a cell above", text.replace(f'File "{name}"', "In this cell"))


def _execute(source: str, name: str, emit) -> None:
    if file := FILE.match(source):
        print("Overwriting" if Path(file[1]).exists() else "Writing", file[1])
        Path(file[1]).write_text(source[file.end() :] + "\n")
        return
    source = re.sub(r"^%load_ext .*$", "", source, flags=re.M)
    linecache.cache[name] = len(source), None, source.splitlines(True), name  # for tracebacks and `inspect`
    tree = ast.parse(source, name)
    last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
    for statement in tree.body:  # one by one, since an import may be of something absent
        code = compile(ast.Module([statement], []), name, "exec")
        if isinstance(statement, ast.Import | ast.ImportFrom):
            _import(statement, code)
        else:
            exec(code, space)
    if last is not None:
        value = eval(compile(ast.Expression(last.value), name, "eval"), space)
        if value is not None and not source.rstrip().endswith(";") and not _is_drawing(value):
            space["_"] = value
            display(value, emit=emit)
    if plt := sys.modules.get("matplotlib.pyplot"):
        for number in plt.get_fignums():
            display(plt.figure(number), emit=emit)


def _import(statement: ast.Import | ast.ImportFrom, code) -> None:
    """Import, and bind the names of what is absent to `Absent`."""
    try:
        exec(code, space)
    except ModuleNotFoundError as error:
        if (what := (error.name or "").split(".")[0]) not in ABSENT:
            raise
        if isinstance(statement, ast.ImportFrom) and len(statement.names) > 1:  # some of the names may be there
            for alias in statement.names:
                one = ast.fix_missing_locations(ast.ImportFrom(statement.module, [alias], statement.level))
                _import(one, compile(ast.Module([one], []), "<import>", "exec"))
            return
        for alias in statement.names:
            bound = alias.name if isinstance(statement, ast.ImportFrom) else alias.name.split(".")[0]
            space[alias.asname or bound] = Absent(what)


def display(*things: object, emit) -> None:
    """Show things in the richest form that the page has."""
    for thing in things:
        _flush()
        emit("display", bundle_of(thing))


def bundle_of(thing: object) -> dict[str, str]:
    """Its forms by MIME type, the text among them."""
    from matplotlib.figure import Figure

    from pplab.schedule import Schedule
    from pplab.timeline import Timeline
    from pplab_course import figures

    if isinstance(thing, Figure):
        return figures.figure_bundle(thing)[0]
    if isinstance(thing, Timeline):
        return figures.timeline_bundle(thing)[0]
    if isinstance(thing, Schedule):
        return {"text/html": figures.schedule_html(thing), "text/plain": repr(thing)}
    made = {} if isinstance(thing, type) else {name: getattr(thing, name, None) for name in FORMS}
    texts = {"text/plain": _pretty(thing)}
    bundle = made.pop("_repr_mimebundle_", None)
    if bundle and (found := bundle()) is not None:  # None: as if it weren't there
        found = found[0] if isinstance(found, tuple) else found
        if not isinstance(found, dict) or not all(isinstance(text, str) for text in found.values()):
            raise TypeError(f"_repr_mimebundle_ has to return a dict of texts, got {found!r:.80}")
        return texts | found
    texts |= {FORMS[name]: form() for name, form in made.items() if form}
    return {kind: text for kind, text in texts.items() if text is not None}


FORMS = {
    "_repr_mimebundle_": "",
    "_repr_html_": "text/html",
    "_repr_markdown_": "text/markdown",
    "_repr_svg_": "image/svg+xml",
}


def _pretty(thing: object) -> str:
    """As IPython prints it: a long container has an item on each line."""
    text = repr(thing)
    if type(thing) not in (list, tuple, dict, set) or len(text) <= 79:
        return text
    if len(text) > 4000:
        return pprint.pformat(thing, width=80, sort_dicts=False)
    items = [f"{key!r}: {value!r}" for key, value in thing.items()] if type(thing) is dict else map(repr, thing)
    opening, closing = {list: "[]", tuple: "()", dict: "{}", set: "{}"}[type(thing)]
    return opening + ",\n ".join(items) + closing


def _is_drawing(value: object) -> bool:
    """Whether it is a chart's axes: the chart itself is shown."""
    return type(value).__name__ in ("Axes", "AxesColumn")


def _absent(error: BaseException | None, source: str) -> str:
    """What the page can't have and the error comes from, or the cell uses."""
    while error is not None:
        if isinstance(error, ImportError) and (what := (error.name or "").split(".")[0]) in ABSENT:
            return what
        error = error.__cause__ or error.__context__
    used = (space.get(name) for name in _read(source)[1])
    return next((thing._what for thing in used if isinstance(thing, Absent)), "")


def _flush() -> None:
    sys.stdout.flush()
    sys.stderr.flush()


def recall(values: str) -> None:
    """Bind the names that a cell can't make here to what it made when the book was recorded, as JSON."""
    from measured import from_plain

    space.update({name: from_plain(value) for name, value in json.loads(values).items()})


# What changes something besides names, as far as reading tells: it runs before every cell below it.
ALWAYS = re.compile(r"\bregister\b|spine\.(begin|joined)|\bopen\(|write_text|warnings\.")
NOT_CHANGED = {"pp", "lab", "exercise", "pictures", "plt"}  # by a call of one of their functions


def needed(sources: list[str], which: int) -> list[int]:
    """Of the cells above cell `which`, those that it needs, directly or by others, as far as reading tells."""
    read = [_read(source) for source in sources[: which + 1]]
    wanted, chosen = set(read[which][1]), set()
    while True:
        more = {i for i, (makes, _, always) in enumerate(read[:which]) if always or makes & wanted} - chosen
        if not more:
            return sorted(chosen)
        chosen |= more
        wanted = wanted.union(*(read[i][1] for i in more))


@cache
def _read(source: str) -> tuple[set[str], set[str], bool]:
    """The names that a cell makes or changes, those that it uses, and whether it does something besides. A file's name
    is one of them."""
    if file := FILE.match(source):
        return {file[1]}, set(), False
    try:
        tree = ast.parse(re.sub(r"^%.*$", "", source, flags=re.M))
    except SyntaxError:
        return set(), set(), False
    makes, uses = set(), set()
    codes = [compile(tree, "<cell>", "exec")]
    for code in codes:
        codes += [each for each in code.co_consts if isinstance(each, type(code))]
        uses |= {each for each in code.co_consts if isinstance(each, str) and each.endswith(".py")}
        for step in dis.get_instructions(code):
            if step.opname in ("STORE_NAME", "STORE_GLOBAL"):
                makes.add(step.argval)
            elif step.opname in ("LOAD_NAME", "LOAD_GLOBAL"):
                uses.add(step.argval)
    return makes | (_changed(tree) - NOT_CHANGED), uses, bool(ALWAYS.search(source))


def _changed(tree: ast.Module) -> set[str]:
    """Names of things that are changed in place: rows[0] = 1, rows.append(1)."""
    found = set()
    for node in ast.walk(tree):
        place = None
        if isinstance(node, ast.Attribute | ast.Subscript) and not isinstance(node.ctx, ast.Load):
            place = node
        elif isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
            place = node.value.func if isinstance(node.value.func, ast.Attribute) else None
        while isinstance(place, ast.Attribute | ast.Subscript | ast.Call):
            place = place.func if isinstance(place, ast.Call) else place.value
        if isinstance(place, ast.Name):
            found.add(place.id)
    return found
