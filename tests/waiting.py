"""What frameworks' schedules send and wait for, read off their source, line by line, and how long that takes.

Nothing here knows pplab's rows, lowering or loop. A rank's program is a list of steps: ("F" or "B", stage, m)
computes, ("post", messages) hands messages to the network, ("wait", messages) stands still until they have come or
gone. A message is its kind, the stage that makes it, and m; it travels once both of its ends have posted it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

Message = tuple[str, int, int]
Step = tuple
SOURCES = {
    "megatron": "Megatron-LM core_v0.19.0, forward_backward_pipelining_without_interleaving",
    "torch": "torch 2.13, Schedule1F1B._step_microbatches",
    "torch_gpipe": "torch 2.13, ScheduleGPipe._step_microbatches",
    "interleaved": "Megatron-LM core_v0.19.0, forward_backward_pipelining_with_interleaving, default flags",
}


class Program(list):
    """A rank's steps. `down` and `up` are the messages of one stage per rank."""

    def __init__(self, rank: int, num_ranks: int):
        super().__init__()
        self.rank, self.last = rank, num_ranks - 1

    def down(self, m: int, sent: bool = True) -> list[Message]:
        stage = self.rank if sent else self.rank - 1
        return [("F", stage, m)] * (0 <= stage < self.last)

    def up(self, m: int, sent: bool = True) -> list[Message]:
        stage = self.rank if sent else self.rank + 1
        return [("B", stage, m)] * (0 < stage <= self.last)

    def post(self, messages: Sequence[Message], wait: bool = False) -> None:
        self.append(("post", tuple(messages)))
        if wait:
            self.wait(messages)

    def wait(self, messages: Sequence[Message]) -> None:
        self.append(("wait", tuple(messages)))

    def compute(self, kind: str, m: int) -> None:
        self.append((kind, self.rank, m))


def megatron(P: int, M: int, rank: int) -> Program:
    p, warm = Program(rank, P), min(P - 1 - rank, M)
    for m in range(warm):
        p.post(p.down(m, sent=False), wait=True)
        p.compute("F", m)
        p.post(p.down(m), wait=True)
    if warm < M:
        p.post(p.down(warm, sent=False), wait=True)
    for m in range(M - warm):
        p.compute("F", m + warm)
        p.post(p.down(m + warm) + p.up(m, sent=False), wait=True)
        p.compute("B", m)
        p.post(p.up(m) + (p.down(m + warm + 1, sent=False) if m + warm + 1 < M else []), wait=True)
    for m in range(M - warm, M):
        p.post(p.up(m, sent=False), wait=True)
        p.compute("B", m)
        p.post(p.up(m), wait=True)
    return p


def torch(P: int, M: int, rank: int) -> Program:
    p, warm = Program(rank, P), min(P - rank, M)
    going: list[Message] = []
    for m in range(warm):
        p.post(p.down(m, sent=False), wait=True)
        p.compute("F", m)
        p.wait(going)
        if m != warm - 1:
            p.post(going := p.down(m))
    forward, backward, left = warm, 0, p.down(warm - 1)
    while True:
        p.post(left + p.up(backward, sent=False), wait=True)
        p.compute("B", backward)
        backward += 1
        if forward == M:
            break
        p.post(p.up(backward - 1) + p.down(forward, sent=False), wait=True)
        p.compute("F", forward)
        left = p.down(forward)
        forward += 1
    p.post(going := p.up(backward - 1))
    for m in range(backward, M):
        p.post(p.up(m, sent=False), wait=True)
        p.compute("B", m)
        p.wait(going)
        p.post(going := p.up(m))
    p.wait(going)
    return p


def torch_gpipe(P: int, M: int, rank: int) -> Program:
    p = Program(rank, P)
    for kind, messages in (("F", p.down), ("B", p.up)):
        for m in range(M):
            p.post(messages(m, sent=False), wait=True)
            p.compute(kind, m)
            p.post(messages(m))
        p.wait([each for m in range(M) for each in messages(m)])
    return p


def interleaved(P: int, M: int, rank: int, V: int, old: bool = False) -> Program:
    """`old`: before 260cba7133, which made a forward's send be waited for."""
    p, total, stages = Program(rank, P), M * V, P * V
    turns = [(v, m) for first in range(0, M, P) for v in range(V) for m in range(first, first + P)]
    F = [(v * P + rank, m) for v, m in turns]
    B = [((V - 1 - v) * P + rank, m) for v, m in turns]
    warm = min(2 * (P - rank - 1) + (V - 1) * P, total)

    def down(k: int, sent: bool = True) -> list[Message]:
        stage, m = F[k] if k < total else (0, 0)
        return [("F", stage - (not sent), m)] * (stage < stages - 1 if sent else stage > 0)

    def up(k: int, sent: bool = True) -> list[Message]:
        stage, m = B[k] if k < total else (stages - 1, 0)
        return [("B", stage + (not sent), m)] * (stage > 0 if sent else stage < stages - 1)

    sent_down: list[Message] = []
    sent_up: list[Message] = []
    p.post(down(0, sent=False), wait=True)
    for k in range(warm):
        p.append(("F", *F[k]))
        p.post(down(k) + down(k + 1, sent=False), wait=True)
        if k == warm - 1 < total - 1:
            p.post(up(0, sent=False))
    for k in range(total - warm):
        p.wait(down(k + warm, sent=False))
        p.append(("F", *F[k + warm]))
        p.post(down(k + warm) + down(k + warm + 1, sent=False))
        p.wait(sent_down)
        sent_down = down(k + warm)
        if not old:
            p.wait(sent_down)
        p.wait(up(k, sent=False))
        p.append(("B", *B[k]))
        p.post(up(k) + up(k + 1, sent=False))
        p.wait(sent_up)
        sent_up = up(k)
    if warm == total:
        p.post(up(0, sent=False), wait=True)
    for k in range(total - warm, total):
        p.wait(up(k, sent=False))
        p.append(("B", *B[k]))
        p.post(up(k) + up(k + 1, sent=False), wait=True)
    p.wait(sent_up)
    return p


def step(programs: Sequence[Program], time: Callable[[str, int], float], takes: float) -> float:
    """When the last rank has computed all; AssertionError if they wait in a circle."""
    at, now = [0] * len(programs), [0.0] * len(programs)
    posted: dict[Message, list[float]] = {}
    before = None
    while before != at:
        before = at[:]
        for rank, program in enumerate(programs):
            while at[rank] < len(program):
                what, *rest = program[at[rank]]
                if what == "post":
                    for message in rest[0]:
                        posted.setdefault(message, []).append(now[rank])
                elif what == "wait":
                    if any(len(posted[message]) < 2 for message in rest[0]):
                        break
                    now[rank] = max([now[rank], *(max(posted[message]) + takes for message in rest[0])])
                else:
                    now[rank] += time(what, rest[0])
                at[rank] += 1
    assert at == [len(program) for program in programs], "these programs wait in a circle"
    return max(now)
