"""Rows that grow by running them: whenever a rank is free it takes what its policy prefers and the memory allows."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from heapq import heappop, heappush
from itertools import product
from math import inf
from typing import NamedTuple

from ...actions import F, I, W
from .row_slots import NumberedProblem


class Policy(NamedTuple):
    """What a rank prefers while its row grows."""

    warmup: int  # forwards before the first input gradient, at most
    delay: int  # weight gradients that wait before one is run after an input gradient, gap or no gap
    alternate: bool  # when both could run: a forward after an input gradient; else always the input gradient
    least_gap: float  # the shortest gap that a weight gradient fills, as a share of its duration
    eager: bool  # whether it fills a gap whose end isn't known yet


def policies(problem: NumberedProblem) -> Iterator[list[Policy]]:
    """One policy per rank, in some hundred ways that differ.

    With one stage per rank the warm-ups are ZB-H1's, ZB-H2's and one forward more. A W waits for `delay` further I's
    per rank above, one in ZB-H1 and two in ZB-H2; with M it always waits for a gap. With several stages per rank the
    warm-ups are the loop's and as many as the memory allows, and a W waits as long on all ranks.
    """
    P, V, M, seen = problem.num_ranks, problem.stages_per_rank, problem.num_microbatches, set()
    if V == 1:
        warmups = ([P - r for r in range(P)], [2 * (P - r) - 1 for r in range(P)], [2 * (P - r) for r in range(P)])
        steps, rests = (0, 1, 2, 3, 4, M), (*product((False, True), (0, 0.25, 0.5, 1), (False, True)),)
    else:
        warmups = ([2 * (P - r) + (V - 1) * P - 1 for r in range(P)], [V * M] * P)
        steps, rests = (0, 2, 3, 4, M), (*product((False, True), (0, 1), (True,)),)
    most = problem.most_held  # where a number no longer limits anything, policies are the same
    for warmup, step in product(warmups, steps):
        limited = [max(min(w, most), V) for w in warmup], [min(step * (r if V == 1 else 1), most) for r in range(P)]
        if str(limited) not in seen:
            seen.add(str(limited))
            for rest in rests:
                yield [Policy(w, d, *rest) for w, d in zip(*limited, strict=True)]


def grown(
    problem: NumberedProblem, policies: Sequence[Policy], deepest: tuple[bool, bool] = (True, True)
) -> list[list[int]]:
    """The rows of numbers that `policies`, one per rank, lead to; shorter ones where all ranks wait for each other.

    `deepest`: whether, of the forwards and of the input gradients of several stages that are ready, the last stage's
    comes first, else the first's. A stage's forward leaves room for one of every later stage of its rank: so what has
    begun can end.
    """
    M, placement, lag = problem.num_microbatches, problem.placement, problem.lag_of
    numbers = problem.number_of
    (f_takes, i_takes, w_takes), S, P = problem.takes, len(placement), problem.num_ranks
    adds, i_frees, w_frees, room = problem.adds, problem.i_frees, problem.w_frees, problem.rooms
    f_order = [stages[::-1] if deepest[0] else stages for stages in problem.stages]
    i_order = [stages[::-1] if deepest[1] else stages for stages in problem.stages]
    needed = problem.needed  # of every stage: its forward's room and that of one forward of every later stage there
    later = [sum(placement[t] == placement[s] for t in range(s + 1, S)) for s in range(S)]
    rows: list[list[int]] = [[] for _ in range(P)]
    forwards, inputs, due = [0] * S, [0] * S, [deque() for _ in range(P)]
    num_f, num_i, weights, held = [0] * P, [0] * P, [0] * S, [0.0] * P
    after_i, last_i = [False] * P, [False] * P  # whether the rank's latest action, and its latest F or I, was an I
    f_at: list[list[float]] = [[0] * M, *([] for _ in range(S - 1))]  # when a forward's input is there
    i_at: list[list[float]] = [[] for _ in range(S)]  # when an input gradient's is
    free: list[float] = [0] * P
    events: list[tuple[float, int]] = [(0, rank) for rank in range(P)]  # when to look at a rank again
    while events:
        now, rank = heappop(events)
        if now < free[rank]:
            continue
        policy, full, forward, backward, f_stage, i_stage = policies[rank], False, inf, inf, 0, 0
        for s in f_order[rank]:
            if held[rank] + needed[s] > room[rank]:
                full = True
            elif forwards[s] < len(f_at[s]) and (num_i[rank] or num_f[rank] + later[s] < policy.warmup):
                at = f_at[s][forwards[s]]
                if at < forward and forward > now:
                    forward, f_stage = at, s
        for s in i_order[rank]:
            if inputs[s] < len(i_at[s]):
                at = i_at[s][inputs[s]]
                if at < backward and backward > now:
                    backward, i_stage = at, s
        waiting, kind = due[rank], 3  # 0, 1, 2 for F, I, W; 3 to wait
        if backward <= now and not (forward <= now and policy.alternate and last_i[rank]):
            kind = 1
        elif forward <= now:
            kind = 0
        wait = min(forward, backward)
        if kind < 3:
            if len(waiting) > policy.delay and after_i[rank]:
                kind = 2
        elif waiting:
            if wait == inf:
                fills = policy.eager or full or num_i[rank] == M * len(f_order[rank])
            else:
                fills = wait - now >= policy.least_gap * w_takes[waiting[0]]
            kind = 2 if fills else 3
        if kind == 3:
            if wait < inf:
                heappush(events, (wait, rank))
            continue
        after_i[rank] = kind == 1
        if kind == 2:
            s = waiting.popleft()
            rows[rank].append(numbers[s, W, weights[s]])
            weights[s] += 1
            held[rank] -= w_frees[s]
            free[rank] = end = now + w_takes[s]
            heappush(events, (end, rank))
            continue
        last_i[rank] = kind == 1
        if kind:
            s = i_stage
            rows[rank].append(numbers[s, I, inputs[s]])
            inputs[s] += 1
            num_i[rank] += 1
            held[rank] -= i_frees[s]
            waiting.append(s)
            end, to, at = now + i_takes[s], s - 1, i_at
        else:
            s = f_stage
            rows[rank].append(numbers[s, F, forwards[s]])
            forwards[s] += 1
            num_f[rank] += 1
            held[rank] += adds[s]
            end, to, at = now + f_takes[s], s + 1, f_at
            if to == S:
                to, at = s, i_at
        free[rank] = end
        heappush(events, (end, rank))
        if to >= 0:
            there = placement[to]
            arrival = end + lag[rank][there]
            at[to].append(arrival)
            if there != rank:
                heappush(events, (max(arrival, free[there]), there))
    return rows
