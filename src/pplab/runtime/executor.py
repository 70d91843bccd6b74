"""The executor, which runs any lowered row. No schedule has a training loop of its own."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from ..actions import COMPUTE, RECV_B, RECV_F, Action, Kind, Overlap, parts
from ..deps import incoming, outgoing
from .comm import Comm, Home
from .listener import Listeners
from .stage import Stage
from .workload import Batch, Tensors


@dataclass
class Executor:
    """Runs one rank's lowered row. `around(event, what)` tells listeners."""

    rank: int
    row: Sequence[Action | Overlap]
    stages: Mapping[int, Stage]
    num_stages: int
    home: Home
    comm: Comm
    around: Listeners
    overlap: Callable | None = None  # runs an overlap's halves, returns their results

    def run(self, microbatches: Sequence[Batch]) -> None:
        """Run the row once."""
        self.microbatches = microbatches
        self.local: dict[Action, Tensors] = {}  # stays on this rank, by its receive
        self.outbox: dict[Action, Tensors] = {}  # for the sends that come next
        for item in self.row:
            if isinstance(item, Overlap) or item.kind in COMPUTE:
                self.compute(item)
            elif item.kind in (RECV_F, RECV_B):
                self.comm.post(item)
            else:
                with self.around("send", item):
                    self.comm.send(item, self.outbox.pop(item))
        assert not self.local and not self.outbox, "everything made in a step is used in it"

    def compute(self, item: Action | Overlap) -> None:
        """Fetch what the item needs, run it, and put what it makes where it will be looked for."""
        run = [partial(self.act, action, self.fetch(action)) for action in parts(item)]
        with self.around("item", item):
            made = self.overlap(*run) if len(run) > 1 and self.overlap else [each() for each in run]
        for action, tensors in zip(parts(item), made, strict=True):
            if message := outgoing(action, self.num_stages):
                if self.home[message.receive.stage, action.microbatch] == self.rank:
                    self.local[message.receive] = tensors
                else:
                    self.outbox[message.send] = tensors

    def fetch(self, action: Action) -> Tensors:
        """What an action needs of another stage: from this rank, or received."""
        receive = incoming(action, self.num_stages)
        if receive is None:
            return ()
        if receive in self.local:
            return self.local.pop(receive)
        with self.around("receive", receive):
            return self.comm.receive(receive)

    def act(self, action: Action, received: Tensors) -> Tensors:
        """Run one action; returns what it made for another stage."""
        stage, m = self.stages[action.stage], action.microbatch
        with self.around("action", action):
            match action.kind:
                case Kind.F:
                    return stage.forward(m, received, self.microbatches[m])
                case Kind.B:
                    return stage.backward(m, received)
                case Kind.I:
                    return stage.backward_input(m, received)
                case _:
                    return stage.backward_weight(m)
