"""The stand-in's torch.distributed: sends and receives that wait for each other like gloo's, and
barriers.
"""

from __future__ import annotations

from collections.abc import Callable

from . import tensors
from .modules import StandIn
from .replay import Message, Rank, Replay, Wait
from .tensors import Tensor, lacks


class Work:
    """The result of isend and irecv."""

    def __init__(self, rank: Rank, message: Message, tensor: Tensor):
        self.rank, self.message, self.tensor, self.is_done = rank, message, tensor, False

    def wait(self, timeout: object = None) -> bool:
        if not self.is_done:
            message = self.message
            self.rank.wait(Wait(f"{message.kind} {message.number}", message), lambda: message.done)
            if message.kind == "receive":
                fill(self.tensor, message, self.rank)
            self.is_done = True
        return True

    def __getattr__(self, name: str) -> object:
        raise lacks(f"Work.{name}")


def fill(tensor: Tensor, asked: Message, rank: Rank) -> None:
    """Write the message that has come into the tensor's memory. As under gloo, it may be shorter,
    but not longer.
    """
    sent = asked.match
    if len(sent.numbers) > tensor.numel():
        raise RuntimeError(
            f"rank {sent.rank} sends a message of shape {list(sent.shape)}, and the tensor to fill "
            f"has shape {list(asked.shape)}"
        )
    if any(not node.freed for node in tensor.feeds):
        whose = (
            f"this message from rank {sent.rank} overwrites a tensor whose backward is still to "
            "come"
        )
        rank.note(f"{whose}: let each message have a tensor of its own")
    tensor.numbers[: len(sent.numbers)] = sent.numbers
    tensor.samples, tensor.awaits = sent.samples, ""


def in_line(message: Message) -> str:
    """The line where a message was posted, after other words."""
    return f" in line {message.stack[0][1]}" if message.stack else ""


class P2POp:
    """A message for batch_isend_irecv."""

    def __init__(self, op: Callable, tensor: Tensor, peer: int, tag: int = 0):
        rank = tensors.now
        self.op, self.tensor, self.peer, self.tag = op, tensor, peer, tag
        self.stack, self.has_begun = rank.replay.stack(), False
        rank.operations.append(self)
        checked(rank, tensor, peer, self.kind)

    @property
    def kind(self) -> str:
        return "send" if self.op.__name__ == "isend" else "receive"


def checked(rank: Rank, tensor: object, peer: int, kind: str) -> None:
    """Raise an error for a peer that doesn't exist, or for something that isn't a tensor."""
    does, count = "sends to" if kind == "send" else "receives from", len(rank.replay.ranks)
    if not 0 <= peer < count:
        raise ValueError(
            f"rank {rank.number} {does} rank {peer}, and there are {count} ranks, 0 to "
            f"{count - 1}: leave it out at the end of the pipeline"
        )
    if not isinstance(tensor, Tensor):
        expected = "Expected parameter `tensor` of type torch.Tensor"
        raise TypeError(f"Invalid function argument. {expected} but got {type(tensor)} instead.")


def distributed(replay: Replay) -> StandIn:
    """`torch.distributed` on the ranks of this run."""

    def post(kind: str, tensor: Tensor, peer: int, tag: int) -> Work:
        rank = tensors.now
        checked(rank, tensor, peer, kind)
        asked = kind, peer, tensor.shape, tag
        message = rank.answer(asked, lambda: replay.post(rank, kind, peer, tensor, tag))
        if kind == "receive":
            tensor.awaits = f"from rank {peer}, asked for{in_line(message)}"
        return Work(rank, message, tensor)

    def isend(tensor: Tensor, dst: int, tag: int = 0) -> Work:
        return post("send", tensor, dst, tag)

    def irecv(tensor: Tensor, src: int, tag: int = 0) -> Work:
        return post("receive", tensor, src, tag)

    def send(tensor: Tensor, dst: int, tag: int = 0) -> None:
        isend(tensor, dst, tag).wait()

    def recv(tensor: Tensor, src: int, tag: int = 0) -> int:
        irecv(tensor, src, tag).wait()
        return src

    def batch_isend_irecv(operations: list[P2POp]) -> list[Work]:
        if not operations:
            raise ValueError("batch_isend_irecv was given an empty list")
        return [begun(each) for each in operations]

    def begun(operation: P2POp) -> Work:
        operation.has_begun = True
        return operation.op(operation.tensor, operation.peer, operation.tag)

    def barrier() -> None:
        rank = tensors.now
        meeting = rank.answer(("barrier",), lambda: replay.meeting(rank))
        rank.meetings += 1
        rank.wait(meeting, lambda: replay.met(meeting))

    def nothing(*_: object, **__: object) -> None:
        tensors.now.check()

    return StandIn(
        "torch.distributed",
        **{
            each.__name__: each
            for each in (isend, irecv, send, recv, P2POp, batch_isend_irecv, barrier)
        },
        init_process_group=nothing,
        destroy_process_group=nothing,
        get_rank=lambda *_: tensors.now.number,
        get_world_size=lambda *_: len(replay.ranks),
    )
