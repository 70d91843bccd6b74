"""The pipeline that the reader builds: plain files that torchrun starts, each a small change from
the one before.

`shown` and `begin` leave the bodies of functions to the reader, `changes` shows what is new in the
second of two files, `run` runs a file, and the checkers run the reader's. Checkers judge order,
forwards held, time and gradients by what was observed from outside (pplab_course.observed). What
the file prints is shown, but it doesn't count.
"""

from __future__ import annotations

import ast
import html
import sys
from collections.abc import Iterator
from dataclasses import replace
from difflib import SequenceMatcher
from pathlib import Path

import pplab_course
from pplab import lab, palette  # noqa: F401 (with lab, eager 1F1B is known)
from pplab.actions import B, F
from pplab.builders import build
from pplab.costs import Costs
from pplab.errors import unknown
from pplab.schedule import Schedule, plural
from pplab.simulator import simulate

from . import observed
from .microbatches import EQUAL, check
from .neighbours import thrown_away
from .notebook import Source
from .observed import Ran, located
from .verdict import UNASKED, Verdict, Wrong, checker, right, told

__all__ = [
    "begin",
    "changes",
    "gpipe_file",
    "joined",
    "naive_file",
    "one_f_one_b_file",
    "run",
    "shown",
]

TO_WRITE = "...  # yours"
TOLERANCE = 1.3  # of a step's time over the predicted
LIMIT_S = 12.0  # for each run of a checker, and longer for a paced one
LAST = "do all messages leave, the last one of a step, too?"


def run(file: str | Path, ranks: int = 2, *, limit_s: float = 30.0, **settings: object) -> Ran:
    """Run the file on so many ranks. They are processes, or on the book's page simulated ranks,
    which don't need torch.

    `limit_s` and the settings are those of `observed.run`. If the processes hang, simulated ranks
    run the same file and explain why.
    """
    from . import simulated

    if not pplab_course.has_processes:
        return simulated.run(file, ranks, **settings)
    ran = observed.run(file, ranks, limit_s=limit_s, **settings)
    if not any(report.stuck for report in ran.reports):
        return ran
    return replace(ran, why=simulated.why_it_hangs(file, ranks, **settings))


def shown(file: str | Path, *functions: str) -> Source:
    """The file as code, without the bodies of these functions."""
    return _source(_without(located(file).read_text(), functions))


def begin(file: str | Path, *functions: str, to: str = "my_pipe.py") -> str:
    """Copy the file without the bodies of these functions, which the reader writes. An existing
    copy stays.
    """
    without = f" without the body of {', '.join(functions)}" if functions else ""
    return written(
        to, _without(located(file).read_text(), functions), f"{to} is a copy of {file}{without}"
    )


def with_faults(file: str | Path, faults: tuple[tuple[str, str], ...]) -> str:
    """The file's text with each of these pieces replaced. Each has to be in it once."""
    text = located(file).read_text()
    for right_one, wrong_one in faults:
        assert text.count(right_one) == 1, right_one
        text = text.replace(right_one, wrong_one)
    return text


def written(to: str | Path, text: str, says: str) -> str:
    """Write a file for the reader, and return `says`. An existing file is the reader's, so it
    stays.
    """
    if Path(to).exists():
        return (
            f"{to} is there already and stays as it is: go on with it, or delete it to begin anew"
        )
    Path(to).write_text(text)
    return says


def joined(file: str | Path, *functions: str, of: str | Path, to: str) -> str:
    """Write a file that is the first one with these functions `of` the second one, and return its
    name.
    """
    text, other = located(file).read_text(), located(of).read_text()
    for name in functions:
        text = text.replace(_lines(text, name), _lines(other, name))
    Path(to).write_text(text)
    return to


def _function(text: str, name: str) -> ast.FunctionDef:
    found = {node.name: node for node in ast.parse(text).body if isinstance(node, ast.FunctionDef)}
    if name not in found:
        raise unknown("function", name, found)
    return found[name]


def _lines(text: str, name: str) -> str:
    node = _function(text, name)
    return "".join(text.splitlines(keepends=True)[node.lineno - 1 : node.end_lineno])


def _without(text: str, functions: tuple[str, ...]) -> str:
    """The text with dots for the functions' bodies. A comment at the beginning of a body stays,
    because it tells what to write.
    """
    for name in functions:
        node, lines = _function(text, name), text.splitlines(keepends=True)
        lines[node.body[0].lineno - 1 : node.end_lineno] = [f"    {TO_WRITE}\n"]
        text = "".join(lines)
    return text


def _source(text: str) -> Source:
    source = Source()
    source.text = text.rstrip()
    return source


def changes(old: str | Path, new: str | Path) -> Changes:
    """The changes from one file to the next, to be shown."""
    return Changes(old, new)


class Changes:
    """The lines that are removed from one file (-) and those that are added in the next (+), with a
    few around them.
    """

    def __init__(self, old: str | Path, new: str | Path):
        self.title = f"{old} → {new}"
        self._old, self._new = (_code(located(file).read_text()) for file in (old, new))

    def lines(self) -> Iterator[tuple[str, str]]:
        """Each line with its sign: "-", "+", " " for one that stays, and "⋯" for a gap."""
        groups = SequenceMatcher(None, self._old, self._new, autojunk=False).get_grouped_opcodes(2)
        for number, group in enumerate(groups):
            if number:
                yield "⋯", ""
            for kind, old, old_end, new, new_end in group:
                if kind == "equal":
                    yield from ((" ", line) for line in self._new[new:new_end])
                else:
                    yield from (("-", line) for line in self._old[old:old_end])
                    yield from (("+", line) for line in self._new[new:new_end])

    def __repr__(self) -> str:
        return "\n".join([self.title, *(f"{sign} {line}".rstrip() for sign, line in self.lines())])

    def _repr_html_(self) -> str:
        """Colours that work on light and on dark. A line that is too long continues below
        itself.
        """
        body = "".join(_html_line(sign, line) for sign, line in self.lines())
        style = "font:.85em/1.5 monospace;max-width:60em"
        return (
            '<div class="pplab-changes" style="'
            f'{style}"><div><b>{html.escape(self.title)}</b></div>{body}</div>'
        )


_FIXED = "\N{NO-BREAK SPACE}"  # after another one, a long word would begin on the line below
_TAGS = {"-": ("del", palette.FILL[B]), "+": ("ins", palette.FILL[F])}


def _html_line(sign: str, line: str) -> str:
    tag, colour = _TAGS.get(sign, ("div", ""))
    code = line.lstrip()
    start = sign + " " * (1 + len(line) - len(code))
    hang = len(start) + 4  # characters by which what is too long goes on further right
    edge = f"border-left:4px solid {colour or 'transparent'};" + (
        f"background:{colour}2e;" if colour else ""
    )
    style = (
        f"{edge}display:block;white-space:pre-wrap;overflow-wrap:anywhere;"
        "text-decoration:none;margin:0;"
    )
    indent = f"padding-left:{hang}ch;text-indent:-{hang}ch"
    return f'<{tag} style="{style}{indent}">{start.replace(" ", _FIXED)}{html.escape(code)}</{tag}>'


def _code(text: str) -> list[str]:
    """A file's lines after its docstring, which always changes, with one blank line instead of
    several.
    """
    first = ast.parse(text).body[0]
    lines = text.splitlines()[first.end_lineno if isinstance(first, ast.Expr) else 0 :]
    return [line for line, before in zip(lines, ["", *lines], strict=False) if line or before]


file_checker = checker(
    'the name of your file, such as "my_pipe.py"', lambda answer: isinstance(answer, (str, Path))
)


@file_checker
def naive_file(answer: object) -> Verdict:
    """Write the naive pipeline: a file that torchrun starts on any number of ranks from 2 on."""
    return judge(answer, "naive", ((2, 1), (3, 1)), (4, 1))


@file_checker
def gpipe_file(answer: object) -> Verdict:
    """Write GPipe: a file that torchrun starts on any number of ranks from 2 on, with M
    microbatches.
    """
    return judge(answer, "GPipe", ((2, 4), (3, 5)), (4, 8))


@file_checker
def one_f_one_b_file(answer: object) -> Verdict:
    """Write 1F1B: a file that torchrun starts on any number of ranks from 2 on, with M
    microbatches.
    """
    try:
        return judge(answer, "1F1B", ((2, 4), (3, 5), (4, 2)), (4, 8))
    except Wrong as error:
        if "hasn't ended" not in str(error) or any(
            known in str(error) for known in (": send(", ": let ")
        ):
            raise
        raise Wrong(
            f"{error}. Whoever waits in receive waits for a message that nobody has sent: {LAST}"
        ) from None


def judge(
    file: str | Path,
    name: str,
    sizes: tuple[tuple[int, int], ...],
    timed: tuple[int, int],
    lag: float = 0,
) -> Verdict:
    """Run the file at some sizes as fast as it can, and at one with its pace, to compare its time.

    There a message takes `lag` forwards, if the file supports it.
    """
    path = located(file)
    if not path.is_file():
        raise Wrong(f"there is no file {file} in {Path.cwd()}")
    if empty := to_write(path):
        return Verdict(None, f"write {' and '.join(empty)} in {path.name}")

    def ran_as(P: int, M: int, pace_s: float = 0, **settings: float) -> Ran:
        size = f"ranks={P}" + (f", M={M}" if M > 1 else "")
        with told(after="" if lag else f' (to step through it: simulated.debug("{file}", {size}))'):
            return run_as(path, name, P, M, pace_s, **settings)

    for number, (P, M) in enumerate(sizes, 1):
        _tell(f"run {number} of {len(sizes) + 1}: {P} ranks, M = {M}")
        ran_as(P, M)
    P, M = timed
    _tell(f"the last run: {P} ranks, M = {M}, and its time")
    for forward_s in (0.0125, 0.025, 0.05):  # what disturbs a busy machine weighs less and less
        ran = ran_as(P, M, pace_s=forward_s * P * M, LAG=lag * forward_s)
        took = ran.timeline().makespan
        costs = Costs(*(1e3 * forward_s,) * 3, latency=1e3 * forward_s * lag)
        alone = simulate(ran.timeline().schedule, costs).makespan
        if took <= TOLERANCE * alone:
            break
    pace = f"with {P} ranks and a forward of {1e3 * forward_s:g} ms"
    times = (
        f"{pace}, the fastest step took {took:.0f} ms, its forwards and backwards alone "
        f"{alone:.0f} ms"
    )
    if took > TOLERANCE * alone:
        raise Wrong(
            f"gradients and order are right, but {times}: do ranks wait needlessly, or is the "
            "machine busy?"
        )
    if lag == 0 and _starts_late(ran):
        raise Wrong(
            f"gradients and order are right, but {times}: rank 1 begins only after all of rank 0's "
            "first forwards. Does what rank 0 sends wait there until it receives something?"
        )
    if took < 0.99 * alone:
        raise Wrong(f"gradients and order are right, but {times}: put the lines with `pace` back")
    held = ", ".join(map(str, ran.timeline().peak_in_flight))
    holding = f" the ranks hold {held} of {M} forwards at most;" if M > 1 else ""
    return right(f"gradients as in one process;{holding} {times}")


def _tell(how_far: str) -> None:
    """Show how far a checker is, where it takes seconds on a page."""
    if not pplab_course.has_processes:
        print(how_far, file=sys.stderr)


def _starts_late(ran: Ran) -> bool:
    """Whether, in every step, rank 1 begins after the last forward before rank 0's first backward,
    if there are many of those.
    """
    upper, lower = (report.actions for report in ran.reports[:2])
    late = []
    for first in range(0, len(upper), 2 * ran.num_microbatches):
        kinds = [kind for kind, *_ in upper[first : first + 2 * ran.num_microbatches]]
        ahead = kinds.index("B")
        late.append(ahead > 2 and lower[first][2] >= upper[first + ahead - 1][3])
    return all(late)


def to_write(path: Path) -> list[str]:
    """The functions whose bodies are still dots."""
    try:
        tree = ast.parse(path.read_text())
    except SyntaxError as error:
        raise Wrong(
            f"line {error.lineno} isn't Python ({error.msg}): {(error.text or '').strip()}"
        ) from None
    return [
        f.name
        for f in tree.body
        if isinstance(f, ast.FunctionDef) and ast.unparse(f.body[-1]) == "..."
    ]


def run_as(path: Path, name: str, P: int, M: int, pace_s: float, **settings: float) -> Ran:
    """Run the file. Raises `Wrong` if it fails, has other gradients than one process, or isn't that
    schedule.
    """
    wanted = build(name, num_ranks=P, num_microbatches=M)
    tickets = ",".join(map(str, wanted.peak_in_flight))
    ran = run(path, P, M=M, PACE=pace_s, TICKETS=tickets, limit_s=LIMIT_S + 10 * pace_s, **settings)
    with told(
        f"on {P} ranks{f' with {M} microbatches' if M > 1 else ''}: ", ValueError
    ):  # or no order can be made of it
        check_run(ran, path)
        _check_order(ran, wanted)
    return ran


def check_run(ran: Ran, path: Path) -> None:
    """Raise `Wrong` if it fails, or has other gradients than one process, whatever its order."""
    if ran.failure:
        raise Wrong(ran.failure + (UNASKED if "NoneType" in ran.failure else ""))
    if lacks := ran.reports[0].lacks:
        raise Wrong(
            f"the file has no {' and no '.join(lacks)} at its end: the checker compares by these "
            "names"
        )
    _check_counts(ran)
    check(
        [r.microbatches for r in ran.reports],
        are_off=all(not r.gradients.error <= EQUAL for r in ran.reports),
    )
    with told(after=thrown_away(path)):
        _check_gradients(ran)


def _check_counts(ran: Ran) -> None:
    """Raise `Wrong` unless every rank has as many backwards as forwards, and a forward of every
    microbatch in every step.
    """
    for rank, report in enumerate(ran.reports):
        kinds = [kind for kind, *_ in report.actions]
        forwards, backwards = kinds.count("F"), kinds.count("B")
        if not forwards:
            raise Wrong(f"rank {rank} never calls stage(x)")
        if backwards != forwards:
            raise Wrong(
                f"rank {rank} had {forwards} forwards and {backwards} backwards through what they "
                "returned"
            )
        if forwards % ran.num_microbatches or forwards != ran.num_steps * ran.num_microbatches:
            raise Wrong(
                f"rank {rank} had {forwards} forwards, which isn't one for each microbatch in each "
                "step"
            )


def _check_gradients(ran: Ran) -> None:
    """Raise `Wrong` unless every parameter is on one rank, with one process's gradient."""
    found = [report.gradients for report in ran.reports]
    trained = sorted(n for each in found for n in each.trained)
    if trained != list(range(found[0].of)):
        raise Wrong(
            f"the ranks' stages have {len(trained)} parameters, the model {found[0].of}: each must "
            "be in one stage"
        )
    if missing := [
        f"{each.missing} of rank {rank}" for rank, each in enumerate(found) if each.missing
    ]:
        raise Wrong(f"parameters without a gradient: {', '.join(missing)}")
    if off := [rank for rank, each in enumerate(found) if not each.error <= EQUAL]:
        scales = {round(each.scale, 3) for each in found}
        if len(scales) == 1 and scales != {1.0}:
            raise Wrong(f"every gradient is {scales.pop():g} times one process's")
        fine = [f"{rank}" for rank in range(len(found)) if rank not in off]
        others = f"; those of {_ranks(fine)} are right" if fine else ""
        worst = max(found[rank].error for rank in off)
        if any(found[rank].error != found[rank].error for rank in off):
            raise Wrong(
                f"gradients of {_ranks(off)} are no numbers{others}: did you use a message before "
                "it came?"
            )
        says = (
            f"gradients of {_ranks(off)} differ from one process's, by up to {worst:.2g} times the "
            f"largest{others}"
        )
        if other := [rank for rank, each in enumerate(found) if each.batch != found[0].batch]:
            of = "isn't that" if len(other) == 1 else "aren't those"
            says += (
                f"; at the end the batch of {_ranks(other)} {of} of rank 0: was it drawn "
                "otherwise, or has"
            )
            says += " `receive` filled the tensor that it was given?"
        if drifted := observed.changed(found):
            copies = f"the weights of {_ranks(drifted)} aren't the other ranks' copies of them"
            says += (
                f"; at the end {copies}: was the model drawn otherwise, or has `step` changed them?"
            )
        raise Wrong(says)


def _ranks(numbers: list) -> str:
    return f"rank{'s' if len(numbers) > 1 else ''} {' and '.join(map(str, numbers))}"


def _check_order(ran: Ran, wanted: Schedule) -> None:
    """Raise `Wrong` unless it holds as many forwards, and takes as long, as the schedule."""
    for step in range(ran.num_steps):
        seen = ran.timeline(step).schedule
        took, best = simulate(seen).makespan, simulate(wanted).makespan
        time = (
            f"its order takes {took} units of time (a forward 1, a backward 2), and "
            f"{wanted.name}'s {best}"
        )
        for rank, (held, cap) in enumerate(
            zip(seen.peak_in_flight, wanted.peak_in_flight, strict=True)
        ):
            if held != cap:
                holds = f"rank {rank} holds {plural(held, 'forward')} at most, {wanted.name} {cap}"
                says = f"gradients are right, but {holds}"
                raise Wrong(f"{says}; {time}" if took > best else says)
        if took != best:
            raise Wrong(f"gradients and forwards held are right, but {time}")
