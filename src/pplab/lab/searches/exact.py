"""Find the shortest order of a `lab.Problem`, with a proof, by OR-Tools' CP-SAT solver."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from ...errors import expect, number
from ...schedule import Schedule
from ...simulator import simulate
from ...timeline import Timeline
from .bounds import Floor, floor
from .constraints import FEW, Coarse, Model, Scale, constraint_solver, scale_of
from .problem import Problem

if TYPE_CHECKING:
    from ortools.sat.python.cp_model import CpSolver, CpSolverSolutionCallback

CLOSE = 1e-6  # a bound that is nearer than this share has been met: less than rounding takes away


class BestSoFar(NamedTuple):
    """What a search reports meanwhile: the best order so far, and a bound that none can beat."""

    seconds: float
    value: float
    bound: float


@dataclass(frozen=True, repr=False)
class Optimum:
    """The shortest order that was found, and a bound on how short one can be.

    - `timeline`: the simulated order. Its schedule is `timeline.schedule`.
    - `value`: its makespan.
    - `bound`: no order of the problem is shorter.
    - `exact`: whether all times are whole multiples of a unit that isn't too fine for the solver.
      Otherwise the solver got times that are rounded down, and the bound can be too low by a
      millionth.
    - `floor`: the closed-form bound, for comparison.
    - `interrupted`: whether Ctrl-C ended the search.
    """

    problem: Problem
    timeline: Timeline
    value: float
    bound: float
    floor: Floor
    seconds: float
    exact: bool = True
    interrupted: bool = False

    @property
    def schedule(self) -> Schedule:
        """The order."""
        return self.timeline.schedule

    @property
    def gap(self) -> float:
        """How much longer the order is than the bound, as a share of the bound. It is 0 for a
        proved order.
        """
        return 0.0 if self.proved else self.value / self.bound - 1

    @property
    def proved(self) -> bool:
        """Whether no order is shorter by more than rounding, a millionth."""
        return self.value <= self.bound * (1 + CLOSE)

    def __repr__(self) -> str:
        said = (
            "proved: no order is shorter"
            if self.proved
            else f"not below {self.bound:g}, a gap of {self.gap:.1%}"
        )
        return f"<Optimum makespan {self.value:g}, {said}>"


def optimum(
    problem: Problem,
    *,
    time_limit: float = 60,
    workers: int | None = None,
    start: Sequence[Schedule] = (),
    use_floor: bool = True,
    on_progress: Callable[[BestSoFar], None] | None = None,
) -> Optimum:
    """Find the order with the shortest makespan, and prove that none is shorter.

    It starts with the closed-form bound, `lab.floor`, and with the best of `start` and the
    published schedules within the problem's limit. Where these meet, nothing is left to search.
    Otherwise CP-SAT searches and proves on `workers` cores (by default all) until it is done,
    `time_limit` seconds are over, or you press Ctrl-C. In the last two cases, the result has the
    best order so far, the best bound, and their gap. `use_floor=False` leaves the closed form out,
    so that the solver proves everything by itself. `on_progress` is called with every better order
    and every better bound. Several workers race, so different runs can find different shortest
    orders.

    Needs OR-Tools (`pip install 'pplab[prove]'`).

    >>> found = optimum(Problem(4, 8, placement="V", limit=6))
    >>> found, found.schedule.peak_in_flight
    (<Optimum makespan 53, proved: no order is shorter>, (6, 6, 6, 6))
    """
    began = time.perf_counter()
    expect(Problem, problem=problem)
    number("time_limit", time_limit)
    known = min(problem.known(start), key=lambda timeline: timeline.makespan)
    lowest = floor(problem)
    search = _Search(problem, known, lowest.value if use_floor else 0)
    if not search.is_over:
        search.run(began + time_limit, workers or 0, on_progress)
    value = search.best.makespan
    return Optimum(
        problem,
        search.best,
        value,
        min(value, search.bound),
        lowest,
        time.perf_counter() - began,
        search.scale.exact,
        search.interrupted,
    )


class _Search:
    """The best order so far, and the bound."""

    def __init__(self, problem: Problem, known: Timeline, lowest: float):
        self.problem, self.best, self.interrupted = problem, known, False
        self.scale = scale_of(problem)
        self.lowest = self.scale.at_least(lowest)
        self.bound = max(lowest, self.scale.back(self.lowest))

    @property
    def is_over(self) -> bool:
        return self.best.makespan <= self.bound * (1 + CLOSE)

    def run(
        self, until: float, workers: int, on_progress: Callable[[BestSoFar], None] | None
    ) -> None:
        """Let the solver look for a better order, and take what it finds.

        Where times are fine, it first solves the problem in coarse times, for a third of the time,
        because it finds good orders sooner there. It then begins with the best of them.
        """
        began = time.perf_counter()
        if self.scale.longest > 2 * FEW * self.scale.unit:
            coarse, solver = self._solve(
                Coarse(self.scale), 0, began + (until - began) / 3, workers, None
            )
            if coarse and not self.interrupted:
                self._keep(simulate(coarse.schedule(solver), self.problem.costs))
        if not self.interrupted and not self.is_over:
            tell = on_progress and self._telling(began, on_progress)
            model, solver = self._solve(self.scale, self.lowest, until, workers, tell)
            self.bound = max(self.bound, self.scale.back(round(solver.best_objective_bound)))
            if model:
                self._take(model.schedule(solver), self.scale.back(round(solver.objective_value)))

    def _solve(
        self,
        scale: Scale | Coarse,
        lowest: int,
        until: float,
        workers: int,
        tell: CpSolverSolutionCallback | None,
    ) -> tuple[Model | None, CpSolver]:
        """A model, and the solver that has its best order. Instead of the model None, if there is
        no order.
        """
        cp_model = constraint_solver()
        model = Model(cp_model.CpModel(), self.problem, scale, self.best.schedule)
        model.minimise(lowest)
        solver = cp_model.CpSolver()
        solver.parameters.max_time_in_seconds = max(0.01, until - time.perf_counter())
        solver.parameters.num_workers = workers
        if tell:
            solver.best_bound_callback = tell.on_bound
        with _interrupts(solver):
            status = solver.solve(model.model, tell)
        assert status in (cp_model.OPTIMAL, cp_model.FEASIBLE, cp_model.UNKNOWN), (
            solver.status_name()
        )
        limit = solver.parameters.max_time_in_seconds
        spent = solver.wall_time >= limit - max(0.2 * limit, 0.1)  # it may end a little early
        self.interrupted = status != cp_model.OPTIMAL and not spent
        return (None if status == cp_model.UNKNOWN else model), solver

    def _telling(
        self, began: float, on_progress: Callable[[BestSoFar], None]
    ) -> CpSolverSolutionCallback:
        back, now = self.scale.back, time.perf_counter

        class Telling(constraint_solver().CpSolverSolutionCallback):
            best = self.best.makespan

            def on_solution_callback(self) -> None:
                self.best = min(self.best, back(round(self.objective_value)))
                self.on_bound(self.best_objective_bound)

            def on_bound(self, bound: float) -> None:
                on_progress(BestSoFar(now() - began, self.best, back(round(bound))))

        return Telling()

    def _take(self, schedule: Schedule, claimed: float) -> None:
        """Keep the solver's order if it is better, after checking that it takes and holds what was
        claimed.
        """
        found = simulate(schedule, self.problem.costs)
        value = found.makespan
        assert self.problem.fits(schedule), "the solver's order is above the limit"
        assert value <= claimed * (1 + CLOSE), f"{value} is simulated, and {claimed} was claimed"
        self._keep(found)

    def _keep(self, found: Timeline) -> None:
        if found.makespan < self.best.makespan:
            self.best = found


@contextmanager
def _interrupts(solver: CpSolver) -> Iterator[None]:
    """Let the solver answer Ctrl-C itself, by ending. Afterwards restore Python's handler, because
    the solver leaves the signal without it, and the next Ctrl-C would kill the process. In any
    thread but the main one, leave signals alone.
    """
    if threading.current_thread() is not threading.main_thread():
        solver.parameters.catch_sigint_signal = False
        yield
        return
    before = signal.getsignal(signal.SIGINT)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.SIG_DFL if before is None else before)
