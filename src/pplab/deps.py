"""What an action waits for. Lowering, the runtime and the texts of errors ask this module. For
speed, `schedule.Graph` has the same rule in numbers, and a test compares the two. The searches of
`pplab.lab` and the page's core.js each have it once more in a form of their own.

The rule, for stage s of S and microbatch m:

    F(s, m)        waits for F(s-1, m), unless s is the first stage
    B or I (s, m)  waits for F(s, m), and for the B or I (s+1, m), unless s is the last stage
    W(s, m)        waits for I(s, m)

All actions of one stage on one microbatch run on one rank. So only two things cross ranks, the
output of a forward and the input gradient of a backward, which is at most one message per action.
"""

from __future__ import annotations

from typing import NamedTuple

from .actions import INPUT_GRADIENT, RECV_B, RECV_F, SEND_B, SEND_F, Action, F, I, Kind, W


class Need(NamedTuple):
    """One thing an action waits for: any of `kinds` of a stage on a microbatch."""

    stage: int
    kinds: tuple[Kind, ...]
    microbatch: int

    def __str__(self) -> str:
        return f"{self.stage}{'/'.join(self.kinds)}{self.microbatch}"


def needs(action: Action, num_stages: int) -> tuple[Need, ...]:
    """What `action` waits for: first the result of a different stage, then the result of its own
    stage.
    """
    stage, kind, m = action
    if kind is F:
        return (Need(stage - 1, (F,), m),) if stage > 0 else ()
    if kind is W:
        return (Need(stage, (I,), m),)
    own = Need(stage, (F,), m)
    return (Need(stage + 1, INPUT_GRADIENT, m), own) if stage < num_stages - 1 else (own,)


class Message(NamedTuple):
    """A result that one stage sends to a different one: `send` names it at the producer, `receive`
    at the consumer.
    """

    send: Action
    receive: Action


def outgoing(action: Action, num_stages: int) -> Message | None:
    """The message that carries the result of `action` to a different stage, or None if no stage
    needs it.
    """
    stage, kind, m = action
    if kind is F and stage < num_stages - 1:
        return Message(Action(stage, SEND_F, m), Action(stage + 1, RECV_F, m))
    if kind in INPUT_GRADIENT and stage > 0:
        return Message(Action(stage, SEND_B, m), Action(stage - 1, RECV_B, m))
    return None


def incoming(action: Action, num_stages: int) -> Action | None:
    """The receive of what `action` needs from a different stage, or None if it needs nothing from
    one.
    """
    stage, kind, m = action
    if kind is F and stage > 0:
        return Action(stage, RECV_F, m)
    if kind in INPUT_GRADIENT and stage < num_stages - 1:
        return Action(stage, RECV_B, m)
    return None


_OTHER_END = {SEND_F: (RECV_F, 1), RECV_F: (SEND_F, -1), SEND_B: (RECV_B, -1), RECV_B: (SEND_B, 1)}


def other_end(message: Action) -> Action:
    """The receive of a send, the send of a receive.

    >>> print(other_end(Action(2, SEND_B, 5)))
    1RECV_B5
    """
    kind, step = _OTHER_END[message.kind]
    return Action(message.stage + step, kind, message.microbatch)
