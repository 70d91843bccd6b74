"""Files of a reader's that are wrong: the course's own with a piece replaced, and what comes of each."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

NOTEBOOKS = Path(__file__).parents[2] / "notebooks"


@dataclass(frozen=True)
class WrongFile:
    """A file that is wrong: where from, which pieces are replaced, at which size it is run, and what is said of it."""

    file: str
    size: tuple[int, int]  # ranks, microbatches
    kind: str  # hangs, fails, gradients (differ), order (is another one)
    says: str  # a pattern
    changes: tuple[tuple[str, str], ...]

    @property
    def text(self) -> str:
        """The file's text; each piece that is replaced stands there once."""
        text = (NOTEBOOKS / self.file).read_text()
        for old, new in self.changes:
            assert text.count(old) == 1, old
            text = text.replace(old, new)
        return text


def naive(kind: str, says: str, *changes: tuple[str, str], ranks: int = 4) -> WrongFile:
    return WrongFile("pipe_naive.py", (ranks, 1), kind, says, changes)


def gpipe(kind: str, says: str, *changes: tuple[str, str], ranks: int = 4) -> WrongFile:
    return WrongFile("pipe_gpipe.py", (ranks, 8), kind, says, changes)


def one_f_one_b(kind: str, says: str, *changes: tuple[str, str], ranks: int = 4) -> WrongFile:
    return WrongFile("pipe_1f1b.py", (ranks, 8), kind, says, changes)


def _step(file: str) -> str:
    return re.search(r"def step\(\):.*?\n\n\n", (NOTEBOOKS / file).read_text(), re.S)[0]


GUARD = "    if 0 <= to < ranks:  # beyond the ends of the pipeline there is nobody\n        dist"
RECEIVE = "    x = receive(rank - 1, inputs).requires_grad_()"
FIRST_GRADIENT = "    g = receive(rank + 1, inputs)\n"
FILLS = "tensor = torch.empty_like(tensor)  # a message doesn't tell its shape\n        dist.recv(tensor, source)\n"
BACK = "    y.backward(receive(rank + 1, torch.ones_like(y)))"
SEND_BACK = "    send(x.grad, rank - 1)"
BACKWARDS = "    for m in range(M):\n        backward(m)"
BOTH_SEND = "    dist.send(inputs, 1 - rank)\n    dist.recv(torch.empty_like(inputs), 1 - rank)\n"
WARM_UP = "    for m in range(ahead):  # warm-up"
AHEAD = "ahead = min(ranks - 1 - rank, M)"
OUTSIDE = "source))\n    exchange()\n    return"
NO_GUARD = "and there are {} ranks, 0 to"
IN_A_CIRCLE = "Every rank in the circle {}"

WRONG = {
    "no guard at the last rank's send": naive("fails", NO_GUARD.format(2), (GUARD, "    dist"), ranks=2),
    "a guard only below": naive("fails", NO_GUARD.format(4), ("0 <= to < ranks", "0 <= to")),
    "the gradient is received first": naive(
        "hangs",
        IN_A_CIRCLE.format("receives first.*let rank 2 run one more forward before it"),
        (RECEIVE, FIRST_GRADIENT + RECEIVE),
        (BACK, "    y.backward(g if rank < ranks - 1 else None)"),
    ),
    "the output is sent after the gradient has come": naive(
        "hangs",
        "Rank 0 has an output for rank 1 that it hasn't sent yet: let it send first",
        ("    send(y, rank + 1)\n", ""),
        (BACK, f"{BACK}\n    send(y, rank + 1)"),
    ),
    "nobody asks for the gradient of what came": naive("fails", "nobody asked for", (".requires_grad_()", ""), ranks=2),
    "no backward on the last rank": naive(
        "fails", "rank 3 fails .*NoneType", (BACK, f"    if rank < ranks - 1:\n    {BACK}")
    ),
    "the gradient isn't sent back": naive("hangs", "more than the 0 that rank 3 has sent", (SEND_BACK + "\n", "")),
    "the gradient goes to the wrong side": naive("hangs", "one message", (SEND_BACK, "    send(x.grad, rank + 1)")),
    "what was received is thrown away": naive(
        "gradients", "`receive` doesn't return", (FILLS, "dist.recv(torch.empty_like(tensor), source)\n")
    ),
    "an irecv that nobody waits for": naive("gradients", "nobody has waited for", ("dist.recv(", "dist.irecv(")),
    "gradients aren't set to zero": naive("gradients", "every gradient is 3 times", ("    stage.zero_grad()\n", "")),
    "half a message": naive("fails", "meets a receive for one of", ("send(y, rank + 1)", "send(y[:5], rank + 1)")),
    "the loss isn't scaled": gpipe("gradients", "every gradient is 8 times", (" * len(x) / len(inputs)", "")),
    "each backward sets gradients to zero": gpipe(
        "gradients",
        "rank 0's gradients are those of microbatch 7 alone",
        ("    y.back", "    stage.zero_grad()\n    y.back"),
    ),
    "weights change in the step": naive(
        "gradients",
        "weights of ranks 0 and 1 aren't the other ranks' .* has `step` changed",
        (SEND_BACK, f"{SEND_BACK}\n    torch.optim.SGD(stage.parameters(), lr=0.1).step()"),
        ranks=2,
    ),
    "targets of another microbatch": gpipe(
        "gradients", "here samples 0 to 2 meet samples 21 to 23", ("(y, parts[m][1])", "(y, parts[M - 1 - m][1])")
    ),
    "one rank's backwards in another order": gpipe(
        "gradients",
        "here samples 21 to 23 meet samples 0 to 2",
        (BACKWARDS, BACKWARDS.replace("range(M):", "range(M) if rank else reversed(range(M)):")),
    ),
    "1F1B's order, and GPipe's messages": gpipe(
        "hangs", IN_A_CIRCLE.format("sends"), (_step("pipe_gpipe.py"), _step("pipe_1f1b.py")), ranks=2
    ),
    "two neighbours send before they receive": one_f_one_b(
        "hangs", IN_A_CIRCLE.format("sends"), (WARM_UP, BOTH_SEND + WARM_UP), ranks=2
    ),
    "the exchange stands inside the if": one_f_one_b(
        "order", "only after all of rank 0's first forwards", (OUTSIDE, OUTSIDE.replace("exchange", "    exchange"))
    ),
    "the last backward is missing": one_f_one_b(
        "hangs", "more than the 7 that rank 2", ("range(M - ahead, M):  # cool", "range(M - ahead, M - 1):  # cool")
    ),
    "the last exchange is missing": one_f_one_b(
        "hangs", "Rank 3 prepares a send in line 39 and", ("    exchange()  # the last action's message\n", "")
    ),
    "a warm-up that is one too short, on rank 1": one_f_one_b(
        "order", "rank 1 holds 1 forward at", (AHEAD, "ahead = max(0, min(ranks - 1 - rank, M) - (rank == 1))")
    ),
    "a warm-up the wrong way round": one_f_one_b(
        "hangs", "let rank 0 run one more forward .* or rank 1 a backward", (AHEAD, "ahead = min(rank, M)")
    ),
}
