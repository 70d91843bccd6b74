"""A layer of experts on several GPUs: where the copies of every token go, and how they come
back.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pplab.plot import ink

from ._canvas import BLUE, FAINT, LINE, WIDTH, box, canvas, frame, line, listed, say, spot

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_LEFT, _AIR = 76, 14  # points: the rows' names, the space between two GPUs
_HEIGHT, _BOX, _RADIUS = 330, 28, 11
_TOKENS, _EXPERTS, _SUMS = 226, 150, 74  # heights: tokens that leave, experts, tokens that are back
# half of the copies leave their GPU, and every expert gets two
ROUTES = ((0, 2), (1, 3), (0, 3), (1, 2))


def experts() -> Axes:
    """Draw a layer whose four experts are spread over two GPUs, with two tokens on each of them.

    `ROUTES` lists the experts of every token. Copies that leave their GPU are blue.
    """
    routes, gpus, count = ROUTES, 2, 4
    each, here = len(routes) // gpus, count // gpus
    sent = sum(
        token // each != expert // here for token, route in enumerate(routes) for expert in route
    )
    copies = sum(map(len, routes))
    ax = canvas(
        _HEIGHT,
        f"A layer of {count} experts on {gpus} GPUs, with {each} tokens on each. Every token goes "
        "to its experts and comes back: "
        f"{sent} of {copies} copies leave their GPU, in two all-to-alls, dispatch and combine. The "
        "tokens use "
        f"{listed([' and '.join(map(str, route)) for route in routes])}",
    )
    wide = (WIDTH - _LEFT - _AIR * (gpus - 1)) / gpus
    starts = [_LEFT + gpu * (wide + _AIR) for gpu in range(gpus)]

    def middle(number: int, of_each: int) -> float:
        gpu, place = divmod(number, of_each)
        return starts[gpu] + wide * (place + 0.5) / of_each

    for gpu, x in enumerate(starts):
        box(ax, x, 0, wide, _HEIGHT - 22, fc=FAINT)
        say(ax, x + wide / 2, _HEIGHT - 10, f"GPU {gpu}", fontweight="bold")
        frame(ax, x + 8, _TOKENS + 34, wide - 16, _BOX)
        say(ax, x + wide / 2, _TOKENS + 34 + _BOX / 2, "attention")
    for y, name in (
        (_TOKENS, "tokens"),
        ((_TOKENS + _EXPERTS) / 2, "dispatch"),
        (_EXPERTS, "experts"),
        ((_SUMS + _EXPERTS) / 2, "combine"),
        (_SUMS, "sums"),
    ):
        say(
            ax,
            0,
            y,
            name,
            ha="left",
            fontweight="bold" if name in ("dispatch", "combine") else "normal",
        )
    for leaves in (False, True):  # those that leave lie on top
        for token, route in enumerate(routes):
            for expert in route:
                if (token // each != expert // here) == leaves:
                    _copy(ax, middle(token, each), middle(expert, here), leaves)
    for expert in range(count):
        x = middle(expert, here)
        box(ax, x - wide / here / 2 + 8, _EXPERTS - _BOX / 2, wide / here - 16, _BOX)
        frame(ax, x - wide / here / 2 + 8, _EXPERTS - _BOX / 2, wide / here - 16, _BOX)
        say(ax, x, _EXPERTS, str(expert))
    for token in range(len(routes)):
        for y in (_TOKENS, _SUMS):
            spot(ax, middle(token, each), y, _RADIUS, fc=BLUE, zorder=3)
            say(ax, middle(token, each), y, chr(ord("a") + token), color=ink(BLUE), zorder=4)
    for x in starts:
        say(ax, x + wide / 2, 26, "on to the")
        say(ax, x + wide / 2, 11, "next layer")
    return ax


def _copy(ax: Axes, token: float, expert: float, leaves: bool) -> None:
    """The way of one copy to its expert and back."""
    look = {"ec": BLUE, "lw": 1.8 * LINE} if leaves else {}
    line(ax, (token, _TOKENS - _RADIUS), (expert, _EXPERTS + _BOX / 2), **look)
    line(ax, (expert, _EXPERTS - _BOX / 2), (token, _SUMS + _RADIUS), **look)
