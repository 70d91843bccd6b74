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
    changes: tuple[tuple[str, str], ...]
    size: tuple[int, int]  # ranks, microbatches
    kind: str  # hangs, fails, gradients (differ), order (is another one)
    says: str  # a pattern

    @property
    def text(self) -> str:
        """The file's text; each piece that is replaced stands there once."""
        text = (NOTEBOOKS / self.file).read_text()
        for old, new in self.changes:
            assert text.count(old) == 1, old
            text = text.replace(old, new)
        return text


def _step(file: str) -> str:
    return re.search(r"def step\(\):.*?\n\n\n", (NOTEBOOKS / file).read_text(), re.S)[0]


NAIVE, GPIPE, ONE_F_ONE_B = "pipe_naive.py", "pipe_gpipe.py", "pipe_1f1b.py"
GUARD = "    if 0 <= to < ranks:  # beyond the ends of the pipeline there is nobody\n        dist.send(tensor, to)"
RECEIVES = "    x = receive(rank - 1, inputs).requires_grad_()  # what comes has no history\n"
FILLS = "        tensor = torch.empty_like(tensor)  # a message doesn't tell its shape\n"
BACK = "    y.backward(receive(rank + 1, torch.ones_like(y)))"
BOTH_SEND = (
    "    if ranks == 2:\n        dist.send(inputs, 1 - rank)\n        dist.recv(torch.empty_like(inputs), 1 - rank)\n"
)
WARM_UP = "    for m in range(ahead):  # warm-up"
AHEAD = "ahead = min(ranks - 1 - rank, M)"

WRONG = {
    "no guard at the last rank's send": WrongFile(
        NAIVE, ((GUARD, "    dist.send(tensor, to)"),), (2, 1), "fails", "rank 1 sends to rank 2, and there are 2 ranks"
    ),
    "a guard only below": WrongFile(
        NAIVE, (("0 <= to < ranks", "0 <= to"),), (4, 1), "fails", "rank 3 sends to rank 4, and there are 4 ranks"
    ),
    "the gradient is received first": WrongFile(
        NAIVE,
        (
            (RECEIVES, "    g = receive(rank + 1, inputs)\n" + RECEIVES.partition("  #")[0] + "\n"),
            (BACK, "    y.backward(g if rank < ranks - 1 else None)"),
        ),
        (4, 1),
        "hangs",
        "Every rank in the circle receives first",
    ),
    "the exchange stands inside the if": WrongFile(
        ONE_F_ONE_B,
        (("source))\n    exchange()\n    return", "source))\n        exchange()\n    return"),),
        (4, 8),
        "order",
        "rank 1 begins only after all of rank 0's first forwards",
    ),
    "nobody asks for the gradient of what came": WrongFile(
        NAIVE, ((".requires_grad_()", ""),), (2, 1), "fails", "NoneType.*a tensor that nobody asked for a gradient"
    ),
    "the loss isn't scaled": WrongFile(
        GPIPE, ((" * len(x) / len(inputs)", ""),), (4, 8), "gradients", "every gradient is 8 times one process's"
    ),
    "1F1B's order, and GPipe's messages": WrongFile(
        GPIPE, ((_step(GPIPE), _step(ONE_F_ONE_B)),), (2, 8), "hangs", "Every rank in the circle sends"
    ),
    "two neighbours send before they receive": WrongFile(
        ONE_F_ONE_B, ((WARM_UP, BOTH_SEND + WARM_UP),), (2, 8), "hangs", "Every rank in the circle sends"
    ),
    "targets of another microbatch": WrongFile(
        GPIPE,
        (("mse_loss(y, parts[m][1])", "mse_loss(y, parts[M - 1 - m][1])"),),
        (4, 8),
        "gradients",
        "here samples 0 to 2 meet samples 21 to 23",
    ),
    "one rank's backwards in another order": WrongFile(
        GPIPE,
        (
            (
                "    for m in range(M):\n        backward(m)",
                "    for m in range(M) if rank else reversed(range(M)):\n        backward(m)",
            ),
        ),
        (4, 8),
        "gradients",
        "here samples 21 to 23 meet samples 0 to 2",
    ),
    "no backward on the last rank": WrongFile(
        NAIVE, ((BACK, f"    if rank < ranks - 1:\n    {BACK}"),), (4, 1), "fails", "rank 3 fails .*NoneType"
    ),
    "the gradient isn't sent back": WrongFile(
        NAIVE, (("    send(x.grad, rank - 1)\n", ""),), (4, 1), "hangs", "one message more than the 0 that rank 3 has"
    ),
    "the last backward is missing": WrongFile(
        ONE_F_ONE_B,
        (("range(M - ahead, M):  # cool", "range(M - ahead, M - 1):  # cool"),),
        (4, 8),
        "hangs",
        "rank 3 waits for one message more than the 7 that rank 2 has received",
    ),
    "the last exchange is missing": WrongFile(
        ONE_F_ONE_B,
        (("    exchange()  # the last action's message\n", ""),),
        (4, 8),
        "hangs",
        "Rank 3 prepares a send in line 39 and never starts it",
    ),
    "what was received is thrown away": WrongFile(
        NAIVE,
        ((FILLS + "        dist.recv(tensor, source)\n", "        dist.recv(torch.empty_like(tensor), source)\n"),),
        (4, 1),
        "gradients",
        "`receive` doesn't return the tensor that `dist.recv` fills",
    ),
    "an irecv that nobody waits for": WrongFile(
        NAIVE,
        (("dist.recv(tensor, source)", "dist.irecv(tensor, source)"),),
        (4, 1),
        "gradients",
        "a tensor is used whose message .* nobody has waited for",
    ),
    "gradients aren't set to zero": WrongFile(
        NAIVE, (("    stage.zero_grad()\n", ""),), (4, 1), "gradients", "every gradient is 3 times one process's"
    ),
    "half a message": WrongFile(
        NAIVE, (("    send(y, rank + 1)", "    send(y[:5], rank + 1)"),), (4, 1), "fails", "rank 3 fails .*IndexError"
    ),
    "a warm-up that is one too short, on rank 1": WrongFile(
        ONE_F_ONE_B,
        ((AHEAD, "ahead = max(0, min(ranks - 1 - rank, M) - (rank == 1))"),),
        (4, 8),
        "order",
        "rank 1 holds 1 forwards at most, 1F1B 2",
    ),
    "the gradient goes to the wrong side": WrongFile(
        NAIVE, (("    send(x.grad, rank - 1)", "    send(x.grad, rank + 1)"),), (4, 1), "hangs", "one message more than"
    ),
    "a warm-up the wrong way round": WrongFile(
        ONE_F_ONE_B, ((AHEAD, "ahead = min(rank, M)"),), (4, 8), "hangs", "Every rank in the circle receives first"
    ),
}
