"""Compare the layout that `lab.plan` would have chosen with layouts that others measured, in results/chosen.json.

`python benchmarks/chosen.py` takes the sets of chosen_rows.json, which were read before anything was predicted, and the
groups of results/published.json in which schedules or cuts compete. It takes two minutes on one core. Nothing is
fitted: a GPU reaches half its dense peak, and links have the speed that their makers state.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property
from pathlib import Path
from typing import Any

import records

import pplab as pp
from pplab import lab
from pplab.lab import Kind, Layout, Machine, State, Transformer, formulas
from pplab.runtime.pool import versions

ROOT = Path(__file__).parents[1]
ROWS = ROOT / "benchmarks" / "chosen_rows.json"
PUBLISHED = ROOT / "results" / "published.json"
OUT = ROOT / "results" / "chosen.json"


def machine(peak: float, inside: float, between: float, memory: float, ranks_per_node: int = 8) -> Machine:
    """FLOP/s of half the peak; links in bytes per second, one way."""
    return Machine(ranks_per_node, pp.Link(5e-6, inside), pp.Link(10e-6, between), flops=peak / 2, memory=memory)


MACHINES = {
    "hagemann": machine(312e12, 300e9, 25e9, 80e9),
    "bloom": machine(312e12, 300e9, 6.25e9, 80e9),
    "jz-v100": machine(125e12, 150e9, 12.5e9, 32e9, ranks_per_node=4),
    "simumax": machine(2250e12, 900e9, 50e9, 180e9),
    "bridge": machine(1979e12, 450e9, 50e9, 80e9),
    "narayanan": machine(312e12, 300e9, 25e9, 80e9),
}


@dataclass(frozen=True)
class Replicated(Transformer):
    """Tensor ranks that all keep the norms' inputs and outputs, as without sequence parallelism: 8 bytes per token and
    width, or 10 with dropout (Korthikanti et al. 2022, section 4.2.1)."""

    tensor_ranks: int = 1

    @cached_property
    def kind(self) -> Kind:
        """The kind of all tensor ranks together."""
        attends, mlp = super().kind.parts
        more = (self.tensor_ranks - 1) * self.width * (4 * self.bytes_each + (0 if self.gated else 2))
        return Kind("layer", (replace(attends, masks=attends.masks + more), mlp))


@dataclass(frozen=True)
class Candidate:
    """A layout as it was published."""

    tp: int
    pp: int
    dp: int
    microbatch: int = 1
    recompute: bool = False
    cp: int = 1
    zero3: bool = False

    @property
    def per_pipeline(self) -> int:
        """The number of GPUs that hold the model once."""
        return self.tp * self.pp * self.cp


@dataclass(frozen=True)
class Asked:
    """A set, with what its layouts share."""

    name: str
    source: str
    batch: int
    model: Transformer
    machine: Machine
    state: State
    stages_per_rank: int = 1
    ends_lack_a_layer: bool = False


def read() -> list[tuple[Asked, dict[Candidate, float | None]]]:
    """The sets, and for every layout what was measured (the mean, if twice), or None if it was out of memory."""
    found = []
    for one in json.loads(ROWS.read_text())["sets"]:
        hardware = replace(MACHINES[one["source"]], memory=one.get("memory", MACHINES[one["source"]].memory))
        kind = (
            Replicated
            if one.get("sequence_parallel") is False or one["source"] in ("bloom", "jz-v100")
            else Transformer
        )
        asked = Asked(
            one["name"],
            one["source"],
            one["batch"],
            kind(**one["model"]),
            hardware,
            State(*one.get("state", (2, 2, 12))),
            one.get("stages_per_rank", 1),
            one.get("ends_lack_a_layer", False),
        )
        measured: dict[Candidate, list[float | None]] = {}
        for row in one["rows"]:
            values = dict(zip(one["columns"], row, strict=True))
            took = values.pop("measured")
            values.pop(one["columns"][-1])  # its trial, or its quote
            measured.setdefault(Candidate(**values), []).append(took)
        found.append((asked, {c: None if None in each else statistics.mean(each) for c, each in measured.items()}))
    return found


def cut_of(asked: Asked, stages: int) -> tuple[int, ...]:
    """Layers per stage: as even as possible, or as the notes give them."""
    if asked.ends_lack_a_layer:  # embedding and head take a layer's place
        each, rest = divmod(asked.model.num_layers + 2, stages)
        assert not rest, asked
        return (each - 1, *[each] * (stages - 2), each - 1)
    each, rest = divmod(asked.model.num_layers, stages)
    if asked.source == "bloom" and rest:
        return (*[each + 1] * (stages - 1), asked.model.num_layers - (each + 1) * (stages - 1))
    return tuple(each + (stage < rest) for stage in range(stages))


@cache
def predicted(asked: Asked, one: Candidate) -> tuple[float, float]:
    """Seconds of a step, and bytes of the fullest rank."""
    if one.zero3:
        return zero3(asked, one)
    model = asked.model
    if isinstance(model, Replicated):
        model = replace(model, tensor_ranks=one.tp)
    options: dict[str, Any] = {}
    if asked.stages_per_rank > 1:
        options = {"schedule": "Interleaved1F1B", "stages_per_rank": asked.stages_per_rank}
    found = lab.plan(
        model,
        asked.machine,
        Layout(one.tp, one.pp, one.dp, cp=one.cp),
        asked.batch,
        one.microbatch,
        cut=cut_of(asked, one.pp * asked.stages_per_rank),
        recompute=one.recompute,
        state=asked.state,
        shard_optimizer=True,
        **options,
    )
    return found.step_s, found.memory_bytes


def zero3(asked: Asked, one: Candidate) -> tuple[float, float]:
    """The same where all ranks share weights, gradients and optimizer, with gathers and sums during the work."""
    model, has, state = asked.model, asked.machine, asked.state
    passes = asked.batch // (one.dp * one.microbatch)
    flops = model.num_layers * model.layer_flops(one.microbatch) + model.head_flops(one.microbatch)
    again = one.recompute * model.num_layers * model.layer_flops(one.microbatch)
    gather, reduce = (
        formulas.ring_gather_time(one.dp, size * model.parameters, has.between.latency, has.between.bandwidth)
        for size in (state.weights, state.gradients)
    )
    forward, backward = flops / has.flops, (2 * flops + again) / has.flops
    held = state.bytes() * model.parameters / one.dp + 2 * state.weights * model.layer_parameters
    kept = model.boundary_bytes(one.microbatch) if one.recompute else model.layer_bytes(one.microbatch)
    held += model.num_layers * kept + model.layer_bytes(one.microbatch)
    return formulas.sharded_step(passes, forward, backward, gather, reduce), held


def fewest(one: Candidate) -> tuple:
    """The trivial rule: of the layouts that fit, take the fewest GPUs per pipeline, then the smaller tensor degree,
    then the smaller microbatch. It recomputes only where nothing fits otherwise."""
    return one.recompute, one.per_pipeline, one.tp, one.microbatch


def tensor_first(one: Candidate) -> tuple:
    """A second rule: the largest tensor degree, then the fewest stages that fit (Narayanan et al. 2021, section
    3.2)."""
    return one.recompute, -one.tp, one.per_pipeline, one.microbatch


def ranks(values: Sequence[Any]) -> list[float]:
    """From 1 on; equal values share the mean of their ranks."""
    ordered = sorted(values)
    return [(2 * ordered.index(value) + ordered.count(value) + 1) / 2 for value in values]


def correlation(one: Sequence[Any], other: Sequence[Any]) -> float | None:
    """Spearman's rank correlation, from -1 to 1. None for two layouts and where one side's values are all equal."""
    if len(one) < 3 or len(set(one)) == 1 or len(set(other)) == 1:
        return None
    return statistics.correlation(ranks(one), ranks(other))


def taken(order: Iterable[Candidate], measured: dict[Candidate, float | None]) -> dict[str, Any]:
    """Take the layouts in this order until one runs. Returns how many were out of memory, and how much slower than the
    best one the first that ran is."""
    failed, best = 0, min(filter(None, measured.values()))
    for one in order:
        if (took := measured[one]) is not None:
            return {"layout": label(one), "out_of_memory": failed, "regret": round(took / best - 1, 4)}
        failed += 1
    return {"layout": None, "out_of_memory": failed, "regret": None}


def label(one: Candidate) -> str:
    """TP, PP, DP and the other settings, in words."""
    more = [f"CP {one.cp}"] * (one.cp > 1) + ["ZeRO-3"] * one.zero3 + ["all recomputed"] * one.recompute
    return ", ".join([f"TP {one.tp}, PP {one.pp}, DP {one.dp}", f"{one.microbatch} at a time", *more])


UNSURE = lab.Unsure()  # what `lab.choose` takes when it isn't told


def machines(has: Machine) -> list[Machine]:
    """The machine as assumed, with slower links, with faster ones, and with FLOP/s that fall as the tensor degree
    grows."""
    links = [
        replace(
            has,
            inside=pp.Link(has.inside.latency, factor * has.inside.bandwidth),
            between=pp.Link(has.between.latency, factor * has.between.bandwidth),
        )
        for factor in (1 - UNSURE.links, 1 + UNSURE.links)
    ]
    return [has, *links, replace(has, flops_at={2**n: has.flops * (1 - UNSURE.halves) ** n for n in range(7)})]


def slower(steps: Sequence[Sequence[float]]) -> list[float]:
    """By what share each layout is at least slower than the first, as `lab.choose` tells them apart, or 0.

    Each layout has its steps on the four `machines`.
    """
    return [UNSURE.slower(each[0] / steps[0][0], each, steps[0]) for each in steps]


def equal(asked: Asked, ones: Iterable[Candidate]) -> list[Candidate]:
    """Those that can't be told apart from the fastest of them."""
    steps = {one: [predicted(replace(asked, machine=each), one)[0] for each in machines(asked.machine)] for one in ones}
    order = sorted(steps, key=lambda one: steps[one][0])
    apart = slower([steps[one] for one in order])
    return [one for one, share in zip(order, apart, strict=True) if not share]


def regrouped(asked: Asked, ones: Iterable[Candidate]) -> list[Candidate]:
    """From those that can't be told apart from the fastest, take the one with the fewest GPUs per pipeline, then the
    same from the rest, like somebody who has found that it doesn't run."""
    rest, order = [*ones], []
    while rest:
        order.append(min(equal(asked, rest), key=fewest))
        rest.remove(order[-1])
    return order


def judged(asked: Asked, measured: dict[Candidate, float | None]) -> tuple[dict, list[dict]]:
    """A set's row, and a row for each of its layouts."""
    step, held = ({one: predicted(asked, one)[at] for one in measured} for at in range(2))
    memory = {one: held[one] / asked.machine.memory for one in measured}
    layouts = [
        {
            "set": asked.name,
            "layout": label(one),
            "measured": took,
            "plan": float(f"{step[one]:.5g}"),
            "memory": round(memory[one], 3),
        }
        for one, took in measured.items()
    ]
    ran = [one for one, took in measured.items() if took is not None]
    row: dict[str, Any] = {"source": asked.source, "set": asked.name, "measured": len(ran)}
    row["out_of_memory"] = len(measured) - len(ran)
    if len(ran) < 2:
        return row, layouts
    fitting = [one for one in measured if memory[one] <= 1] or [min(measured, key=memory.__getitem__)]
    took = [measured[one] for one in ran]
    both = regrouped(asked, fitting), regrouped(asked, ran)
    ways: dict[str, tuple[Iterable[Candidate], Sequence[Any]]] = {
        "plan": (sorted(fitting, key=step.__getitem__), [step[one] for one in ran]),
        "both": (both[0], [both[1].index(one) for one in ran]),
        "fewest": (sorted(fitting, key=fewest), [fewest(one) for one in ran]),
        "tensor_first": (sorted(fitting, key=tensor_first), [tensor_first(one) for one in ran]),
    }
    for name, (order, said) in ways.items():
        row[name] = taken(order, measured) | {"correlation": correlation(said, took)}
    there = [one for one in fitting if measured[one] is not None]
    group = equal(asked, there)
    row |= {"fitting_and_ran": len(there), "equal": len(group), "best_equal": ran[took.index(min(took))] in group}
    row["worst_equal"] = round(max(measured[one] for one in group) / min(took) - 1, 4)
    row["median_regret"] = round(statistics.median(took) / min(took) - 1, 4)
    return row, layouts


def schedules() -> list[dict]:
    """Sets in which schedules or cuts compete, from the page's other predictions, as ratios to one of them."""
    rows = next(p for p in json.loads(PUBLISHED.read_text())["parts"] if p["name"] == "published")["rows"]
    kinds = {
        "zb-T4-ZB-1p": "ZB-1p",
        "zb-T4-ZB-2p": "ZB-2p",
        "zb-T4-1F1B-I": "1F1B-I",
        "vocab-csv-cut": "moved",
        "torchtitan-405B": "interleaved",
    }
    sets: dict[tuple[str, str], list[tuple[float, float, float]]] = {}
    for row in rows:
        if row["group"] in kinds and row["predicted"] != 1:  # with 32k words the moved cut is the even one
            source = row["group"].split("-")[0]
            name = row["id"].removesuffix(f"-{kinds[row['group']]}")
            formula = row["measured"] * (1 + row["bubble_error"])
            sets.setdefault((source, name), [(1, 1, 1)]).append((row["measured"], row["predicted"], formula))
    found = []
    for (source, name), each in sets.items():
        took, ours, rule = ([1 / row[at] for row in each] for at in range(3))  # times
        row = {"source": source, "set": name, "measured": len(each), "out_of_memory": 0}
        for way, guess in (("plan", ours), ("formula", rule)):
            regret = took[guess.index(min(guess))] / min(took) - 1
            row[way] = {"regret": round(regret, 4), "correlation": correlation([round(g, 6) for g in guess], took)}
        row["median_regret"] = round(statistics.median(took) / min(took) - 1, 4)
        found.append(row)
    return found


def fits(layouts: Sequence[dict], share: float) -> dict[str, Any]:
    """How often a layout was predicted to fit into this share of the memory, and how often it ran."""
    found = {"share": share}
    for name, said, ran in (
        ("fits, ran", True, True),
        ("fits, out of memory", True, False),
        ("doesn't fit, ran", False, True),
        ("doesn't fit, out of memory", False, False),
    ):
        found[name] = sum(
            (each["memory"] <= share) == said and (each["measured"] is not None) == ran for each in layouts
        )
    return found


def scaled(factor: float) -> dict[str, float]:
    """The results with so many times the FLOP/s, without ZeRO-3's sets: each way's mean regret, and in how many sets
    the fastest is among those that can't be told apart."""
    rows = []
    for asked, measured in read():
        moved = replace(asked, machine=replace(asked.machine, flops=factor * asked.machine.flops))
        row, _ = judged(moved, measured) if asked.source != "narayanan" else ({}, [])
        rows += [row] * ("plan" in row)
    means = {way: round(statistics.mean(row[way]["regret"] for row in rows), 4) for way in ("plan", "both", "fewest")}
    return {"flops": factor, **means, "best_equal": sum(row["best_equal"] for row in rows), "sets": len(rows)}


def computed() -> dict[str, list[dict]]:
    """All parts of the recording."""
    pairs = [judged(asked, measured) for asked, measured in read()]
    layouts = [each for _, rows in pairs for each in rows]
    return {
        "sets": [row for row, _ in pairs],
        "schedules": schedules(),
        "fits": [fits(layouts, 1), fits(layouts, 0.8)],
        "layouts": layouts,
    }


def main() -> None:
    started = time.monotonic()
    parts = computed()
    parts["flops"] = [scaled(0.7), scaled(1.4)]
    parts["sources"] = json.loads(ROWS.read_text())["sources"]
    took = round(time.monotonic() - started)
    done = [{"name": name, "state": "done", "seconds": took, "rows": made} for name, made in parts.items()]
    records.write(OUT, done, device="simulated", command="python benchmarks/chosen.py", versions=versions())
    for row in parts["sets"] + parts["schedules"]:
        ways = [row.get(name, {}) for name in ("plan", "both", "fewest", "tensor_first", "formula")]
        print(f"{row['source']:10}{row['set']:70}", *(f"{w.get('regret')}, {w.get('correlation')};" for w in ways if w))
    print(parts["fits"])


if __name__ == "__main__":
    main()
