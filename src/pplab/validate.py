"""Whether a schedule can run: every action there once, in an order that never waits in a circle, within a memory cap.

`validate` raises ScheduleError for the first fault it finds, with the rank, the action, the cause and what to change.
It is linear in the number of actions.
"""

from __future__ import annotations

from collections import defaultdict
from itertools import pairwise

from .actions import COMPUTE, Action, B, F, I, W, parts
from .deps import Need, needs
from .errors import ScheduleError, positive_int
from .schedule import Schedule


def validate(schedule: Schedule, *, max_in_flight: int | None = None) -> None:
    """Raise ScheduleError unless every rank can run its row to the end.

    `max_in_flight`: the most forwards whose activations one rank may hold at once (see `Schedule.peak_in_flight`).
    """
    _check_placement(schedule)
    if not schedule.graph.complete:
        _check_kinds(schedule)
        _check_actions(schedule)
        _check_order(schedule)
        raise AssertionError("an incomplete schedule must fail one of the checks above")
    if stuck := run_without_time(schedule):
        raise deadlock(schedule, stuck)
    if max_in_flight is not None:
        _check_memory(schedule, positive_int("max_in_flight", max_in_flight))


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
    """Every stage on one rank, or every stage on two mirrored ranks (bidirectional)."""
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
    mirrored = {(r, schedule.num_ranks - 1 - r) for r in range(schedule.num_ranks // 2)}
    if all(place in mirrored for place in placement) or all(type(place) is int for place in placement):
        return
    stage, ranks = next((s, p) for s, p in enumerate(placement) if type(p) is tuple)
    held = {r: sum(a.stage == stage for item in schedule.rows[r] for a in parts(item)) for r in ranks}
    rank, *_, home = sorted(ranks, key=lambda r: held[r])
    action = next(a for item in schedule.rows[rank] for a in parts(item) if a.stage == stage)
    raise ScheduleError(
        f"rank {rank} runs {action}, but stage {stage} lives on rank {home}",
        f"move {action} to rank {home}'s row (a stage has one rank; only a bidirectional schedule keeps each stage on "
        "two ranks, r and P-1-r)",
        rank,
        action,
    )


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
            raise ScheduleError(
                f"{missing} is missing: rank {rank} runs {has}",
                f"add {missing} to rank {rank}'s row"
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


def run_without_time(schedule: Schedule) -> dict[int, int]:
    """Run the rows as far as they go. Returns, per rank that can't finish, the id of the action it is stuck at."""
    columns, dep = schedule.columns, schedule.graph.dep
    position, end = list(columns.bounds[:-1]), columns.bounds[1:]
    ranks = columns.ranks()
    waiting: dict[int, list[int]] = defaultdict(list)
    ready = list(range(schedule.num_ranks))
    while ready:
        rank = ready.pop()
        i, stop = position[rank], end[rank]
        while i < stop:
            d = dep[i]
            if d >= position[ranks[d]]:  # not run yet
                waiting[d].append(rank)
                break
            i += 1
            position[rank] = i
            if i - 1 in waiting:
                ready += waiting.pop(i - 1)
    return {rank: i for rank, (i, stop) in enumerate(zip(position, end, strict=True)) if i < stop}


def deadlock(schedule: Schedule, stuck: dict[int, int]) -> ScheduleError:
    """The error for a schedule whose ranks are `stuck`: the circle of ranks that wait for each other.

    It blames a rank that could break the circle: one whose row has something that is waited for behind what it is
    stuck at. There is always one, since actions themselves don't wait in circles.
    """
    ranks, dep = schedule.columns.ranks(), schedule.graph.dep
    rank = min(stuck)
    seen: list[int] = []
    while rank not in seen:
        seen.append(rank)
        rank = ranks[dep[stuck[rank]]]
    circle = seen[seen.index(rank) :]
    waits = [f"rank {r} waits at {_at(schedule, stuck[r])} for {_awaited(schedule, stuck[r])}" for r in circle]
    waiter = next(r for r in circle if _awaited(schedule, stuck[r]) != _at(schedule, stuck[ranks[dep[stuck[r]]]]))
    blamed = ranks[dep[stuck[waiter]]]
    at = _at(schedule, stuck[blamed])
    remedy = f"on rank {blamed}, run {_awaited(schedule, stuck[waiter])} before {at}"
    return ScheduleError("deadlock: " + "; ".join(waits), remedy, blamed, at)


def _awaited(schedule: Schedule, i: int) -> Action:
    """What id i waits for on another rank, by the name it has in this schedule."""
    need = needs(_at(schedule, i), schedule.num_stages)[0]
    kind = schedule.columns.kinds[schedule.graph.dep[i]]
    return Action(need.stage, kind if kind in need.kinds else need.kinds[0], need.microbatch)


def _at(schedule: Schedule, i: int) -> Action:
    columns = schedule.columns
    return Action(columns.stages[i], columns.kinds[i], columns.microbatches[i])


def _check_memory(schedule: Schedule, cap: int) -> None:
    for rank, (first, end) in enumerate(pairwise(schedule.columns.bounds)):
        held = 0
        for i in range(first, end):
            kind = schedule.columns.kinds[i]
            held += (kind is F) - (kind in (B, W))
            if held > cap:
                action = _at(schedule, i)
                raise ScheduleError(
                    f"memory cap: rank {rank} already holds the activations of {cap} forwards when it reaches {action}",
                    f"run a backward before {action}, or raise the cap to {schedule.peak_in_flight[rank]}",
                    rank,
                    action,
                )


def _alternatives(need: Need) -> tuple[Action, ...]:
    return tuple(Action(need.stage, kind, need.microbatch) for kind in need.kinds)
