"""The debugger: a frame in which a reader steps through a simulated run, forwards and backwards in
time.
"""

from __future__ import annotations

import base64
import html
import json
import zlib
from pathlib import Path

import pplab_course
from pplab.lab.forms import frame_of, page_of

from ..observed import located
from ..spine import check_run, to_write
from ..verdict import Verdict, Wrong, right, wrong
from .replay import Replay
from .telling import hang, hints, record

HERE = Path(__file__).parent


class Debugger:
    """A run of a file to look at, in a notebook or the page as a frame, and elsewhere as words."""

    def __init__(self, path: Path, ranks: int, **settings: object):
        self.path, self.settings = path, settings
        runs = [Replay(path.read_text(), ranks, name=path.name, **settings)]
        if hang(runs[0]):  # else sends that don't wait change nothing but times
            runs.append(runs[0].without_waits)
        self.verdicts = [judged(run, path) for run in runs]
        self.runs = [_plain(run, verdict) for run, verdict in zip(runs, self.verdicts, strict=True)]

    def __repr__(self) -> str:
        return repr(self.verdicts[0])

    def _repr_html_(self) -> str:
        told = json.dumps({"runs": self.runs, "link": self.link()}, separators=(",", ":")).replace(
            "<", "\\u003c"
        )
        style = f"<style>{(HERE / 'player.css').read_text('utf-8')}</style>"
        view = f'{style}<div class="pplab-live pplab-debugger"></div>'
        script = (HERE / "player.js").read_text("utf-8")
        return frame_of(
            page_of(view, f"const told = {told};", script), "debugger", html.escape(repr(self))
        )

    def link(self) -> str:
        """The file and its settings as the end of an address of the book's page, which runs the
        file again.
        """
        if pplab_course.has_processes:
            return ""
        run = {"text": self.path.read_text(), "ranks": self.runs[0]["P"], **self.settings}
        packed = zlib.compress(json.dumps(run).encode(), 9)
        return f"#shared={base64.urlsafe_b64encode(packed).decode()}"


def debug(file: str | Path, ranks: int = 2, **settings: object) -> Debugger | Verdict:
    """Run a file on so many simulated ranks, 2 to 4, with settings such as M=8, and step through
    what each rank did.
    """
    path = located(file)
    if not path.is_file():
        return Verdict(
            None, f"there is no file {file} yet: run the cell that begins with %%writefile {file}"
        )
    try:
        empty = to_write(path)
    except Wrong as error:
        return wrong(str(error))
    if empty:
        return Verdict(None, f"write {' and '.join(empty)} in {path.name}")
    if not 2 <= ranks <= 4:
        raise ValueError(f"the debugger shows 2 to 4 ranks, got {ranks}")
    return Debugger(path, ranks, **settings)


def judged(run: Replay, path: Path) -> Verdict:
    """The checkers' verdict on the run, whatever its order."""
    try:
        check_run(record(run), path)
    except Wrong as error:
        return wrong(str(error))
    return right("gradients as in one process")


def _plain(run: Replay, verdict: Verdict) -> dict:
    """The run as lists, for the player."""
    # causes stay before what follows
    found, order = hang(run), sorted(run.events, key=lambda event: event.time)
    posted = {event.number: at for at, event in enumerate(order) if event.kind == "post"}
    return {
        "file": run.file,
        "source": run.text.splitlines(),
        "P": len(run.ranks),
        "M": int(run.settings.get("M", 1)),
        "waits": run.sends_wait,
        "lines": run.lines,
        "right": verdict.right,
        "says": [*found.causes, *found.waits] if found else [verdict.says],
        "circle": found.ranks if found and found.is_circle else (),
        "hints": hints(run),
        "events": [[*vars(event).values()] for event in order],
        "messages": [
            [
                m.rank,
                m.peer,
                m.kind,
                posted[m.number],
                m.match and m.match.number,
                m.posted,
                m.done,
                m.samples,
            ]
            for m in run.messages
        ],
        "printed": "".join(rank.printed.getvalue() for rank in run.ranks),
    }
