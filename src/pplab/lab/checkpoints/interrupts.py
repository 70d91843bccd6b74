"""Interrupts of a run that has something to save: the first one asks its ranks to stop, and the
second one ends it.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
import torch.distributed as dist

from ...runtime import RankContext, Status, naming

SIGNALS = (signal.SIGINT, signal.SIGTERM)


@contextmanager
def gently(statuses: Callable[[], Sequence[Status]]) -> Iterator[list[signal.Signals]]:
    """While inside, let the first SIGINT or SIGTERM ask the ranks at `statuses` to stop after their
    step. It is in the list that this yields. The second one does what it normally does. So does the
    first one while no step is done, because nothing would be lost. Only the main thread gets
    signals, so in a different one nothing changes.
    """
    came: list[signal.Signals] = []
    before: dict[int, object] = {}

    def restore() -> None:
        for number, handler in before.items():
            if signal.getsignal(number) is ask:
                signal.signal(number, signal.SIG_DFL if handler is None else handler)

    def ask(number: int, _: object) -> None:
        restore()
        if any(status.steps for status in statuses()):
            came.append(signal.Signals(number))
            for status in statuses():
                status.stop = True
        else:
            signal.raise_signal(number)

    try:
        if threading.current_thread() is threading.main_thread():
            for number in SIGNALS:
                before[number] = signal.getsignal(number)
                signal.signal(number, ask)
        yield came
    finally:
        restore()


def agree_to_stop(context: RankContext) -> bool:
    """Whether any rank was asked to stop. All ranks must call this, and all get the same answer."""
    context.watch("asking the others whether to stop", True)
    asked = torch.tensor(int(context.status.stop))
    with naming("asking the others whether to stop"):
        dist.all_reduce(asked, dist.ReduceOp.MAX)
    return bool(asked)
