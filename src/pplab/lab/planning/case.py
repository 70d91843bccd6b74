"""The running case: one model, four machines, one bill, and the ledger to which every chapter adds
its rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from math import inf
from typing import Any

from ...costs import Link
from ...errors import MOST, number, positive_int
from ...footprint import Memory
from ...schedule import Schedule
from ...timeline import Timeline, total
from ..forms import Table
from .expert_layers import ExpertLayers
from .layout import Layout, Machine
from .planner import Plan, plan
from .recomputing import Recompute
from .state import State
from .transformer import Transformer, checked

# Grattafiori et al. 2024, "The Llama 3 Herd of Models", table 3
LLAMA_3_8B = Transformer(
    32, 4096, 8192, heads=32, kv_heads=8, mlp_width=14336, gated=True, vocabulary=128256
)
ONE_GPU, PERFECT = "one GPU", "a perfect pipeline"


@dataclass(frozen=True)
class Case:
    """A model to train, the GPUs to rent for it, and the job. Without arguments it is the course's.

    Change one thing (`Case(gigabits=100)`, or `dataclasses.replace`), and all its rows follow.
    `pplab.lab.plan` says how they are counted. Raises ValueError for a number that isn't above 0.

    >>> Case().row("1F1B", num_microbatches=16, cut=[8, 9, 8, 7])
                       M   step    busy  fullest rank  fits in 80 GB  a billion tokens
    1F1B, cut 8+9+8+7  16  5.65 s  75 %  77.4 GB       yes            $95.7 in 12.0 h
    >>> round(Case(gigabits=100).row("GPipe", num_microbatches=8).step_s, 2)
    3.27
    """

    model: Transformer | Any = LLAMA_3_8B  # or a Model
    num_ranks: int = 4  # GPUs, on a machine each
    # of a GPU, as its driver tells: of an H100 "of 80 GB" 81,559 MiB; 1 GB is 10^9 bytes
    memory_gb: float = 85.5
    # of it, for CUDA's context, NCCL's buffers and what the allocator can't use: an assumption
    reserve_gb: float = 5.5
    state: State = State()  # bytes of a parameter
    # that a GPU reaches, per second: an assumption, 40 % of an H100's peak in bfloat16
    teraflops: float = 400
    # per second, that a machine sends, and as many that it receives; inf: messages take no time
    gigabits: float = 25
    latency_ms: float = 0  # of a message, in addition
    dollars_per_hour: float = 2  # for a GPU: an assumption, prices differ and change
    tokens: float = 1e9  # to train on
    experts: ExpertLayers | Any = None  # in place of every layer's MLP, over pipelines side by side

    def __post_init__(self) -> None:
        checked(self.model, self.experts, self.state)
        positive_int("num_ranks", self.num_ranks)
        for name in ("memory_gb", "teraflops", "gigabits", "dollars_per_hour", "tokens"):
            value = getattr(self, name)
            if not number(name, value, inf if name == "gigabits" else MOST):
                raise ValueError(f"{name} must be above 0, got {value!r}")
        Link(self.latency_ms)
        if not 0 <= number("reserve_gb", self.reserve_gb) < self.memory_gb:
            raise ValueError(
                f"reserve_gb must be below memory_gb, {self.memory_gb:g}, got {self.reserve_gb!r}"
            )

    @property
    def num_gpus(self) -> int:
        """To be paid for: of all pipelines, where experts are spread over several."""
        return self.num_ranks * (self.experts.gpus if self.experts else 1)

    @property
    def room_gb(self) -> float:
        """Of a GPU, for what is counted."""
        return self.memory_gb - self.reserve_gb

    @property
    def machine(self) -> Machine:
        """The machines, as `plan` wants them: in bytes and seconds."""
        between = Link(self.latency_ms / 1e3, self.gigabits * 1e9 / 8)
        return Machine(1, Link(), between, self.teraflops * 1e12, self.room_gb * 1e9)

    @property
    def layer_ms(self) -> float:
        """A layer's forward, of a sequence, or the mean of layers that differ. Its backward takes
        twice as long.
        """
        work = self.model.long(None).work(1)
        return sum(work) / len(work) / self.teraflops / 1e9

    @property
    def head_ms(self) -> float:
        """The head's forward, of a sequence, on the rank that has the last stage."""
        return self.model.head_flops(1) / self.teraflops / 1e9

    @property
    def message_mb(self) -> float:
        """What crosses a boundary between stages: a sequence's activations, or their gradients."""
        return self.model.boundary_bytes(1) / 1e6

    @property
    def message_ms(self) -> float:
        """How long that takes from rank to rank."""
        return self.latency_ms + self.message_mb * 8 / self.gigabits

    @property
    def all_to_all_ms(self) -> float:
        """How long one of a layer's two all-to-alls takes, of a sequence; 0 without experts."""
        return self.experts.all_to_all_time(self.model, self.machine) * 1e3 if self.experts else 0.0

    def stage_ms(self, cut: Sequence[int] | None = None) -> tuple[float, ...]:
        """Per rank: its stage's forward of a sequence, on the last rank with the head."""
        return tuple(s * 1e3 for s in self.plan("naive", 1, cut=cut).costs.forward)

    def state_gb(self, cut: Sequence[int] | None = None) -> tuple[float, ...]:
        """Per rank: weights, gradients and the optimizer's state. Their sum is the whole
        model's.
        """
        return in_gb(self.plan("naive", 1, cut=cut).memory).parameters

    def sequence_gb(self, cut: Sequence[int] | None = None) -> tuple[float, ...]:
        """Per rank: what a forward keeps of a sequence until its backward."""
        return in_gb(self.plan("naive", 1, cut=cut).memory).activation

    def plan(
        self,
        schedule: str | Schedule,
        num_microbatches: int,
        microbatch: int = 1,
        **options: object,
    ) -> Plan:
        """`pplab.lab.plan` on these machines, with a stage per rank or several. It takes the same
        options.
        """
        if "state" in options:
            raise ValueError(
                f"state is a case's, not a row's: give lab.Case(state={options['state']!r})"
            )
        layout = Layout(pp=self.num_ranks, dp=self.num_gpus // self.num_ranks)
        batch = num_microbatches * microbatch * layout.dp
        asked = {"schedule": schedule, "state": self.state, "experts": self.experts}
        return plan(self.model, self.machine, layout, batch, microbatch, **asked, **options)

    def row(
        self,
        schedule: str | Schedule,
        num_microbatches: int | None = None,
        *,
        microbatch: int = 1,
        cut: Sequence[int] | None = None,
        recompute: Recompute = False,
        **options: object,
    ) -> Entry:
        """What a step and the job take under a schedule: a name with its builder's `options`, or a
        Schedule of yours.

        `microbatch` is in sequences; `cut` and `recompute` are as for `pplab.lab.plan`. Two names
        are no schedule's: "one GPU" has the whole model, and gets no further than its state where
        that doesn't fit; "a perfect pipeline" shares the work out evenly and never waits.

        Raises ValueError for a cut that doesn't sum to the model's layers, and for a Schedule of
        other ranks.
        """
        if isinstance(schedule, Schedule):
            num_microbatches = num_microbatches or schedule.num_microbatches
        num_microbatches = positive_int("num_microbatches", num_microbatches)
        asked = {
            "num_microbatches": num_microbatches,
            "microbatch": positive_int("microbatch", microbatch),
        }
        if schedule in (ONE_GPU, PERFECT):
            if cut is not None or recompute or options:
                raise ValueError(
                    f"{schedule!r} has no cut, no recomputation and no options: give microbatches "
                    "alone"
                )
            alone = replace(
                self, num_ranks=1, experts=self.experts and replace(self.experts, gpus=1)
            )
            one = alone.row("naive", **asked)
            if schedule == PERFECT:
                return Entry(self, PERFECT, **asked, step_s=one.step_s / self.num_ranks, busy=1.0)
            state = alone.state_gb()
            too_large = Entry(alone, ONE_GPU, **asked, held_gb=state)
            return replace(one, what=ONE_GPU) if too_large.fits else too_large
        chosen = asked | {"cut": cut, "recompute": recompute} | options
        found = self.plan(schedule, **chosen)
        alone = replace(self, experts=None).plan(schedule, **chosen) if self.experts else found
        memory, rows = in_gb(found.memory), found.timeline.schedule
        tickets, sends = options.get("in_flight"), options.get("sends")
        return Entry(
            self,
            rows.name
            + (f", {_sum(tickets)} in flight" if tickets else "")
            + (f", {sends}" if sends else ""),
            **asked,
            cut=None if cut is None else tuple(cut),
            recompute=recompute if isinstance(recompute, bool) else tuple(recompute),
            step_s=found.step_s,
            busy=total(alone.timeline.busy) / (self.num_ranks * found.step_s),
            held_gb=tuple(held / 1e9 for held in found.held_bytes),
            timeline=found.timeline,
            memory=memory,
        )


@dataclass(frozen=True, repr=False)
class Entry:
    """A row of the ledger, shown as a ledger of one. What a row can't have is None, or empty."""

    case: Case
    what: str  # the schedule's name
    num_microbatches: int
    microbatch: int = 1  # sequences in each
    cut: tuple[int, ...] | None = None  # layers per stage; None: all stages have as many
    recompute: bool | tuple = False  # all layers, how many of each stage, or modules' names
    step_s: float | Any = None
    busy: float | Any = None  # the share of all ranks' time in which they compute, again or not
    # per rank, at its fullest; of a GPU that its state doesn't fit in, the state
    held_gb: tuple[float, ...] = ()
    timeline: Timeline | Any = None  # in seconds
    # of its stages, in GB: lab.memory_chart(row.timeline, of=row.memory)
    memory: Memory | Any = None

    @property
    def fits(self) -> bool:
        """Whether every rank holds what it has to."""
        return max(self.held_gb, default=0) <= self.case.room_gb

    @property
    def hours(self) -> float | Any:
        """Of the job."""
        tokens = self.num_microbatches * self.microbatch * self.case.model.sequence  # in a step
        tokens *= self.case.num_gpus // self.case.num_ranks
        return self.step_s and self.case.tokens / tokens * self.step_s / 3600

    @property
    def dollars(self) -> float | Any:
        """Of the job, for all GPUs."""
        return self.step_s and self.hours * self.case.num_gpus * self.case.dollars_per_hour

    @property
    def cells(self) -> tuple[str, ...]:
        """Its texts in the ledger."""
        name = self.what + (f", cut {_sum(self.cut)}" if self.cut else "")
        if self.recompute:
            name += f", recomputing {'all' if self.recompute is True else _sum(self.recompute)}"
        held = f"{max(self.held_gb):.1f} GB" if self.held_gb else ""
        if self.step_s is None:
            return name, "", "", "", f"{held} of state", "no", ""
        dollars = f"{self.dollars:,.0f}" if self.dollars >= 99.95 else f"{self.dollars:.1f}"
        taken = (
            f"{self.step_s:.2f} s",
            f"{100 * self.busy:.0f} %",
            f"${dollars} in {self.hours:.1f} h",
        )
        step, busy, bill = taken if self.fits else (f"({cell})" for cell in taken)
        return (
            name,
            str(self.num_microbatches),
            step,
            busy,
            held,
            ("yes" if self.fits else "no") * bool(held),
            bill,
        )

    def __repr__(self) -> str:
        return repr(Ledger(self.case, [self]))

    def _repr_html_(self) -> str:
        return Ledger(self.case, [self])._repr_html_()


@dataclass(repr=False)
class Ledger:
    """Rows of a case, which print as a table and draw themselves in a notebook.

    A row says how long a step takes, how much of it the GPUs compute, what the fullest rank holds
    and whether that fits, and the bill. What wouldn't fit is in brackets: so much it would take.

    >>> ledger = Ledger(Case())
    >>> rows = [ledger.add("GPipe", num_microbatches=M) for M in (4, 8)]
    >>> ledger
           M  step      busy    fullest rank  fits in 80 GB  a billion tokens
    GPipe  4  2.12 s    50 %    77.4 GB       yes            $144 in 18.0 h
    GPipe  8  (3.37 s)  (63 %)  113.9 GB      no             ($114 in 14.3 h)
    """

    case: Case = field(default_factory=Case)
    entries: list[Entry] = field(default_factory=list)

    def add(
        self, schedule: str | Schedule, num_microbatches: int | None = None, **asked: object
    ) -> Entry:
        """Add a row, and return it: `Case.row` says what it takes."""
        self.entries.append(self.case.row(schedule, num_microbatches, **asked))
        return self.entries[-1]

    @property
    def table(self) -> Table:
        """The rows as texts, under their columns."""
        found, tokens = Table(entry.cells for entry in self.entries), self.case.tokens
        job = "a billion tokens" if tokens == 1e9 else f"{tokens / 1e9:g} billion tokens"
        found.columns = (
            "",
            "M",
            "step",
            "busy",
            "fullest rank",
            f"fits in {self.case.room_gb:g} GB",
            job,
        )
        return found

    def __repr__(self) -> str:
        return str(self.table)

    def _repr_html_(self) -> str:
        told = self.table._repr_html_().replace("<td>no</td>", "<td><strong>no</strong></td>")
        for wide, narrow in (
            ("<tr><td>", '<tr><td style="white-space: normal">'),
            ("+", "+<wbr>"),
            (" in ", " <br>in "),
        ):
            told = told.replace(wide, narrow)  # a phone shows more of it
        return told


def _sum(layers: Sequence[int]) -> str:
    return "+".join(map(str, layers))


def in_gb(memory: Memory) -> Any:
    """A stages' memory that is in bytes, in GB."""
    names = ("activation", "weight_input", "recomputed", "parameters", "while_input_gradient")
    return Memory(
        **{name: [size / 1e9 for size in getattr(memory, name)] for name in names}, unit="GB"
    )
