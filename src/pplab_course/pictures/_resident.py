"""The streams of one GPU in a step: its computation, and the transfers that are on the GPU while
they wait for their peer.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pplab.actions import RECV_B, RECV_F, F, Overlap, parts
from pplab.costs import Costs
from pplab.deps import other_end, outgoing
from pplab.lowering import lower
from pplab.plot import ink
from pplab.schedule import Schedule
from pplab.simulator import simulate

from ._canvas import BLUE, EDGE, FAINT, LINE, ORANGE, WIDTH, box, canvas, say

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_LEFT, _BAR, _ROW = 82, 24, 34  # points


def resident(schedule: Schedule, rank: int = 0) -> Axes:
    """Draw what is on `rank`'s GPU over time: its actions, at the default costs, and a row for each
    channel of a transfer.

    A receive is there from the time when it can start, behind everything that was enqueued before
    it, until its message has come. Only in the last half unit of that does anything move. Sends
    aren't drawn, because their receives are posted before them here.
    """
    message = 0.5
    timeline = simulate(schedule, Costs(latency=message))
    ends = {action: span.end for span in timeline.spans for action in parts(span.action)}
    sent = {
        out.receive: end
        for action, end in ends.items()
        if (out := outgoing(action, schedule.num_stages))
    }
    home, now, waits = schedule.home(), 0.0, []
    # by peer: start, end, and whether it is a forward's
    rows: dict[int, list[tuple[float, float, bool]]] = {}
    for step in lower(schedule, ahead=1)[rank]:
        if isinstance(step, Overlap) or parts(step)[0] in ends:
            now = ends[parts(step)[0]]
        elif step.kind in (RECV_F, RECV_B):
            row = rows.setdefault(home[other_end(step).stage, step.microbatch], [])
            start = max(now, row[-1][1] if row else 0.0)
            waits.append(max(0.0, sent[step] - start))
            row.append((start, start + waits[-1] + message, step.kind is RECV_F))
    spins = sum(waits)
    ax = canvas(
        _ROW * (1 + len(rows)) + 52,
        f"The GPU of rank {rank} under {schedule.name}: {len(waits)} receives are on it for "
        f"{spins + message * len(waits):g} units in all, and in {spins:g} of them they wait for "
        "their send",
    )
    unit = (WIDTH - _LEFT - 4) / timeline.makespan
    top = _ROW * (1 + len(rows)) + 46
    for number, name in enumerate(("compute", *(f"from rank {peer}" for peer in rows))):
        y = top - _ROW * (number + 1)
        say(ax, 0, y + _BAR / 2, name, ha="left")
        box(ax, _LEFT, y, timeline.makespan * unit, _BAR, fc=FAINT)
        if not number:
            for span in timeline.spans_of(rank):
                fill = BLUE if parts(span.action)[0].kind == F else ORANGE
                left, wide = _LEFT + span.start * unit, (span.end - span.start) * unit
                box(ax, left + 0.7, y, wide - 1.4, _BAR, fc=fill)
                say(
                    ax,
                    left + wide / 2,
                    y + _BAR / 2,
                    str(parts(span.action)[0].microbatch),
                    color=ink(fill),
                )
    for number, row in enumerate(rows.values()):
        y = top - _ROW * (number + 2)
        for start, end, forward in row:
            left, right, moves = (
                _LEFT + start * unit,
                _LEFT + end * unit,
                _LEFT + (end - message) * unit,
            )
            box(
                ax,
                left + 0.7,
                y,
                right - left - 1.4,
                _BAR,
                fc="none",
                ec=EDGE,
                lw=LINE,
                hatch="////",
            )
            box(ax, moves, y, right - moves - 0.7, _BAR, fc=BLUE if forward else ORANGE)
    for x, name, look in (
        (0, "waits, on the GPU", {"fc": "none", "ec": EDGE, "lw": LINE, "hatch": "////"}),
        (140, "forward", {"fc": BLUE}),
        (226, "backward", {"fc": ORANGE}),
    ):
        box(ax, x, 5, 13, 13, **look)
        say(ax, x + 18, 11, name, ha="left")
    return ax
