"""More levels of the game: the reader schedules one microbatch on all ranks, and the page stamps it (see
pplab.lab.Block).

Goals are those of the package's own blocks, which the page doesn't know: play/stamp.js judges what a reader makes.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from pplab.lab import Block, v_half_block, v_min_block, zb_v_block
from pplab.lab.forms import in_script


@dataclass(frozen=True)
class BlockLevel:
    """A level. `end` must be true of every block that reaches the goal, because there may be several."""

    id: str
    title: str
    text: str
    end: str
    reference: Block
    num_microbatches: int = 8

    @property
    def cap(self) -> int:
        """The most activations of half a rank's layers that a rank may hold."""
        return max(self.reference.peak)

    @cached_property
    def makespan(self) -> float:
        """The time by which the block, stamped, squeezed and reordered, must have finished."""
        return self.reference.reorder(self.num_microbatches).makespan

    def task(self) -> str:
        """The question, in words."""
        most = f"hold at most {self.cap} forwards of a stage, however many microbatches there are"
        return f"{self.text} Let every rank {most}, and finish {self.num_microbatches} of them by {self.makespan:g}."

    on_paper = task  # whose text has the size


LEVELS = (
    BlockLevel(
        id="one-microbatch",
        title="One microbatch, three ranks",
        text="Three ranks hold two stages each, in a V: rank 0 has stages 0 and 5. Say when each action of one "
        "microbatch starts. The next microbatch does the same 6 units later, and so on. So two actions of a rank meet "
        "when their starts leave the same remainder, divided by 6.",
        end="No two actions of a rank meet, so each interval of 6 has two units left, for the weight gradients of the "
        "rank's two stages. A stage holds a microbatch as long as the block says, and another comes every interval.",
        reference=v_min_block(3),
    ),
    BlockLevel(
        id="stamp-a-v",
        title="Stamp a V",
        text="Four ranks, again in a V. The block that you start from is as short as one can be: it holds little, and "
        "it is slow, since few microbatches are under way while the pipeline fills. There is more memory than that.",
        end="A longer block holds more microbatches at a time. While the pipeline fills, the ranks have them to work "
        "on, and wait less.",
        reference=zb_v_block(4),
    ),
    BlockLevel(
        id="a-v-in-less-memory",
        title="The same V in less memory",
        text="The same four ranks have less memory.",
        end="A microbatch comes back sooner, and what it leaves is free for another. The price is paid once, while the "
        "pipeline fills and empties: every further microbatch costs the same 6 units as before.",
        reference=v_half_block(4),
    ),
)


def script() -> str:
    """The script that stamp.js needs before it: the levels, as a global."""
    told = [
        {
            "id": level.id,
            "title": level.title,
            "task": level.task(),
            "end": level.end,
            "placement": level.reference.placement,
            "interval": level.reference.interval,
            "numMicrobatches": level.num_microbatches,
            "cap": level.cap,
            "makespan": level.makespan,
        }
        for level in LEVELS
    ]
    return f"var pplabBlocks = {in_script(told)};"
