"""Groups on NCCL, as tests/fake_gpus plays them: a group's transfers run one after the other, whatever their direction.

So one communicator for messages both ways deadlocks, as it would on GPUs. What comes lies in its buffer once its work
is waited for, and until then there is poison.
"""

import sys
import threading
from concurrent.futures import Future
from queue import SimpleQueue

import streams


class Work:
    """A transfer that somebody will wait for. Received is what was waited for."""

    def __init__(self, land):
        self.done, self._land, self._landed = Future(), land, False

    def wait(self, timeout=None) -> bool:
        self.done.result()
        streams.catch_up()
        if not self._landed:
            self._landed = True
            self._land()
        return True

    def is_completed(self) -> bool:
        self._landed |= (done := self.done.done())
        return done

    def __del__(self) -> None:
        if not self._landed and not sys.is_finalizing():
            LOST.append(self)


LOST: list[Work] = []  # transfers that nobody waited for
GONE: list[Work] = []  # those whose tensor nobody kept until it had left
QUEUES: dict[tuple, SimpleQueue] = {}  # a group's transfers with a peer, one after the other


def in_turn(group: object, peer: int, start, land) -> Work:
    """Put a transfer behind those that the group has with this peer: `start` starts it, `land` is done when it is there
    and waited for."""
    assert not LOST, "a transfer that nobody waited for: the compute stream may be ahead of it"
    assert not GONE, "a tensor that was sent, and freed before it had left"
    if (group, peer) not in QUEUES:
        queue = QUEUES[group, peer] = SimpleQueue()
        threading.Thread(target=_run, args=(queue,), daemon=True).start()
    work = Work(land)
    QUEUES[group, peer].put((start, work.done))
    return work


def _run(queue: SimpleQueue) -> None:
    while True:
        start, done = queue.get()
        try:
            start().wait()
            done.set_result(None)
        except Exception as error:
            done.set_exception(error)
