"""A chart of time as text, for a terminal or to paste, with a row per rank and a letter where an
action begins.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from math import isclose

from ...actions import parts
from ...costs import Costs
from ...links import with_links
from ...palette import FILL, NAME
from ...schedule import Schedule
from ...simulator import durations_of, run, validate
from ...timeline import Span

IDLE, STUCK = ".", "?"
# columns for a rank's name, and behind the last action of ranks that are stuck
_LEFT, _STUCK = 8, 10


def spans_until_stuck(schedule: Schedule, costs: Costs | None = None) -> list[Span]:
    """The spans of all actions that can run, in a schedule whose ranks may end up waiting for each
    other.

    Raises ScheduleError for rows that lack an action, and ValueError for costs that don't fit.
    """
    if not schedule.graph.whole:
        validate(schedule)
    costs = Costs() if costs is None else costs
    costs.check(schedule.num_stages, schedule.num_ranks, schedule.num_microbatches)
    starts, ends = run(*with_links(schedule.graph, costs, durations_of(schedule, costs)))
    items = [(rank, item) for rank, row in enumerate(schedule.rows) for item in row]
    # behind the items come the messages of narrow links
    timed = zip(items, starts, ends, strict=False)
    return [Span(rank, item, start, end) for (rank, item), start, end in timed if start is not None]


def text_chart(
    schedule: Schedule, spans: Sequence[Span], width: int = 100, *, colour: bool = False
) -> str:
    """Draw what each rank runs and when, at most `width` columns wide. A letter marks where an
    action begins, with its microbatch if there is room for all of them, and dashes follow until it
    ends.

    `spans` are those of a timeline, or of `spans_until_stuck`. In the second case question marks
    show which ranks are stuck. `colour` adds a terminal's colours. Raises ValueError for a width of
    less than 40 columns.

    >>> from pplab import build, simulate
    >>> timeline = simulate(build("1F1B", num_ranks=2, num_microbatches=2))
    >>> print(text_chart(timeline.schedule, timeline.spans))
    rank 0  F0F1....B0--..B1--
    rank 1  ..F0B0--F1B1--....
    <BLANKLINE>
    F forward, B backward, . idle. A column is 0.5.
    """
    if width < 40:
        raise ValueError(f"a chart needs at least 40 columns, got {width}")
    bars = [_Bar(schedule, span) for span in spans]
    ran = Counter(span.rank for span in spans)
    stuck = [rank for rank, row in enumerate(schedule.rows) if ran[rank] < len(row)]
    end = max((span.end for span in spans), default=0) or 1
    columns, exact = _columns(bars, end, width - _LEFT - _STUCK * bool(stuck))
    numbered = all(bar.room(columns / end) >= len(bar.label) for bar in bars)
    rows = [[IDLE] * (columns + _STUCK * bool(stuck)) for _ in schedule.rows]
    for rank in stuck:
        last = max((span.end for span in spans if span.rank == rank), default=0)
        rows[rank][round(last / end * columns) :] = STUCK * (
            columns + _STUCK - round(last / end * columns)
        )
    for bar in bars:
        left, room = round(bar.span.start / end * columns), bar.room(columns / end)
        rows[bar.span.rank][left : left + room] = bar.filled(
            bar.label if numbered else bar.letter, room, colour
        )
    lines = [f"rank {rank}".ljust(_LEFT) + "".join(row) for rank, row in enumerate(rows)]
    kinds = {part.kind for span in spans for part in parts(span.action)}
    legend = [f"{kind} {name}" for kind, name in NAME.items() if kind in kinds]
    if schedule.num_stages > schedule.num_ranks:
        legend.append("small letters: a later stage of the rank")
    legend += ["& two at once"] * any(bar.letter == "&" for bar in bars)
    legend += [f"{IDLE} idle"] + [f"{STUCK} stuck"] * bool(stuck)
    takes = f"A column is {end / columns:.4g}" + (
        "" if exact else ", and times are rounded to columns"
    )
    return "\n".join([*lines, "", f"{', '.join(legend)}. {takes}."])


class _Bar:
    """A span as letters."""

    def __init__(self, schedule: Schedule, span: Span):
        self.span, self.actions = span, parts(span.action)
        first = schedule.stages_of(span.rank)[0]
        letters = [str(kind) if stage == first else kind.lower() for stage, kind, _ in self.actions]
        self.letter = letters[0] if len(letters) == 1 else "&"
        numbers = [action.microbatch for action in self.actions]
        self.label = "&".join(
            f"{letter}{number}" for letter, number in zip(letters, numbers, strict=True)
        )

    def room(self, columns_per_time: float) -> int:
        """How many columns it covers."""
        return round(self.span.end * columns_per_time) - round(self.span.start * columns_per_time)

    def filled(self, text: str, room: int, colour: bool) -> list[str]:
        """Its columns: the text and the dashes behind it, on the colour of what runs."""
        cells = list(text[:room].ljust(room, "-"))
        if colour and cells:
            red, green, blue = bytes.fromhex(FILL[self.actions[0].kind][1:])
            ink = 30 if red * 0.3 + green * 0.6 + blue * 0.1 > 110 else 97  # black or white
            cells[0] = f"\x1b[{ink};48;2;{red};{green};{blue}m{cells[0]}"
            cells[-1] += "\x1b[0m"
        return cells


def _columns(bars: Sequence[_Bar], end: float, most: int) -> tuple[int, bool]:
    """How many columns show the time from 0 to `end`, and whether each bar begins and ends between
    two of them. It takes as few as show all labels, or else all letters.
    """
    times = {time for bar in bars for time in (bar.span.start, bar.span.end)}

    def is_exact(columns: int) -> bool:
        places = [time / end * columns for time in times]
        return all(isclose(place, round(place), abs_tol=1e-6) for place in places)

    exact = [columns for columns in range(1, most + 1) if is_exact(columns)]
    for columns in exact:
        if all(bar.room(columns / end) >= len(bar.label) for bar in bars):
            return columns, True
    return (exact[0], True) if exact else (most, False)
