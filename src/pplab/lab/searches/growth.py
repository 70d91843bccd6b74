"""Grow rows by running them: whenever a rank is free, it takes what its policy prefers and its
memory allows.
"""

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
    # weight gradients that wait before one is run after an input gradient, gap or no gap
    delay: int
    # when both could run: a forward after an input gradient; else always the input gradient
    alternate: bool
    least_gap: float  # the shortest gap that a weight gradient fills, as a share of its duration
    eager: bool  # whether it fills a gap whose end isn't known yet


def policies(problem: NumberedProblem) -> Iterator[list[Policy]]:
    """One policy per rank, in some hundred different ways.

    With one stage per rank the warm-ups are ZB-H1's, ZB-H2's and one forward more. A W waits for
    `delay` further I's per rank above, which is one in ZB-H1 and two in ZB-H2. With M it always
    waits for a gap. With several stages per rank the warm-ups are the loop's and as many as the
    memory allows, and a W waits equally long on all ranks.
    """
    P, V, M, seen = problem.num_ranks, problem.stages_per_rank, problem.num_microbatches, set()
    if V == 1:
        warmups = (
            [P - r for r in range(P)],
            [2 * (P - r) - 1 for r in range(P)],
            [2 * (P - r) for r in range(P)],
        )
        steps, rests = (
            (0, 1, 2, 3, 4, M),
            (*product((False, True), (0, 0.25, 0.5, 1), (False, True)),),
        )
    else:
        warmups = ([2 * (P - r) + (V - 1) * P - 1 for r in range(P)], [V * M] * P)
        steps, rests = (0, 2, 3, 4, M), (*product((False, True), (0, 1), (True,)),)
    most = problem.most_held  # where a number no longer limits anything, policies are the same
    for warmup, step in product(warmups, steps):
        limited = (
            [max(min(w, most), V) for w in warmup],
            [min(step * (r if V == 1 else 1), most) for r in range(P)],
        )
        if str(limited) not in seen:
            seen.add(str(limited))
            for rest in rests:
                yield [Policy(w, d, *rest) for w, d in zip(*limited, strict=True)]


class _Growing:
    """A rank whose row grows, and its state while it does."""

    def __init__(self, policy: Policy) -> None:
        self.policy = policy
        self.row: list[int] = []
        self.free: float = 0  # when its latest action ends
        self.held: float = 0
        self.num_forwards = self.num_inputs = 0
        self.due: deque[int] = deque()  # stages whose weight gradients wait
        self.after_input = False  # whether its latest action was an input gradient
        self.last_was_input = False  # or its latest one that wasn't a weight gradient


class _Growth:
    """Rows that grow together: for every stage, what has arrived and how much of it is done."""

    def __init__(
        self, problem: NumberedProblem, policies: Sequence[Policy], deepest: tuple[bool, bool]
    ) -> None:
        self.problem, self.ranks = problem, [_Growing(policy) for policy in policies]
        placement, stages = problem.placement, range(len(problem.placement))
        self.forward_order = [own[::-1] if deepest[0] else own for own in problem.stages]
        self.input_order = [own[::-1] if deepest[1] else own for own in problem.stages]
        self.later = [sum(placement[t] == placement[s] for t in stages[s + 1 :]) for s in stages]
        self.forwards, self.inputs, self.weights = ([0] * len(stages) for _ in "FIW")  # done
        self.forward_at: list[list[float]] = [[] for _ in stages]  # when a forward's input is there
        self.forward_at[0] = [0] * problem.num_microbatches
        self.input_at: list[list[float]] = [[] for _ in stages]  # when an input gradient's is
        # when to look again
        self.events: list[tuple[float, int]] = [(0, rank) for rank in range(problem.num_ranks)]

    def run(self) -> list[list[int]]:
        while self.events:
            now, number = heappop(self.events)
            if now >= self.ranks[number].free:
                self._act(now, number)
        return [rank.row for rank in self.ranks]

    def _act(self, now: float, number: int) -> None:
        """Let a free rank run what it prefers, or wait for what comes first."""
        rank = self.ranks[number]
        forward, forward_stage, full = self._next_forward(now, number)
        backward, input_stage = self._next_input(now, number)
        alternates = rank.policy.alternate and rank.last_was_input and forward <= now
        if min(forward, backward) <= now:
            if len(rank.due) > rank.policy.delay and rank.after_input:
                self._run_weight(now, number)
            elif backward <= now and not alternates:
                self._run_input(now, number, input_stage)
            else:
                self._run_forward(now, number, forward_stage)
        elif rank.due and self._fills(min(forward, backward) - now, number, full):
            self._run_weight(now, number)
        elif min(forward, backward) < inf:
            heappush(self.events, (min(forward, backward), number))

    def _next_forward(self, now: float, number: int) -> tuple[float, int, bool]:
        """When the next forward can run, its stage, and whether memory holds one up."""
        rank, needed, room = self.ranks[number], self.problem.needed, self.problem.rooms[number]
        first, stage, full = inf, 0, False
        for s in self.forward_order[number]:
            if rank.held + needed[s] > room:  # with that of one forward of every later stage there
                full = True
            elif self.forwards[s] < len(self.forward_at[s]) and (
                rank.num_inputs or rank.num_forwards + self.later[s] < rank.policy.warmup
            ):
                at = self.forward_at[s][self.forwards[s]]
                if at < first and first > now:
                    first, stage = at, s
        return first, stage, full

    def _next_input(self, now: float, number: int) -> tuple[float, int]:
        """When the next input gradient can run, and its stage."""
        first, stage = inf, 0
        for s in self.input_order[number]:
            if self.inputs[s] < len(self.input_at[s]):
                at = self.input_at[s][self.inputs[s]]
                if at < first and first > now:
                    first, stage = at, s
        return first, stage

    def _fills(self, gap: float, number: int, full: bool) -> bool:
        """Whether to fill a gap with a weight gradient."""
        rank = self.ranks[number]
        if gap < inf:
            return gap >= rank.policy.least_gap * self.problem.takes[2][rank.due[0]]
        all_inputs = self.problem.num_microbatches * len(self.input_order[number])
        return rank.policy.eager or full or rank.num_inputs == all_inputs

    def _run_forward(self, now: float, number: int, s: int) -> None:
        rank = self.ranks[number]
        rank.row.append(self.problem.number_of[s, F, self.forwards[s]])
        self.forwards[s] += 1
        rank.num_forwards += 1
        rank.held += self.problem.adds[s]
        rank.after_input = rank.last_was_input = False
        rank.free = now + self.problem.takes[0][s]
        last = s + 1 == len(self.forwards)
        self._give(number, s if last else s + 1, self.input_at if last else self.forward_at)

    def _run_input(self, now: float, number: int, s: int) -> None:
        rank = self.ranks[number]
        rank.row.append(self.problem.number_of[s, I, self.inputs[s]])
        self.inputs[s] += 1
        rank.num_inputs += 1
        rank.held -= self.problem.i_frees[s]
        rank.due.append(s)
        rank.after_input = rank.last_was_input = True
        rank.free = now + self.problem.takes[1][s]
        self._give(number, s - 1, self.input_at)

    def _run_weight(self, now: float, number: int) -> None:
        rank = self.ranks[number]
        s = rank.due.popleft()
        rank.row.append(self.problem.number_of[s, W, self.weights[s]])
        self.weights[s] += 1
        rank.held -= self.problem.w_frees[s]
        rank.after_input = False
        rank.free = now + self.problem.takes[2][s]
        heappush(self.events, (rank.free, number))

    def _give(self, number: int, to: int, arrivals: list[list[float]]) -> None:
        """Send what the rank has made to a stage. There is none before stage 0."""
        rank = self.ranks[number]
        heappush(self.events, (rank.free, number))
        if to >= 0:
            there = self.problem.placement[to]
            arrival = rank.free + self.problem.lag_of[number][there]
            arrivals[to].append(arrival)
            if there != number:
                heappush(self.events, (max(arrival, self.ranks[there].free), there))


def grown(
    problem: NumberedProblem, policies: Sequence[Policy], deepest: tuple[bool, bool] = (True, True)
) -> list[list[int]]:
    """The rows of numbers that `policies`, one per rank, lead to. They are shorter where all ranks
    wait for each other.

    If several stages of a rank have forwards ready, or input gradients, `deepest` tells for each of
    the two whether the last stage comes first or the first one. A stage's forward leaves room for
    one of every later stage of its rank, so what has begun can end.
    """
    return _Growth(problem, policies, deepest).run()
