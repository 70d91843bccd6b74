"""Which layout for a model on a cluster: every way to divide the GPUs, planned, and told apart as
far as is known.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import groupby
from math import hypot, inf, log2
from operator import attrgetter, itemgetter
from statistics import mode

from ...builders.registry import uncollected
from ...errors import accept, expect, number, positive_int
from ...schedule import plural
from ..forms import Table, progress_line
from ..streams import sends_in
from .expert_layers import ExpertLayers
from .fsdp import NAMES
from .layers import Model
from .layout import Layout, Machine, at_degree
from .planner import Plan
from .state import State
from .transformer import Transformer, checked
from .ways import MOST_FORWARDS, Degrees, Task, TooLarge, Way, order, planned_again, polished

SCHEDULES = ("1F1B", "Interleaved1F1B")  # that Megatron-LM and torch have, and torch compiles
_AXES = "tp cp pp dp ep".split()
_GROUPS = {  # the rows by what can be said of them
    "equal": "can't be told apart. Try the first, which recomputes and divides the model least:",
    "slower": "slower:",
    "too_large": "too large:",
}
_STEP = attrgetter("plan.step_s")
_SLACK = 1.08  # a layout whose estimate is so much slower than the fastest plan isn't planned
_FINALISTS, _SHOWN, _EQUAL = 3, 10, 5
_LARGE = 3  # rows that are listed where nothing fits
_MANY = 64  # GPUs, above which a step may take longer than predicted
_LONG = 8192  # tokens of a sequence from which context ranks are tried
_MOST_GPUS, _MOST_LAYERS = 2**17, 1000
# simulated in all, and with sends that are waited for: ten seconds
_MOST_ACTIONS, _MOST_SENT = 800_000, 12_000


@dataclass(frozen=True)
class Unsure:
    """By what share numbers may be off. `flops` of all GPUs and `links` are the machine's; each
    halving of what a GPU multiplies at a time, by twice the tensor ranks or twice the experts on a
    GPU, may cost `halves` of the FLOP/s; `model` is what a plan with right numbers may be off, and
    `many` what a step on more than 64 GPUs may take longer besides.

    The defaults: a ring on 8 H200 reached 367 of 450 GB/s; on 32 H100 tp 8 reached 83 % of tp 4's
    FLOP/s, and 9 % is half of that loss, since nothing is known of other degrees; 118 of 156
    published measurements are within 5 % of what was predicted (results/published.json); with 10 %
    for many GPUs, 8 in 10 of 1B's and 8B's runs on over 64 H100 are in their intervals, and of 3B's
    and 80B's 9 in 10 (book/published.md); the 15 % of FLOP/s are assumed.
    """

    flops: float = 0.15
    halves: float = 0.09
    links: float = 0.2
    model: float = 0.05
    many: float = 0.1

    def __post_init__(self) -> None:
        accept(self, **{name: number(name, share, 0.99) for name, share in vars(self).items()})

    def machines(self, found: Plan) -> Iterator[Machine]:
        """A plan's machine with each number off that not all layouts share: slower links, faster
        ones, fewer FLOP/s.
        """
        machine, experts, tp = found.machine, found.experts, found.layout.tp
        for factor in (1 - self.links, 1 + self.links):
            inside, between = (
                replace(link, bandwidth=factor * link.bandwidth)
                for link in (machine.inside, machine.between)
            )
            over, gathers = (
                {nodes: factor * speed for nodes, speed in table.items()}
                for table in (machine.ring_over, machine.gather_over)
            )
            yield replace(
                machine,
                inside=inside,
                between=between,
                ring=machine.ring and factor * machine.ring,
                ring_over=over,
                gather_over=gathers,
            )
        measured = at_degree({degree: degree for degree in machine.flops_at}, tp, 1)
        halvings = log2(tp / measured * (experts.count / experts.gpus if experts else 1))
        rate = machine.rate(Layout(tp)) / tp
        yield replace(machine, flops_at={tp: rate * (1 - self.halves) ** halvings})

    def off(
        self, steps: Sequence[float], first: Sequence[float] = (1, 1, 1, 1)
    ) -> tuple[float, float]:
        """By what share the ratio of two steps may be off with the links, and with every halving:
        both steps are on each of `machines`. Without the second, what the one step may be off.
        """
        pairs = zip(steps, first, strict=True)
        _, slow, fast, halves = (mine / steps[0] / (other / first[0]) - 1 for mine, other in pairs)
        return max(abs(slow), abs(fast)), halves

    def slower(self, ratio: float, steps: Sequence[float], first: Sequence[float]) -> float:
        """By what share a step is longer than the first at least, 0 where the two can't be told
        apart. They have this ratio; `steps` of the one and of the `first` are on each of
        `machines`.
        """
        links, halves = self.off(steps, first)
        return max(0.0, ratio - 1 - hypot(self.model, ratio * links, ratio * min(halves, 0)))


@dataclass(frozen=True)
class Candidate:
    """A layout of the GPUs, as planned."""

    plan: Plan
    low_s: float  # the step, if all numbers are off in its favour as they may be
    high_s: float
    slower: float  # than the first, at least; 0: the two can't be told apart

    @property
    def over_bytes(self) -> float:
        """By how much the fullest rank's memory is too small; 0 where it fits."""
        return max(0.0, self.plan.memory_bytes - self.plan.machine.memory)

    @property
    def cells(self) -> tuple[str, ...]:
        """Its texts in the table."""
        said = self.to_dict()
        at = " ".join(f"{axis} {said[axis]}" for axis in _AXES if said[axis] > 1)
        runs = "modules" if self.plan.modules else sum(self.plan.recomputed)
        again = f", {runs} again" * bool(runs)
        return (
            at or "one GPU",
            said["schedule"],
            f"{said['stages_per_rank']}",
            f"{said['num_microbatches']}"
            + f" x {self.plan.microbatch}" * (self.plan.microbatch > 1),
            _short(self.plan.layers) + again,
            "{} ({}-{})".format(*map(_rounded, (self.plan.step_s, self.low_s, self.high_s))),
            f"{self.plan.memory_bytes / 1e9:.1f}",
        )

    def to_dict(self) -> dict:
        """It as plain JSON values."""
        p, rows = self.plan, self.plan.timeline.schedule
        planned = "microbatch layers recomputed modules step_s memory_bytes bound"
        return {
            **{axis: getattr(p.layout, axis) for axis in _AXES[:4]},
            "ep": p.experts.gpus if p.experts else 1,
            "schedule": NAMES.get(p.zero, rows.name),
            "stages_per_rank": rows.num_stages // rows.num_ranks,
            "num_microbatches": rows.num_microbatches,
            **{name: getattr(p, name) for name in planned.split()},
            **{name: getattr(self, name) for name in "low_s high_s over_bytes slower".split()},
        }


@dataclass(frozen=True, repr=False)
class Choice:
    """What `choose` found: what can't be told apart from the fastest, some that are slower, some
    that don't fit. It prints as a table: layers of each stage as 2*4+5 for 4, 4 and 5, of which
    some run again; seconds from to.
    """

    gpus: int
    equal: tuple[Candidate, ...]  # those that can't be told apart from the fastest
    slower: tuple[Candidate, ...]
    too_large: tuple[Candidate, ...]
    more: int = 0  # that can't be told apart either, and aren't listed

    @property
    def rows(self) -> tuple[Candidate, ...]:
        """All that fit."""
        return self.equal + self.slower

    @property
    def best(self) -> Candidate:
        """The first: of those that can't be told apart, the one that computes nothing again with
        the fewest GPUs of a replica, FSDP last. ValueError where nothing fits.
        """
        if not self.rows:
            raise ValueError(self.advice)
        return self.rows[0]

    @cached_property
    def table(self) -> Table:
        """The rows as texts, under their columns, group after group."""
        rows = self.rows + self.too_large
        found = Table(row.cells for row in rows)
        found.columns = (
            *"layout, schedule, V, M, layers of each stage, seconds".split(", "),
            f"GB of {rows[0].plan.machine.memory / 1e9:.3g}",
        )
        first = 0  # row of the group
        for name, title in _GROUPS.items():
            if group := getattr(self, name):
                found.titles[first] = title
                first += len(group)
        return found

    def to_dict(self) -> dict:
        """All as plain JSON values, rows under `equal`, `slower` and `too_large`."""
        return {name: [row.to_dict() for row in getattr(self, name)] for name in _GROUPS} | {
            "more": self.more,
            "advice": self.advice,
        }

    @property
    def advice(self) -> str:
        """Whether to pipeline at all; where nothing fits, what would."""
        if not self.rows:
            least = min((row.plan for row in self.too_large), key=attrgetter("memory_bytes"))
            return (
                f"Nothing fits on {plural(self.gpus, 'GPU')} of {least.machine.memory / 1e9:.3g} "
                "GB: the smallest needs"
                f" {least.memory_bytes / 1e9:.1f} GB. Take more GPUs, other degrees, or freeze "
                "weights (in Python: State(2, 0, 0))."
            )
        first = min(self.rows, key=_STEP)
        pipelined = first.plan.layout.pp > 1
        others = [row for row in self.rows if (row.plan.layout.pp > 1) != pipelined]
        what, how = ("Pipeline", "without one") if pipelined else ("Don't pipeline", "with one")
        also = f" {self.more} more rows can't be told apart." * (self.more > 0)
        if not others:
            return f"{what}: {how} nothing that fits is among the fastest.{also}"
        if not all(row.slower for row in others):
            what = "Whether to pipeline can't be told"
        return (
            f"{what}: {how} a step takes {min(map(_STEP, others)) / _STEP(first) - 1:.0%} longer."
            f"{also}"
        )

    def __str__(self) -> str:
        return f"{self.table}\n{self.advice}"

    __repr__ = __str__

    def _repr_html_(self) -> str:
        return f"{self.table._repr_html_()}<p>{self.advice}</p>"


def choose(
    model: Transformer | Model,
    machine: Machine,
    gpus: int,
    batch: int,
    *,
    tp: Degrees = (1, 2, 4, 8),
    cp: Degrees | None = None,
    ep: Degrees | None = None,
    dp: Degrees | None = None,
    microbatch: Degrees = 1,
    schedules: Iterable[str] = SCHEDULES,
    experts: ExpertLayers | None = None,
    state: State | None = None,
    unsure: Unsure | None = None,
) -> Choice:
    """The fastest ways to train `model` on so many `gpus`, `batch` sequences a step.

    Given are the degrees of tensor, context, expert and data parallelism, one or several each; the
    rest of the GPUs are stages. Context ranks that are left out are 1, from 8,192 tokens on 1, 2
    and 4, and expert ranks are all that divide the experts. Under tensor ranks experts stay whole
    (Megatron-LM's `--expert-tensor-parallel-size 1`). Sought are stages and microbatches, a cut
    that weighs the head, the fewest layers that compute again so that it fits, and the schedule; a
    pipeline's optimizer is sharded (ZeRO-1), and its ranks wait for sends as Megatron-LM's do,
    where it has the schedule and that has no more than 12,000 actions. "ZBVZeroBubble" is tried
    only where `schedules` name it, because Megatron-LM lacks it and torch doesn't compile it. A
    layout without stages is the fastest that `fsdp_plan` finds. `microbatch` is of pipelines;
    without one it is what is fastest. A `state` that is left out has 8 bytes for each logit.

    Two layouts can't be told apart when the ratio of their steps may be either side of 1 with the
    machine's numbers off by what is `unsure`: what all layouts share, such as FLOP/s, doesn't count
    there. Five of those are listed, among them the fastest with a pipeline and without one.

    Raises ValueError for experts that a model doesn't have, for more GPUs or layers than anybody
    has, and where no layout divides the model, the batch and the GPUs: it says why not. Pipelines
    with over 16,384 forwards aren't planned. Where all of the rest would take over some ten
    seconds, those with the smallest estimates are planned.

    >>> from pplab import Link
    >>> node = Machine(8, Link(5e-6, 450e9), Link(10e-6, 50e9), flops=400e12, memory=80e9)
    >>> found = choose(Transformer(32, 4096, 4096, heads=32, vocabulary=128000), node, 8, batch=64)
    >>> found.best.plan.layout, len(found.equal)
    (Layout(tp=1, pp=1, dp=8, order='tp-dp-pp', cp=1), 3)
    """
    unsure = unsure or Unsure()
    expect(Unsure, unsure=unsure)
    experts, state = checked(model, experts, state or State(logits=8))
    expect(Machine, machine=machine)
    task = Task(model, machine, positive_int("gpus", gpus), positive_int("batch", batch), state)
    if gpus > _MOST_GPUS or model.num_layers > _MOST_LAYERS:
        raise ValueError(
            f"choose plans up to {_MOST_GPUS:,} GPUs and {_MOST_LAYERS:,} layers, got {gpus:,} and "
            f"{model.num_layers:,}: give numbers that a cluster and a model can have"
        )
    if cp is None:
        cp = (1, 2, 4) if model.sequence >= _LONG else 1
    if ep is None:
        ep = range(1, experts.count + 1) if experts else 1
    degrees = tp, cp, ep, range(1, gpus + 1) if dp is None else dp, microbatch
    what = f"{plural(gpus, 'GPU')} and {plural(batch, 'sequence')}"
    best: dict[tuple, Plan] = {}  # of each layout and schedule
    with uncollected(), progress_line() as tell:
        for each in sorted(_planned(task.ways(degrees, schedules, experts), what, tell), key=order):
            best.setdefault((each.layout, each.timeline.schedule.name), each)
        fitting = [each for each in best.values() if each.fits]
        for turn, each in enumerate(fitting[:_FINALISTS]):
            tell(f"moving single layers of layout {turn + 1} of {min(_FINALISTS, len(fitting))}")
            fitting[turn] = polished(each)
        # one without stages, and one with a pipeline where the first have none
        others = [each for each in fitting[_SHOWN:] if each.zero][:1]
        if not any(each.layout.pp > 1 for each in fitting[:_SHOWN]):
            others += [each for each in fitting[_SHOWN:] if each.layout.pp > 1][:1]
        large = [] if fitting else sorted(best.values(), key=attrgetter("memory_bytes"))
        rows = _compared(fitting[:_SHOWN] + others, unsure, tell)
        too_large = _compared(large[:_LARGE], unsure, tell)
    split = sum(not row.slower for row in rows)
    # with a pipeline and without one; the others are listed as they are preferred
    fastest = {
        row.plan.layout.pp > 1: row for row in sorted(rows[:split], key=_STEP, reverse=True)
    }.values()
    listed = sorted(rows[:split], key=lambda row: row not in fastest)[:_EQUAL]
    equal = tuple(sorted(listed, key=_preferred))
    return Choice(gpus, equal, rows[split:], too_large, split - len(equal))


def _planned(ways: Iterable[Way], what: str, tell: Callable[[str], None]) -> list[Plan]:
    """The plans of all ways that may be among the fastest; where nothing fits, the smallest ones.
    ValueError where there are none: why.
    """
    found: list[Plan] = []
    large: list[tuple[float, int, Callable[[bool], Plan]]] = []  # what they need, their turns
    refused, fastest, actions = [], inf, 0
    ordered = sorted(ways, key=itemgetter(0))
    for turn, (_, planned) in enumerate(ordered, 1):
        # fewer with every faster plan
        worth = bisect_right(ordered, _SLACK * fastest, key=itemgetter(0))
        if turn > worth or (actions > _MOST_ACTIONS and fastest < inf):
            break
        tell(f"planning layout {turn} of {worth}")
        try:
            found.append(planned(True))
        except TooLarge as error:
            large.append((error.needs, turn, planned))
            continue
        except ValueError as error:
            refused.append(str(error))
            continue
        actions += len(found[-1].timeline.schedule.columns.kinds)
        if found[-1].fits:
            fastest = min(fastest, found[-1].step_s)
    smallest: dict[tuple[Layout, str], Plan] = {}
    for _, _, planned in sorted(large) if fastest == inf else ():
        try:
            plan = planned(False)
        except ValueError as error:
            refused.append(str(error))
            continue
        smallest.setdefault((plan.layout, plan.timeline.schedule.name), plan)
        if len(smallest) == _LARGE:
            break
    found += smallest.values()
    if not found:
        why = mode(
            refused
            or [
                f"they don't divide by the degrees that are given, or need over {MOST_FORWARDS:,} "
                "forwards"
            ]
        )
        raise ValueError(f"no layout of {what} can be: {why}")
    return found


def _as_sent(found: Plan) -> Plan:
    """The plan with the sends of Megatron-LM, where it has the schedule."""
    rows = found.timeline.schedule
    sends = sends_in("Megatron-LM", rows.name, rows.num_ranks, rows.num_microbatches)
    if sends == found.sends or len(rows.columns.kinds) > _MOST_SENT:
        return found
    return planned_again(found, sends=sends)


def _compared(
    plans: Sequence[Plan], unsure: Unsure, tell: Callable[[str], None]
) -> tuple[Candidate, ...]:
    """The plans, sent as Megatron-LM does where it has the schedule, with their intervals, and by
    how much each is slower than the fastest at least; in the order of `_preferred`.
    """
    sent = sorted(((_as_sent(each), each) for each in plans), key=lambda pair: pair[0].step_s)
    steps = []
    for turn, (_, each) in enumerate(sent, 1):
        tell(f"comparing layout {turn} of {len(sent)}")
        steps.append(
            [each.step_s, *(planned_again(each, machine=m).step_s for m in unsure.machines(each))]
        )
    rows = []
    for (each, _), mine in zip(sent, steps, strict=True):
        links, halves = unsure.off(mine)
        usual = hypot(unsure.flops, unsure.model, links)
        slower = unsure.slower(each.step_s / sent[0][0].step_s, mine, steps[0])
        high = 1 + hypot(usual, halves, unsure.many * (each.layout.num_ranks > _MANY))
        rows.append(Candidate(each, (1 - usual) * each.step_s, high * each.step_s, slower))
    return tuple(sorted(rows, key=_preferred))


def _preferred(row: Candidate) -> tuple:
    """Those that can't be told apart first: what computes nothing again, by the GPUs of a replica,
    then tensor ranks. Of 65 published sets that way chose best (book/published.md). It fails for
    ZeRO-3, whose gathers may not hide as assumed: behind the others. So are experts whose copies
    leave a box.
    """
    found, layout = row.plan, row.plan.layout
    if row.slower:
        return 1, found.step_s
    far = found.experts is not None and found.experts.gpus > found.machine.ranks_per_node
    return (
        0,
        found.zero == 3,
        found.again_s > 0,
        far,
        layout.num_ranks // layout.dp,
        layout.tp,
        found.step_s,
    )


def _rounded(value: float) -> str:
    """Three digits, without an exponent: 1910."""
    return f"{float(f'{value:.3g}'):g}"


def _short(layers: Iterable[int]) -> str:
    """1, 2, 2, 2, 3 as 1+3*2+3."""
    runs = ((n, len([*same])) for n, same in groupby(layers))
    return "+".join(f"{count}*{n}" if count > 1 else str(n) for n, count in runs)
