"""Find what is wrong with a schedule that can't run: the first fault, with its rank, action, cause
and remedy.

`pplab.validate` only comes here once it knows that there is a fault.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from typing import NoReturn

from .actions import COMPUTE, Action, B, F, I, Overlap, W, parts
from .deps import needs
from .errors import ScheduleError
from .schedule import Schedule
from .simulator import stuck_at


def explain(schedule: Schedule) -> NoReturn:
    """Raise the ScheduleError of the first fault of a schedule that has one."""
    check_placement(schedule)
    for rank, item, action in _everything(schedule):
        if action.kind not in COMPUTE:
            cause = f"rank {rank}: {item} is communication, and a schedule holds computation only"
            remedy = "leave it out: pplab.lower derives sends and receives"
            raise ScheduleError(cause, remedy, rank, item)
    _check_actions(schedule)
    _check_order(schedule)
    raise _deadlock(schedule)


def _everything(schedule: Schedule) -> Iterator[tuple[int, Action | Overlap, Action]]:
    """Every action with its rank and its item of the row."""
    return (
        (rank, item, action)
        for rank, row in enumerate(schedule.rows)
        for item in row
        for action in parts(item)
    )


def check_placement(schedule: Schedule) -> None:
    """Raise ScheduleError unless every stage is on one rank of every replica, or on two mirrored
    ranks (bidirectional).
    """
    holders = schedule.columns.holders
    if [] in holders:
        stage, last = holders.index([]), schedule.num_stages - 1
        cause = f"no rank runs stage {stage}, though the schedule has stages up to {last}"
        remedy = f"add stage {stage}'s actions, or number the stages without a gap"
        raise ScheduleError(cause, remedy)
    if () in schedule.rows:
        rank = schedule.rows.index(())
        remedy = "remove its row, or place a stage on it"
        raise ScheduleError(f"rank {rank} has nothing to run", remedy, rank)
    if schedule.copies == 1 or all(_is_replica(schedule, ranks) for ranks in schedule.replicas):
        return
    stage = next(stage for stage, ranks in enumerate(holders) if len(ranks) > 1)
    runs = defaultdict(list)  # of every rank that holds it: what it runs of it
    for rank, _, action in _everything(schedule):
        if action.stage == stage:
            runs[rank].append(action)
    rank, *_, home = sorted(runs, key=lambda rank: len(runs[rank]))
    action = runs[rank][0]
    cause = f"rank {rank} runs {action}, but stage {stage} lives on rank {home}"
    why = "a stage has one rank; only a bidirectional schedule keeps each stage on two ranks, "
    why += "r and P-1-r, and only replicas, which share no microbatch, hold it again"
    raise ScheduleError(cause, f"move {action} to rank {home}'s row ({why})", rank, action)


def _is_replica(schedule: Schedule, ranks: tuple[int, ...]) -> bool:
    """Whether these ranks hold every stage once, or every stage twice on mirrored ranks."""
    held = {tuple(r for r in place if r in ranks) for place in schedule.columns.holders}
    mirrored = set(zip(ranks[: len(ranks) // 2], ranks[::-1], strict=False))
    return held <= mirrored or all(len(place) < 2 for place in held)


def _check_actions(schedule: Schedule) -> None:
    """Raise ScheduleError unless each stage has each microbatch's F once, and either its B or its I
    and W once, all on one rank.
    """
    found: dict = defaultdict(dict)  # by stage and microbatch: the kinds, with their ranks
    for rank, _, action in _everything(schedule):
        kinds = found[action.stage, action.microbatch]
        if action.kind in kinds:
            cause, other = f"rank {rank} runs {action} twice", kinds[action.kind]
            if other != rank:
                cause = f"{action} is on ranks {other} and {rank}"
            raise ScheduleError(cause, "remove one of the two", rank, action)
        kinds[action.kind] = rank
    for stage, ranks in enumerate(schedule.columns.holders):
        home = ranks[0] if len(ranks) == 1 else None
        for m in range(schedule.num_microbatches):
            _check_microbatch(stage, m, found[stage, m], home)


def _check_microbatch(stage: int, m: int, kinds: dict, home: int | None) -> None:
    rank = next(iter(kinds.values()), home)
    actions = [Action(stage, kind, m) for kind in kinds]
    halves = f"{Action(stage, I, m)} and {Action(stage, W, m)}"
    if len(set(kinds.values())) > 1:
        names = ", ".join(f"{action} on rank {kinds[action.kind]}" for action in actions)
        cause = f"stage {stage} works on microbatch {m} on several ranks: {names}"
        remedy = "put them on one rank: a backward needs what its forward kept there"
        raise ScheduleError(cause, remedy, rank, actions[0])
    is_split = I in kinds or W in kinds
    if B in kinds and is_split:
        full, extra = Action(stage, B, m), Action(stage, I if I in kinds else W, m)
        cause = f"rank {rank} runs both {full} and {extra}, and B already is I and W"
        raise ScheduleError(cause, f"keep {full}, or {halves}", rank, extra)
    for kind in (F, I, W) if is_split else (F, B):
        if kind not in kinds:
            missing, has = Action(stage, kind, m), ", ".join(map(str, actions)) or "nothing of it"
            runs, row = f"rank {rank} runs {has}", f"rank {rank}'s row"
            if rank is None:  # of a stage that two ranks hold, neither runs any of this microbatch
                runs, row = "no rank runs any of it", f"a row with stage {stage}"
            remedy = f"add {missing} to {row}" + (f" (or {halves})" if kind is B else "")
            raise ScheduleError(f"{missing} is missing: {runs}", remedy, rank, missing)


def _check_order(schedule: Schedule) -> None:
    """Raise ScheduleError unless, within a row, F comes before B or I, and I before W."""
    for rank, row in enumerate(schedule.rows):
        done: set[Action] = set()
        for item in row:
            for action in parts(item):
                for need in needs(action, schedule.num_stages):
                    makers = {Action(need.stage, kind, need.microbatch) for kind in need.kinds}
                    if need.stage == action.stage and done.isdisjoint(makers):
                        cause = f"rank {rank} runs {action} before {need}, which it needs"
                        remedy = f"move {need} in front of {action}"
                        raise ScheduleError(cause, remedy, rank, action)
            done.update(parts(item))


def _deadlock(schedule: Schedule) -> ScheduleError:
    """The error about ranks that wait for each other in a circle.

    It blames a rank that could break the circle. On that rank, an action that a different rank
    waits for stands behind the one at which the rank is stuck. There is always one, since actions
    themselves don't wait in circles.
    """
    stuck, graph, ranks = stuck_at(schedule), schedule.graph, schedule.columns.ranks
    makers = {rank: graph.makers[entry] for rank, entry in stuck.items()}
    awaited = {rank: maker for rank, maker in makers.items() if maker is not None}
    rank, seen = min(stuck), []  # go from each rank to the one for which it waits
    while rank not in seen:
        seen.append(rank)
        rank = ranks[awaited[rank]]
    circle = seen[seen.index(rank) :]
    said = [
        f"rank {rank} waits at {graph.action(stuck[rank])} for {graph.action(awaited[rank])}"
        for rank in circle
    ]
    behind = (awaited[rank] for rank in circle)
    maker = next(maker for maker in behind if stuck[ranks[maker]] != maker)
    blamed = ranks[maker]
    at = graph.action(stuck[blamed])
    remedy = f"on rank {blamed}, run {graph.action(maker)} before {at}"
    return ScheduleError("deadlock: " + "; ".join(said), remedy, blamed, at)
