"""Whether a schedule can run: every action there once, in an order that never waits in a circle, within a memory cap.

`validate` raises ScheduleError for the first fault it finds, with the rank, the action, the cause and what to change.
It is linear in the number of actions.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from itertools import pairwise

from . import engine
from .actions import COMPUTE, Action, B, F, I, W, parts
from .costs import Memory
from .deps import Need, made_by, needs
from .errors import ScheduleError, positive_int
from .schedule import Schedule


def validate(
    schedule: Schedule,
    *,
    max_in_flight: int | None = None,
    memory: Memory | None = None,
    limit: float | Sequence[float] | None = None,
) -> None:
    """Raise ScheduleError unless every rank can run its row to the end.

    `max_in_flight`: the most forwards whose activations one rank may hold at once (see `Schedule.peak_in_flight`).
    `limit`: the most that one rank may hold, or one value per rank, in the unit of `memory`.
    """
    _check_placement(schedule)
    stuck = stuck_at(schedule) if schedule.graph.whole else None
    if stuck != {}:
        _check_kinds(schedule)
        _check_actions(schedule)
        _check_order(schedule)
        raise deadlock(schedule, stuck)
    if max_in_flight is not None:
        _check_memory(schedule, Memory(), positive_int("max_in_flight", max_in_flight), "forwards' activations")
    if limit is not None:
        _check_memory(schedule, memory or Memory(), limit, memory.unit if memory else "forwards' activations")


def _check_kinds(schedule: Schedule) -> None:
    if set(schedule.columns.kinds) <= COMPUTE:
        return
    for rank, row in enumerate(schedule.rows):
        for item in row:
            if any(action.kind not in COMPUTE for action in parts(item)):
                raise ScheduleError(
                    f"rank {rank}: {item} is communication, and a schedule holds computation only",
                    "leave it out: pplab.lower derives sends and receives",
                    rank,
                    item,
                )


def _check_placement(schedule: Schedule) -> None:
    """Every stage on one rank of every replica, or on two mirrored ones (bidirectional)."""
    placement = schedule.placement
    for stage, place in enumerate(placement):
        if place == ():
            raise ScheduleError(
                f"no rank runs stage {stage}, though the schedule has stages up to {schedule.num_stages - 1}",
                f"add stage {stage}'s actions, or number the stages without a gap",
            )
    for rank in range(schedule.num_ranks):
        if not schedule.rows[rank]:
            raise ScheduleError(f"rank {rank} has nothing to run", "remove its row, or place a stage on it", rank)
    if all(type(place) is int for place in placement) or all(_is_placed(placement, r) for r in schedule.replicas):
        return
    stage, ranks = next((s, p) for s, p in enumerate(placement) if type(p) is tuple)
    held = {r: sum(a.stage == stage for item in schedule.rows[r] for a in parts(item)) for r in ranks}
    rank, *_, home = sorted(ranks, key=lambda r: held[r])
    action = next(a for item in schedule.rows[rank] for a in parts(item) if a.stage == stage)
    raise ScheduleError(
        f"rank {rank} runs {action}, but stage {stage} lives on rank {home}",
        f"move {action} to rank {home}'s row (a stage has one rank; only a bidirectional schedule keeps each stage on "
        "two ranks, r and P-1-r, and only replicas, which share no microbatch, hold it again)",
        rank,
        action,
    )


def _is_placed(placement: Sequence[int | tuple[int, ...]], ranks: tuple[int, ...]) -> bool:
    """Whether these ranks, a replica, hold every stage once, or every stage twice on mirrored ranks."""
    held = {tuple(r for r in (place if type(place) is tuple else (place,)) if r in ranks) for place in placement}
    mirrored = {(ranks[i], ranks[-1 - i]) for i in range(len(ranks) // 2)}
    return held <= mirrored or all(len(place) < 2 for place in held)


def _check_actions(schedule: Schedule) -> None:
    """Each stage has each microbatch's F once, and either its B or its I and W once, all on one rank."""
    found: dict[tuple[int, int], dict] = defaultdict(dict)
    for rank, row in enumerate(schedule.rows):
        for item in row:
            for action in parts(item):
                kinds = found[action.stage, action.microbatch]
                if action.kind in kinds:
                    other = kinds[action.kind]
                    where = (
                        f"rank {rank} runs {action} twice"
                        if other == rank
                        else f"{action} is on ranks {other} and {rank}"
                    )
                    raise ScheduleError(where, "remove one of the two", rank, action)
                kinds[action.kind] = rank
    homes = {stage: place for stage, place in enumerate(schedule.placement) if type(place) is int}
    for stage in range(schedule.num_stages):
        for m in range(schedule.num_microbatches):
            _check_microbatch(stage, m, found.get((stage, m), {}), homes.get(stage))


def _check_microbatch(stage: int, m: int, kinds: dict, home: int | None) -> None:
    rank = next(iter(kinds.values()), home)
    if len(set(kinds.values())) > 1:
        names = ", ".join(f"{Action(stage, kind, m)} on rank {r}" for kind, r in kinds.items())
        raise ScheduleError(
            f"stage {stage} works on microbatch {m} on several ranks: {names}",
            "put them on one rank: a backward needs what its forward kept there",
            rank,
            Action(stage, next(iter(kinds)), m),
        )
    if B in kinds and (I in kinds or W in kinds):
        extra = Action(stage, I if I in kinds else W, m)
        raise ScheduleError(
            f"rank {rank} runs both {Action(stage, B, m)} and {extra}, and B already is I and W",
            f"keep {Action(stage, B, m)}, or {Action(stage, I, m)} and {Action(stage, W, m)}",
            rank,
            extra,
        )
    wanted = (F, I, W) if I in kinds or W in kinds else (F, B)
    for kind in wanted:
        if kind not in kinds:
            missing = Action(stage, kind, m)
            has = ", ".join(str(Action(stage, k, m)) for k in kinds) or "nothing of it"
            nowhere = rank is None  # of a stage that two ranks hold, neither runs any of this microbatch
            raise ScheduleError(
                f"{missing} is missing: " + ("no rank runs any of it" if nowhere else f"rank {rank} runs {has}"),
                f"add {missing} to "
                + (f"a row with stage {stage}" if nowhere else f"rank {rank}'s row")
                + (f" (or {Action(stage, I, m)} and {Action(stage, W, m)})" if kind is B else ""),
                rank,
                missing,
            )


def _check_order(schedule: Schedule) -> None:
    """Within a row, F before B or I, and I before W."""
    for rank, row in enumerate(schedule.rows):
        done: set[Action] = set()
        for item in row:
            for action in parts(item):
                own = needs(action, schedule.num_stages)[-1:]
                if own and own[0].stage == action.stage and not any(a in done for a in _alternatives(own[0])):
                    raise ScheduleError(
                        f"rank {rank} runs {action} before {own[0]}, which it needs",
                        f"move {own[0]} in front of {action}",
                        rank,
                        action,
                    )
            done.update(parts(item))


def stuck_at(schedule: Schedule) -> dict[int, int]:
    """Run the rows as far as they go. Returns, per rank that can't finish, the id of the action it is stuck at."""
    bounds, nothing = schedule.columns.bounds, [0] * len(schedule.columns.kinds)
    ends = engine.run(schedule, nothing, nothing).ends
    reached = (ends.index(None, first, end) if None in ends[first:end] else end for first, end in pairwise(bounds))
    return {rank: i for rank, i in enumerate(reached) if i < bounds[rank + 1]}


def deadlock(schedule: Schedule, stuck: dict[int, int]) -> ScheduleError:
    """The error for a schedule whose ranks are `stuck`: the circle of ranks that wait for each other.

    It blames a rank that could break the circle: one whose row has something that is waited for behind what it is
    stuck at. There is always one, since actions themselves don't wait in circles.
    """
    ranks, dep, action = schedule.columns.ranks(), schedule.graph.dep, schedule.columns.action
    rank = min(stuck)
    seen: list[int] = []
    while rank not in seen:
        seen.append(rank)
        rank = ranks[dep[stuck[rank]]]
    circle = seen[seen.index(rank) :]
    waits = [f"rank {r} waits at {action(stuck[r])} for {_awaited(schedule, stuck[r])}" for r in circle]
    waiter = next(r for r in circle if _awaited(schedule, stuck[r]) != action(stuck[ranks[dep[stuck[r]]]]))
    blamed = ranks[dep[stuck[waiter]]]
    at = action(stuck[blamed])
    remedy = f"on rank {blamed}, run {_awaited(schedule, stuck[waiter])} before {at}"
    return ScheduleError("deadlock: " + "; ".join(waits), remedy, blamed, at)


def _awaited(schedule: Schedule, i: int) -> Action:
    """What id i waits for on another rank, by the name it has in this schedule."""
    return schedule.columns.action(made_by(schedule.columns, schedule.graph)[i])


def _check_memory(schedule: Schedule, memory: Memory, limit: float | Sequence[float], unit: str) -> None:
    memory.check(schedule.num_stages)
    limits = list(limit) if isinstance(limit, Sequence) else [limit] * schedule.num_ranks
    if len(limits) != schedule.num_ranks:
        raise ValueError(
            f"limit has {len(limits)} values for {schedule.num_ranks} ranks: give one per rank, or a number"
        )
    for rank, most in enumerate(limits):
        before = memory.constant(schedule.stages_of(rank))
        for i, (during, after) in enumerate(schedule.held(rank, memory), schedule.columns.bounds[rank]):
            if during > most:
                action = schedule.columns.action(i)
                peak = max(held for held, _ in schedule.held(rank, memory))
                raise ScheduleError(
                    f"memory limit: rank {rank} holds {before:g}{unit and ' ' + unit} when it reaches {action}, which "
                    f"needs {during - before:g} more, and the limit is {most:g}",
                    f"run a backward before {action}, or raise the limit to {peak:g}",
                    rank,
                    action,
                )
            before = after


def _alternatives(need: Need) -> tuple[Action, ...]:
    return tuple(Action(need.stage, kind, need.microbatch) for kind in need.kinds)
