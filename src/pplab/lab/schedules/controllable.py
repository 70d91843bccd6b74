"""V-Half and V-Min: two stages per rank in a V, in about a half and a third of 1F1B's memory;
ZB-V's block beside them.

They are building blocks (`Block`), repeated every six units of F = I = W, the interval in which a
rank does a microbatch's work. A block that brings microbatches back sooner holds fewer.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import product

from ...actions import F, I
from ...builders.registry import Rows, build, register
from ...costs import Costs
from ...errors import positive_int
from ...simulator import simulate
from .block import Block

_SOURCE = "Qi et al. 2024, arXiv:2405.15362; github.com/sail-sg/zero-bubble-pipeline-parallelism"
_INTERVAL = 6  # units that a microbatch's F, I and W take on a rank with two stages
_OFFSETS = [*product((1, 2, 3), (1, 2), (1, 2, 3), (1, 2))]  # the paper's space

# The blocks on four ranks: F I W of the stage on the way down, f i w of the one on the way up; W
# where it is free.
#
#     V-Half                                                           V-Min
# rank 0  F . . . . . . . . . f . . . i w . . . . . . . . . I W    F . . . . . . f i w . . . . . I W
# rank 1  . . F . . . . . . f . . . . . . i w . . . . . . I W      . F . . . . f . . i w . . . I W
#     rank 2  . . . . F . . . f . . . . . . . . . i w . . . I W        . . F . . f . . . . i w . I W
#     rank 3  . . . . . . F f . . . . . . . . . . . . i w I W          . . . F f . . . . . . i I w W
#
# From rank to rank each of the four chains has a fixed offset: 1 in V-Min, the least there is; in
# V-Half 2 away from rank 0 and 1 towards it. (The paper's section 3: the offsets make the
# lifespans.) The lifespans of a rank's two stages, F to I, add up to 4P + 2 gap in V-Min and to 6P
# - 1 + 2 gap in V-Half: the same on all ranks, and about 2P/3 and P activations of half a rank's
# share, where 1F1B holds up to P of a whole one.
#
# Repeated, a block must not meet itself: modulo 6, a rank's four starts must differ. Without the
# gap, V-Min's r and 2P + r meet when 3 divides P, V-Half's 3P-2-r and 6P-2-r when P is even; both
# I's wait until nothing does. That is why V-Half's turn at the bottom takes a unit more, too.


def v_block(
    num_ranks: int,
    offsets: tuple[int, int, int, int],
    waits: tuple[int, int, int],
    name: str = "V",
    interval: int = _INTERVAL,
) -> Block:
    """A block on a V, in units of F = I = W, as in the controllable-memory paper. V-Half and V-Min
    are such blocks.

    `offsets` are the units from rank to rank between the starts of F on the way down, F up, I down
    and I up again. `waits` are the units between the end of one of these four and the start of the
    next, at the bottom, on rank 0, and at the bottom. Raises ValueError for a block whose actions
    meet.

    >>> block = v_block(4, (1, 1, 1, 1), (0, 0, 0))
    >>> block.peak, block.bound
    ((4, 4, 4, 4), (4, 4, 5, 4))
    """
    P = positive_int("num_ranks", num_ranks)
    down, up, back_down, back_up = _legs(P, offsets, waits)
    starts = {f"{stage}{F}": start for stage, start in enumerate(down + up)}
    starts |= {f"{2 * P - 1 - hop}{I}": start for hop, start in enumerate(back_down + back_up)}
    return Block(starts, (*range(P), *reversed(range(P))), interval, name=name)


def _legs(P: int, offsets: Sequence[int], waits: Sequence[int]) -> list[list[int]]:
    """When each of the four chains starts on the ranks that it passes, one after the other."""
    first, legs = 0, []
    for step, wait in zip(offsets, (*waits, 0), strict=True):
        legs.append([first + step * hop for hop in range(P)])
        first = legs[-1][-1] + 1 + wait
    return legs


def v_blocks(
    num_ranks: int,
    offsets: Iterable[tuple[int, int, int, int]] = _OFFSETS,
    interval: int = _INTERVAL,
) -> Iterator[Block]:
    """The blocks on a V with these offsets, up to three units down and two up by default, and the
    shortest waits that they allow.
    """
    for each in offsets:
        for waits in product((0, 1), range(interval), (0, 1)):
            down, up, back_down, back_up = _legs(num_ranks, each, waits)
            ranks = zip(down, reversed(up), back_down, reversed(back_up), strict=True)
            if all(len({start % interval for start in starts}) == 4 for starts in ranks):
                yield v_block(num_ranks, each, waits, "block {}{}{}{}".format(*each), interval)
                break


def v_half_block(num_ranks: int) -> Block:
    """The block of V-Half."""
    return v_block(num_ranks, (2, 1, 2, 1), (0, 3 * (num_ranks % 2 == 0), 1), "V-Half's block")


def v_min_block(num_ranks: int) -> Block:
    """The block of V-Min."""
    return v_block(num_ranks, (1, 1, 1, 1), (0, 2 * (num_ranks % 3 == 0), 0), "V-Min's block")


def zb_v_block(num_ranks: int) -> Block:
    """The block of ZB-V, read off the middle of its chart at F = I = W = 1."""
    middle = 3 * positive_int("num_ranks", num_ranks)
    steady = simulate(build("ZB-V", num_ranks=num_ranks, num_microbatches=2 * middle))
    return Block.of(steady, middle, name="ZB-V's block")


@register(
    "V-Half",
    rules="any number of ranks and microbatches; no gap in the steady state where W + 2I >= 2F and "
    "W + 2F >= 2I",
    placement="V",
    source=_SOURCE,
)
def v_half(num_ranks: int, num_microbatches: int, *, costs: Costs | None = None) -> Rows:
    """Run in about half of 1F1B's memory, by the fastest for `costs` of a few orders.

    The orders are made for F = I = W. `costs` are those of a stage, which is half a rank's share
    (all ones when left out).
    """
    return v_half_block(num_ranks).reorder(num_microbatches, costs).schedule.rows


@register(
    "V-Min",
    rules="any number of ranks and microbatches; made for F = I = W, much slower when they differ",
    placement="V",
    source=_SOURCE,
)
def v_min(num_ranks: int, num_microbatches: int, *, costs: Costs | None = None) -> Rows:
    """Run in about a third of 1F1B's memory, by the fastest for `costs` of a few orders.

    If F = I = W, no V without a bubble in its periods holds less.
    """
    return v_min_block(num_ranks).reorder(num_microbatches, costs).schedule.rows
