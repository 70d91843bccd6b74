"""Messages that get lost: those to or from ranks that don't exist, and those that a reader's
`receive` throws away. For the first, an error comes before torch waits forever or ends the process.
"""

from __future__ import annotations

import ast
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor


@contextmanager
def neighbours_are_there() -> Iterator[None]:
    """Make messages to or from ranks that don't exist raise an error. Without this they wait
    forever, or end the process.
    """
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
                        f"rank {own} {does} rank {other}, and there are {ranks} ranks, 0 to "
                        f"{ranks - 1}: leave it out at the end of the pipeline"
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


def thrown_away(path: Path) -> str:
    """The remark about a `receive` that fills one tensor and returns a different one."""
    tree = ast.parse(path.read_text())
    found = [
        node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name == "receive"
    ]
    nodes = [node for function in found for node in ast.walk(function)]
    calls = [node for node in nodes if isinstance(node, ast.Call) and node.args]
    filled = {ast.unparse(call.args[0]) for call in calls if ast.unparse(call.func) == "dist.recv"}
    returned = [
        ast.unparse(node.value) for node in nodes if isinstance(node, ast.Return) and node.value
    ]
    lost = filled and not any(name in value for name in filled for value in returned)
    return "; `receive` doesn't return the tensor that `dist.recv` fills" if lost else ""
