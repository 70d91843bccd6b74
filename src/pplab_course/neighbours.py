"""Messages to and from ranks that aren't there: an error says so, before torch waits for ever or ends the process."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor


@contextmanager
def neighbours_are_there() -> Iterator[None]:
    """Have a message to or from a rank that isn't there say so: by itself it waits for ever, or ends the process."""
    import torch.distributed as dist
    from torch.distributed import distributed_c10d as inside

    ranks, own = int(os.environ["WORLD_SIZE"]), int(os.environ["RANK"])

    def checked(name: str, does: str) -> Callable:
        call = getattr(dist, name)

        @wraps(call)
        def send_or_receive(tensor: Tensor, *arguments: Any, **options: Any) -> object:
            named = (options.get(name) for name in ("dst", "src", "group_dst", "group_src"))
            for other in (*arguments[:1], *named):
                if other is not None and not 0 <= other < ranks:
                    raise ValueError(
                        f"rank {own} {does} rank {other}, and there are {ranks} ranks, 0 to {ranks - 1}: leave it out "
                        "at the end of the pipeline"
                    )
            return call(tensor, *arguments, **options)

        return send_or_receive

    before = {name: getattr(dist, name) for name in ("isend", "irecv")}  # all others call these two
    for name, does in (("isend", "sends to"), ("irecv", "receives from")):
        watched = checked(name, does)
        setattr(dist, name, watched)
        setattr(inside, name, watched)
    try:
        yield
    finally:
        for name, call in before.items():
            setattr(dist, name, call)
            setattr(inside, name, call)
