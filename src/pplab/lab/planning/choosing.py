"""Which layout for a model on a cluster: every way to divide the GPUs, planned, and told apart as far as is known."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from itertools import groupby, islice, product
from math import hypot, log2

from ...builders import build, find
from ...errors import accept, expect, number, positive_int
from ...schedule import Schedule, plural
from ..forms import Table
from ..streams import SENDS, sends_in
from .expert_layers import ExpertLayers
from .fsdp import NAMES, fsdp_plan
from .layout import Layout, Machine
from .planner import Plan, plan
from .stage_costs import all_reduce
from .state import State
from .transformer import Transformer

SCHEDULES = ("1F1B", "Interleaved1F1B", "ZBVZeroBubble")
_AXES = ("tp", "cp", "pp", "dp", "ep")
_MOST_STAGES = 5  # of a rank
_SLACK = 1.08  # a layout whose estimate is so much slower than the fastest plan isn't planned
_FINALISTS, _SHOWN = 3, 12


@dataclass(frozen=True)
class Unsure:
    """By what share numbers may be off. `flops` of all GPUs and `links` are the machine's; each halving of what a GPU
    multiplies at a time, by twice the tensor ranks or twice the experts on a GPU, may cost `halves` of the FLOP/s;
    `model` is what a plan with right numbers may be off.

    The defaults: a ring on 8 H200 reached 367 of 450 GB/s; on 32 H100 tp 8 reached 83 % of tp 4's FLOP/s, and 9 % is
    half of that loss, since nothing is known of other degrees; 118 of 156 published measurements are within 5 % of what
    was predicted (results/published.json); the 15 % of FLOP/s are assumed.
    """

    flops: float = 0.15
    halves: float = 0.09
    links: float = 0.2
    model: float = 0.05

    def __post_init__(self) -> None:
        accept(self, **{each.name: number(each.name, getattr(self, each.name)) for each in fields(self)})
        for name, share in vars(self).items():
            if share >= 1:
                raise ValueError(f"{name} is a share, below 1: 0.2 for 20 %, got {share}")

    def machines(self, found: Plan) -> Iterator[Machine]:
        """A plan's machine with each number off that not all layouts share: slower links, faster ones, fewer FLOP/s."""
        machine, experts, tp = found.machine, found.experts, found.layout.tp
        for factor in (1 - self.links, 1 + self.links):
            links = {
                name: replace(getattr(machine, name), bandwidth=factor * getattr(machine, name).bandwidth)
                for name in ("inside", "between")
            }
            yield replace(machine, **links, ring=machine.ring and factor * machine.ring)
        halvings = log2(tp * experts.count / experts.gpus if experts else tp)
        rate = machine.rate(Layout(tp)) / tp
        yield replace(machine, flops_at={tp: rate * (1 - self.halves) ** halvings})

    def slower(self, ratio: float, steps: Sequence[float], first: Sequence[float]) -> float:
        """By what share a step is longer than the first at least, 0 where the two can't be told apart. They have this
        ratio; `steps` of the one and of the `first` are on the machine, and on each of `machines`."""
        slow, fast, halves = (
            ratio * (mine / steps[0]) / (other / first[0]) - ratio
            for mine, other in zip(steps[1:], first[1:], strict=True)
        )
        return max(0.0, ratio - 1 - hypot(self.model, max(abs(slow), abs(fast)), min(halves, 0)))


@dataclass(frozen=True)
class Candidate:
    """A layout of the GPUs, as planned."""

    plan: Plan
    low_s: float  # the step, if all numbers are off in its favour as they may be
    high_s: float
    slower: float = 0.0  # than the first, at least; 0: the two can't be told apart

    @property
    def over_bytes(self) -> float:
        """By how much the fullest rank's memory is too small; 0 where it fits."""
        return max(0.0, self.plan.memory_bytes - self.plan.machine.memory)

    @property
    def cells(self) -> tuple[str, ...]:
        """Its texts in the table."""
        said = self.to_dict()
        at = " ".join(f"{axis} {said[axis]}" for axis in _AXES if said[axis] > 1)
        again = f", {sum(self.plan.recomputed)} again" * any(self.plan.recomputed)
        return (
            at or "one GPU",
            said["schedule"],
            f"{said['stages_per_rank']}",
            f"{said['num_microbatches']}" + f" x {self.plan.microbatch}" * (self.plan.microbatch > 1),
            _short(self.plan.layers) + again,
            f"{self.plan.step_s:.3g} ({self.low_s:.3g}-{self.high_s:.3g})",
            f"{self.plan.memory_bytes / 1e9:.0f}" + f", {self.over_bytes / 1e9:.1f} over" * (self.over_bytes > 0),
        )

    def to_dict(self) -> dict:
        """It as plain JSON values."""
        p, rows = self.plan, self.plan.timeline.schedule
        return {
            **{axis: getattr(p.layout, axis) for axis in _AXES[:4]},
            "ep": p.experts.gpus if p.experts else 1,
            "schedule": rows.name if p.zero is None else NAMES[p.zero],
            "stages_per_rank": rows.num_stages // rows.num_ranks,
            "num_microbatches": rows.num_microbatches,
            "microbatch": p.microbatch,
            "layers": p.layers,
            "recomputed": p.recomputed,
            "step_s": p.step_s,
            "low_s": self.low_s,
            "high_s": self.high_s,
            "memory_bytes": p.memory_bytes,
            "over_bytes": self.over_bytes,
            "slower": self.slower,
        }


@dataclass(frozen=True, repr=False)
class Choice:
    """What `choose` found: what can't be told apart from the fastest, some that are slower, some that don't fit. It
    prints as a table: layers of each stage as 2*4+5 for 4, 4 and 5, of which some run again; seconds from to."""

    gpus: int
    rows: tuple[Candidate, ...]
    too_large: tuple[Candidate, ...]

    @property
    def equal(self) -> tuple[Candidate, ...]:
        """Those that can't be told apart from the fastest."""
        return tuple(row for row in self.rows if not row.slower)

    @property
    def best(self) -> Candidate:
        """The first: of those that can't be told apart, the one with the fewest GPUs of a replica, FSDP last.
        ValueError where nothing fits."""
        if not self.rows:
            raise ValueError(self.advice)
        return self.rows[0]

    @property
    def groups(self) -> dict[str, tuple[Candidate, ...]]:
        """The rows by what can be said of them."""
        return {
            "can't be told apart; the first by a rule, and take what you have:": self.equal,
            "slower:": self.rows[len(self.equal) :],
            "too large:": self.too_large,
        }

    @cached_property
    def table(self) -> Table:
        """The rows as texts, under their columns, group after group."""
        found = Table(row.cells for rows in self.groups.values() for row in rows)
        found.columns = ("layout", "schedule", "V", "M", "layers of each stage", "seconds", "GB")
        return found

    def to_dict(self) -> dict:
        """All as plain JSON values, rows under `equal`, `slower` and `too_large`."""
        groups = zip(("equal", "slower", "too_large"), self.groups.values(), strict=True)
        return {name: [row.to_dict() for row in rows] for name, rows in groups} | {"advice": self.advice}

    @property
    def advice(self) -> str:
        """Whether to pipeline at all; where nothing fits, what would."""
        if not self.rows:
            least = self.too_large[0].plan
            return (
                f"Nothing fits on {plural(self.gpus, 'GPU')} of {least.machine.memory / 1e9:.3g} GB: the smallest needs"
                f" {least.memory_bytes / 1e9:.3g} GB. Take more GPUs, other degrees, or freeze weights: State(2, 0, 0)."
            )
        first = min(self.rows, key=lambda row: row.plan.step_s)
        pipelined = first.plan.layout.pp > 1
        other = next((row for row in self.rows if (row.plan.layout.pp > 1) != pipelined), None)
        what = "Pipeline" if pipelined else "Don't pipeline"
        others = "without one" if pipelined else "with one"
        if not other:
            return f"{what}: {others} nothing that fits is among the fastest."
        if not other.slower:
            what = "Whether to pipeline can't be told"
        return f"{what}: {others} a step takes {other.plan.step_s / first.plan.step_s - 1:.0%} longer."

    def __str__(self) -> str:
        head, *body = str(self.table).splitlines()
        return "\n".join([head, *self._under_titles(body, "{}"), self.advice])

    __repr__ = __str__

    def _repr_html_(self) -> str:
        start, head, *body = self.table._repr_html_().split("<tr>")
        titled = self._under_titles(body, '<td colspan="7"><b>{}</b></td></tr>')
        return "<tr>".join([start, head, *titled]) + f"<p>{self.advice}</p>"

    def _under_titles(self, lines: Sequence[str], title: str) -> Iterator[str]:
        rest = iter(lines)
        for what, rows in self.groups.items():
            if rows:
                yield title.format(what)
                yield from islice(rest, len(rows))


def choose(
    model: Transformer,
    machine: Machine,
    gpus: int,
    batch: int,
    *,
    tp: int | Iterable[int] = (1, 2, 4, 8),
    cp: int | Iterable[int] = 1,
    ep: int | Iterable[int] = 1,
    dp: int | Iterable[int] | None = None,
    microbatch: int | Iterable[int] | None = None,
    schedules: Iterable[str] = SCHEDULES,
    experts: ExpertLayers | None = None,
    state: State | None = None,
    unsure: Unsure | None = None,
) -> Choice:
    """The fastest ways to train `model` on so many `gpus`, `batch` sequences a step.

    Given are the degrees of tensor, context, expert and data parallelism, one or several each; the rest of the GPUs
    are stages. Sought are stages and microbatches, a cut that weighs the head, the fewest layers that compute again
    so that it fits, and the schedule; a pipeline's optimizer is sharded (ZeRO-1), and its ranks wait for sends as
    Megatron-LM's do, where it has the schedule. A layout without stages is the fastest that `fsdp_plan` finds.
    `microbatch` left out is a sequence for pipelines, and whatever is fastest without one.

    Two layouts can't be told apart when the ratio of their steps may be either side of 1 with the machine's numbers
    off by what is `unsure`: what all layouts share, such as FLOP/s, doesn't count there.

    Raises ValueError for experts that a model doesn't have, and where no layout divides the model, the batch and the
    GPUs: it says why not.

    >>> from pplab import Link
    >>> node = Machine(8, Link(5e-6, 450e9), Link(10e-6, 50e9), flops=400e12, memory=80e9)
    >>> found = choose(Transformer(32, 4096, 4096, heads=32, vocabulary=128000), node, 8, batch=64)
    >>> found.best.plan.layout, len(found.equal)
    (Layout(tp=1, pp=1, dp=8, order='tp-dp-pp', cp=1), 4)
    """
    state, unsure, gpus = state or State(), unsure or Unsure(), positive_int("gpus", gpus)
    expect(Unsure, unsure=unsure)
    found, refused = [], Counter[str]()
    ways = _ways(model, machine, gpus, batch, (tp, cp, ep, dp), microbatch, schedules, experts, state)
    fastest = float("inf")
    for estimate, *way in sorted(ways, key=lambda way: way[0]):
        if estimate > _SLACK * fastest:
            break
        try:
            best = _planned(model, machine, batch, state, *way)
        except ValueError as error:
            refused[str(error)] += 1
            continue
        found.append(best)
        if best.memory_bytes <= machine.memory:
            fastest = min(fastest, best.step_s)
    if not found:
        why = max(refused, key=refused.get, default=f"{gpus} GPUs and {batch} sequences don't divide by what is given")
        raise ValueError(f"no layout of {plural(gpus, 'GPU')} can be: {why}")
    found.sort(key=lambda each: (each.memory_bytes > machine.memory, each.step_s))
    once = {(each.layout, each.timeline.schedule.name): each for each in reversed(found)}.values()  # the fastest
    fitting = sorted((each for each in once if each.memory_bytes <= machine.memory), key=lambda each: each.step_s)
    fitting[:_FINALISTS] = map(_polished, fitting[:_FINALISTS])
    fitting.sort(key=lambda each: each.step_s)
    large = sorted((each for each in once if each.memory_bytes > machine.memory), key=lambda each: each.memory_bytes)
    whole = next((each for each in fitting[_SHOWN:] if each.zero is not None), None)
    rows = _compared([*fitting[:_SHOWN], *([whole] if whole else [])], unsure)
    return Choice(gpus, tuple(rows), tuple(_compared(large[:3], unsure)))


def _ways(
    model: Transformer,
    machine: Machine,
    gpus: int,
    batch: int,
    degrees: Sequence[int | Iterable[int] | None],
    microbatches: int | Iterable[int] | None,
    schedules: Iterable[str],
    experts: ExpertLayers | None,
    state: State,
) -> Iterator[tuple]:
    """Every way to divide the GPUs and the batch: an estimate of its step, and what it is."""
    expect(Transformer, model=model)
    expect(Machine, machine=machine)
    tps, cps, eps, dps = (None if each is None else _several(each) for each in degrees)
    passes = 2 + bool(state.gradients)  # of frozen weights two
    work = passes * batch * (model.num_layers + _head(model)) * model.layer_flops(1) / machine.flops / gpus
    if not experts and eps != (1,):
        raise ValueError(f"ep {', '.join(map(str, eps))}: this model has no experts to spread, so leave ep out")
    for tp, cp, ep in product(tps, cps, eps):
        for pp in range(1, min(model.num_layers, gpus) + 1):
            dp, rest = divmod(gpus, tp * cp * pp)
            if rest or (dps is not None and dp not in dps) or (cp * dp) % ep or (experts and experts.count % ep):
                continue
            spread, layout = replace(experts, gpus=ep) if experts else None, Layout(tp, pp, dp, cp=cp)
            link = machine.ring_link(layout.groups("tp"))
            for b in (1,) if microbatches is None or pp == 1 else _several(microbatches):
                M, rest = divmod(batch, dp * b)
                if rest or not M:
                    continue
                sums = 4 * all_reduce(tp, model.boundary_bytes(b) / cp, link)
                busy = work + M * model.num_layers / pp * sums
                for name, V in _stages(schedules, pp, M, model.num_layers):
                    ramps = (pp - 1) / M / (V if name != "ZBVZeroBubble" else 3)
                    yield busy * (1 + ramps), layout, b, name, V, spread


def _stages(schedules: Iterable[str], pp: int, M: int, num_layers: int) -> Iterator[tuple[str, int]]:
    """The schedules that can have so many ranks and microbatches, with their stages per rank."""
    if pp == 1:
        yield "no pipeline", 1
        return
    for name in schedules:
        if find(name).name == "Interleaved1F1B":
            if M % pp == 0:
                yield from (("Interleaved1F1B", V) for V in range(2, _MOST_STAGES + 1) if pp * V <= num_layers)
        elif find(name).placement != "V":
            yield name, 1
        elif 2 * pp <= num_layers:
            yield name, 2


def _planned(
    model: Transformer,
    machine: Machine,
    batch: int,
    state: State,
    layout: Layout,
    b: int,
    name: str,
    V: int,
    experts: ExpertLayers | None,
) -> Plan:
    """The plan with the better of an even cut and one that weighs the head, recomputing as little as fits."""
    if layout.pp == 1:
        return fsdp_plan(model, machine, layout, batch, state=state, experts=experts)
    options = {"stages_per_rank": V} if name == "Interleaved1F1B" else {}
    rows = build(name, num_ranks=layout.pp, num_microbatches=batch // layout.dp // b, **options)
    cuts = {_cut(model.num_layers, rows, _head(model))}
    if model.num_layers % rows.num_stages == 0:
        cuts.add((model.num_layers // rows.num_stages,) * rows.num_stages)

    def of(cut: Sequence[int], again: bool | Sequence[int] = False) -> Plan:
        how = {"schedule": rows, "cut": cut, "recompute": again, "state": state}
        return plan(model, machine, layout, batch, b, experts=experts, shard_optimizer=True, **how)

    return min(
        (_fitted(of, cut, machine.memory) for cut in cuts), key=lambda p: (p.memory_bytes > machine.memory, p.step_s)
    )


def _fitted(of: Callable[..., Plan], cut: Sequence[int], memory: float) -> Plan:
    """The plan that fits with the fewest layers that compute again on every rank; with all of them where none fits."""
    found = of(cut)
    if found.memory_bytes <= memory or (all_of_them := of(cut, True)).memory_bytes > memory:
        return found if found.memory_bytes <= memory else all_of_them
    rows, again = found.timeline.schedule, [0] * len(cut)
    while found.memory_bytes > memory:
        for rank, (held, least) in enumerate(zip(found.held_bytes, all_of_them.held_bytes, strict=True)):
            stages = rows.stages_of(rank)
            left = sum(cut[s] - again[s] for s in stages)
            if held > memory:
                more = max(1, int(left * (held - memory) / max(held - least, 1)))
                for _ in range(min(more, left)):
                    again[max(stages, key=lambda s: cut[s] - again[s])] += 1
        found = of(cut, again)
    return found


def _cut(num_layers: int, rows: Schedule, head: float) -> tuple[int, ...]:
    """The layers of stages by which ranks have equal work, the head's in the last stage; later ranks get the rest."""
    cut, home = [1] * rows.num_stages, [rows.placement[s] for s in range(rows.num_stages)]
    load = [float(len(rows.stages_of(rank))) for rank in range(rows.num_ranks)]
    load[home[-1]] += head
    for _ in range(num_layers - rows.num_stages):
        rank = min(reversed(range(rows.num_ranks)), key=lambda r: load[r])
        stage = min(rows.stages_of(rank), key=lambda s: cut[s] + head * (s == rows.num_stages - 1))
        cut[stage] += 1
        load[rank] += 1
    return tuple(cut)


def _polished(found: Plan) -> Plan:
    """The plan with single layers moved from its busiest rank to its least busy one, as long as that helps."""
    rows, busy = found.timeline.schedule, found.timeline.busy
    sources, targets = (rows.stages_of(each(range(rows.num_ranks), key=busy.__getitem__)) for each in (max, min))
    for source, target in product(sources, targets):
        cut, again = list(found.layers), list(found.recomputed)
        if source == target or cut[source] < 2:
            continue
        cut[source] -= 1
        cut[target] += 1
        again[source] = min(again[source], cut[source])
        moved = _planned_again(found, found.machine, cut, again)
        if moved.memory_bytes <= found.machine.memory and moved.step_s < found.step_s * (1 - 1e-9):
            return _polished(moved)
    return found


def _planned_again(
    found: Plan,
    machine: Machine,
    cut: Sequence[int] | None = None,
    recompute: Sequence[int] | None = None,
    sends: str = SENDS[0],
) -> Plan:
    """The same plan on another machine, with another cut, or with other sends."""
    if found.zero is not None:
        how = {"zero": found.zero, "state": found.state, "experts": found.experts}
        return fsdp_plan(found.model, machine, found.layout, found.batch, found.microbatch, **how)
    return plan(
        found.model,
        machine,
        found.layout,
        found.batch,
        found.microbatch,
        schedule=found.timeline.schedule,
        cut=cut or found.layers,
        recompute=found.recomputed if recompute is None else recompute,
        state=found.state,
        shard_optimizer=found.shard_optimizer,
        sends=sends,
        experts=found.experts,
    )


def _as_sent(found: Plan) -> Plan:
    """The plan with the sends of Megatron-LM, where it has the schedule."""
    sends = sends_in("Megatron-LM", found.timeline.schedule)
    return found if sends == found.sends else _planned_again(found, found.machine, sends=sends)


def _compared(plans: Sequence[Plan], unsure: Unsure) -> list[Candidate]:
    """The plans with their intervals, fastest first, and by how much each is slower than the first at least."""
    sent = sorted(((_as_sent(each), each) for each in plans), key=lambda pair: pair[0].step_s)
    steps = [[each.step_s, *(_planned_again(each, m).step_s for m in unsure.machines(each))] for _, each in sent]
    found = []
    for (each, bare), mine in zip(sent, steps, strict=True):
        slow, fast, halves = (other / bare.step_s - 1 for other in mine[1:])
        usual = hypot(unsure.flops, unsure.model, max(abs(slow), abs(fast)))
        low, high = each.step_s * (1 - usual), each.step_s * (1 + hypot(usual, halves))
        slower = unsure.slower(each.step_s / sent[0][0].step_s, mine, steps[0])
        found.append(Candidate(each, low, high, slower))
    return sorted(found, key=_preferred)


def _preferred(row: Candidate) -> tuple:
    """Those that can't be told apart first, by the GPUs of a replica, then tensor ranks: of 65 published sets that way
    chose best (book/published.md). It fails for ZeRO-3, whose gathers may not hide as assumed: behind the others."""
    layout = row.plan.layout
    if row.slower:
        return 1, row.plan.step_s
    return 0, row.plan.zero == 3, layout.num_ranks // layout.dp, layout.tp, row.plan.step_s


def _head(model: Transformer) -> float:
    """Its forward, in layers'."""
    return model.head_flops(1) / model.layer_flops(1)


def _several(given: int | Iterable[int]) -> tuple[int, ...]:
    return tuple(positive_int("a degree", each) for each in (given if isinstance(given, Iterable) else [given]))


def _short(layers: Iterable[int]) -> str:
    """1, 2, 2, 2, 3 as 1+3*2+3."""
    runs = [(n, len([*same])) for n, same in groupby(layers)]
    return "+".join(f"{count}*{n}" if count > 1 else str(n) for n, count in runs)
