"""Improve rows step by step: exchange two neighbours, or move one action, of those that delay the
end.
"""

from __future__ import annotations

from collections.abc import Iterator
from random import Random

from .row_slots import Key, NumberedProblem, Rows

# steps: what isn't worse than so long ago is accepted (late acceptance, Burke and Bykov 2017)
_MEMORY = 50
_FARTHEST = 6  # places that one is moved
_CRITICAL = 0.8  # of the changes are on a critical path, the others anywhere


def improved(
    problem: NumberedProblem, rows: Rows, tries: int, rng: Random
) -> Iterator[tuple[Key, Rows | None]]:
    """Try so many changes of `rows`. Yields the best key so far, and its rows whenever they are
    better than all before.
    """
    rows = [row[:] for row in rows]
    times = problem.times(rows)
    now = best = problem.key(rows, *times)
    accepted, pairs = [now] * _MEMORY, None
    for k in range(tries):
        pairs = _critical(problem, rows, rng, *times) if pairs is None else pairs
        rank, place = (
            pairs[rng.randrange(len(pairs))]
            if pairs and rng.random() < _CRITICAL
            else _anywhere(rows, rng)
        )
        row = _changed(problem, rows[rank], place, rng)
        if row and (row := problem.fitted(rank, row)):
            before, rows[rank] = rows[rank], row
            tried = problem.times(rows)
            made = problem.key(rows, *tried) if tried else None
            if made and (made <= now or made <= accepted[k % _MEMORY]):
                times, now, pairs = tried, made, None
            else:
                rows[rank] = before
        accepted[k % _MEMORY] = now
        if now < best:
            best = now
            yield best, [row[:] for row in rows]
        else:
            yield best, None


def _critical(
    problem: NumberedProblem, rows: Rows, rng: Random, starts: list[float], ends: list[float]
) -> list[tuple[int, int]]:
    """(rank, place in its row) of everything on one critical path that waited for the item before
    it in its row.
    """
    needs, lags, place_of = (
        problem.needs,
        problem.lags,
        {i: (r, at) for r, row in enumerate(rows) for at, i in enumerate(row)},
    )
    i, found = problem.last(rows, starts, ends), []
    while True:
        rank, place = place_of[i]
        before, need = rows[rank][place - 1], needs[i]
        arrival = -1 if need is None else ends[need] + lags[i]
        late = place == 0 or arrival > ends[before]
        if need is not None and (late or (arrival == ends[before] and rng.random() < 0.5)):
            i = need
        elif place == 0:
            return found
        else:
            found.append((rank, place))
            i = before


def _changed(problem: NumberedProblem, row: list[int], place: int, rng: Random) -> list[int] | None:
    """A row in which the item at `place` no longer waits for the one before it, or None where that
    can't be.
    """
    input_of = problem.input_of
    before, i = row[place - 1], row[place]
    # one stage's microbatches stay in order
    if problem.action_of[before][:2] == problem.action_of[i][:2]:
        return None
    how = rng.random()
    if how < 0.3 and before in input_of:  # a weight gradient, further back
        to = min(len(row), place + 1 + rng.randrange(3 * _FARTHEST)) if how < 0.2 else len(row)
        return row[: place - 1] + row[place:to] + [before] + row[to:]
    to = place - 1 if how < 0.7 else max(0, place - 1 - rng.randrange(_FARTHEST))
    if input_of.get(i) in row[to:place]:
        return None
    return row[:to] + [i] + row[to:place] + row[place + 1 :]


def _anywhere(rows: Rows, rng: Random) -> tuple[int, int]:
    rank = rng.randrange(len(rows))
    return rank, rng.randrange(1, len(rows[rank]))
