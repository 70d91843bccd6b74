"""The contiguous split against every split there is, its ties, its caps, its errors; models cut by hand."""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations
from math import inf

import pytest

from pplab import lab


def every_split(num_layers: int, num_stages: int):
    for cuts in combinations(range(1, num_layers), num_stages - 1):
        bounds = (0, *cuts, num_layers)
        yield tuple(range(a, b) for a, b in zip(bounds, bounds[1:], strict=False))


def brute_force(cost, num_layers: int, num_stages: int) -> tuple[int, ...] | None:
    """The best split by looking at all: least largest cost, least squares, then fewest layers early."""

    def key(split):
        found = [cost(stage, layers) for stage, layers in enumerate(split)]
        return max(found), sum(c * c for c in found), tuple(map(len, split))

    best = min(map(key, every_split(num_layers, num_stages)))
    return None if best[0] == inf else best[2]


def test_it_is_the_best_of_all_splits(rng):
    for _ in range(300):
        n = rng.randint(1, 9)
        stages = rng.randint(1, n)
        costs = [rng.randint(0, 12) for _ in range(n)]
        assert lab.partition(costs, stages) == brute_force(
            lambda _, layers, costs=costs: sum(costs[layers.start : layers.stop]), n, stages
        )


def test_it_is_the_best_of_all_splits_that_fit(rng):
    impossible = 0
    for _ in range(300):
        n = rng.randint(2, 8)
        stages = rng.randint(1, n)
        costs, kept, fixed = ([rng.randint(0, 9) for _ in range(n)] for _ in range(3))
        flying = sorted((rng.randint(1, 6) for _ in range(stages)), reverse=True)
        cap = [rng.randint(10, 70) for _ in range(stages)] if rng.random() < 0.5 else rng.randint(10, 70)
        caps = cap if isinstance(cap, list) else [cap] * stages

        def cost(stage, layers, costs=costs, kept=kept, fixed=fixed, flying=flying, caps=caps):
            part = slice(layers.start, layers.stop)
            fits = flying[stage] * sum(kept[part]) + sum(fixed[part]) <= caps[stage]
            return sum(costs[part]) if fits else inf

        options = {"activations": kept, "parameters": fixed, "in_flight": flying}
        expected = brute_force(cost, n, stages)
        if expected is None:
            impossible += 1
            with pytest.raises(ValueError, match="no contiguous split into .* the least that one needs is"):
                lab.partition(costs, stages, cap=cap, **options)
        else:
            assert lab.partition(costs, stages, cap=cap, **options) == expected
            assert lab.partition(cost, stages, num_layers=n) == expected
    assert 30 < impossible < 270


def test_the_least_cap_that_is_named_is_enough_and_nothing_less_is():
    given = {"activations": [3, 1, 4, 1, 5], "in_flight": [3, 2, 1]}
    with pytest.raises(ValueError, match="the least that one needs is 10. Raise the cap"):
        lab.partition([1] * 5, 3, cap=5, **given)
    assert lab.partition([1] * 5, 3, cap=10, **given) == (1, 2, 2)
    with pytest.raises(ValueError):
        lab.partition([1] * 5, 3, cap=9.9, **given)


def test_ties_go_to_the_most_even_split_and_then_to_light_first_stages():
    assert lab.partition([10] * 4 + [20] * 4, 4) == (3, 2, 1, 2)
    assert lab.partition([4, 1, 1, 1, 1], 3) == (1, 2, 2)
    assert lab.partition([1, 1, 1], 2) == (1, 2)
    assert lab.partition([0.1] * 6, 3) == (2, 2, 2)


@pytest.mark.parametrize(
    ("arguments", "options", "says"),
    [
        (([1, 2], 3), {}, "2 layers can't make 3 stages: every stage needs a layer. Use at most 2"),
        (([1, 2], 0), {}, "num_stages must be an integer of at least 1, got 0"),
        (([], 1), {}, "costs must have one value for each of at least 1 layers"),
        (([1, -2], 1), {}, "costs must be a number from 0 to 1e+100, got -2"),
        (([1, 2], 2), {"num_layers": 3}, "num_layers is 3, and costs has 2 values"),
        (([1, 2], 2), {"activations": [1, 1]}, "bound nothing without a cap"),
        (([1, 2], 2), {"cap": 3}, "a cap needs to know what layers hold"),
        (([1, 2], 2), {"cap": 3, "activations": [1]}, "activations must have one value for each of 2 layers"),
        (([1, 2], 2), {"cap": [3], "activations": [1, 1]}, "cap has 1 values for 2 stages"),
        (([1, 2], 2), {"cap": 3, "activations": [1, 1], "in_flight": (1, 2, 3)}, "in_flight has 3 values for 2 stages"),
        (([1, 2], 2), {"cap": 0, "activations": [1, 1]}, "no contiguous split"),
        ((max, 2), {}, "say how many layers there are with num_layers"),
        ((max, 2), {"num_layers": 4, "cap": 3}, "let it return infinity for what doesn't fit"),
        ((lambda stage, layers: inf, 2), {"num_layers": 4}, "every contiguous split costs infinity"),
    ],
)
def test_what_cannot_be_split_is_said(arguments, options, says):
    with pytest.raises(ValueError) as error:
        lab.partition(*arguments, **options)
    assert says in str(error.value)


@pytest.mark.slow
def test_a_gpt_is_cut_where_it_is_told():
    from pplab.lab import models

    gpt = models.gpt(batch_size=2, num_layers=5, width=16, num_heads=2, context=12, source="sample", cut=(0, 3, 2, 0))
    stages = [gpt.build_stage(stage, 4) for stage in range(4)]
    assert [len(stage.blocks) for stage in stages] == [0, 3, 2, 0]
    assert [stage.embedding is not None for stage in stages] == [True, False, False, False]
    assert [stage.head is not None for stage in stages] == [False, False, False, True]
    assert [n for s in stages for n, _ in s.named_parameters()] == [n for n, _ in gpt.build_whole().named_parameters()]
    assert "cut 0+3+2+0" in gpt.name
    assert [len(replace(gpt, cut=None).build_stage(s, 2).blocks) for s in range(2)] == [3, 2]


@pytest.mark.slow
def test_distilbert_and_a_sequential_are_cut_where_they_are_told():
    import torch
    from torch import nn

    from pplab.lab import models

    bert = models.distilbert(batch_size=2, length=8, checkpoint="small", source="sample", cut=(1, 7, 0))
    batch, x = bert.batch(0), None
    for stage in range(3):
        x = bert.build_stage(stage, 3)(*(batch.inputs if x is None else (x,)), **batch.context)
    torch.testing.assert_close(x, bert.build_whole()(*batch.inputs, **batch.context).logits, rtol=0, atol=1e-6)

    layers = nn.Sequential(*(nn.Linear(3, 3) for _ in range(4)))
    assert [len(part) for part in models.cut(layers, 2, (3, 1))] == [3, 1]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("split", "num_stages", "says"),
    [
        ((4, 4), 4, "cut=(4, 4) is for 2 stages, and the schedule has 4"),
        ((4, 3), 2, "cut=(4, 3) places 7 layers, and the model has 8"),
        ((4, 0, 4), 3, "stage 1 of cut=(4, 0, 4) would be empty"),
        ((9, -1), 2, "cut must be whole numbers of at least 0, got (9, -1)"),
        ((4, 4.0), 2, "cut must be whole numbers of at least 0"),
    ],
)
def test_a_cut_that_does_not_fit_is_said(split, num_stages, says):
    from pplab.lab import models

    gpt = models.gpt(batch_size=2, width=16, num_heads=2, context=12, source="sample", cut=split)
    with pytest.raises(ValueError) as error:
        gpt.check(num_stages)
    assert says in str(error.value)


def test_bars_are_described_and_carry_their_sums():
    rows = {"stage 0": [("layer", 1), ("layer", 2)], "stage 1": [("layer", 1), ("head", 4)]}
    ax = lab.bars(rows, title="two stages", unit="ms", mark="mean")
    assert ax.get_label() == "two stages: stage 0 3, stage 1 5 ms; mean 4"
    assert [text.get_text().strip() for text in ax.texts] == ["3", "5", "mean 4"]
    assert [text.get_text() for text in ax.get_legend().get_texts()] == ["layer", "head"]
    assert lab.bars({"rank 0": [("all", 2)]}, title="one", unit="MB").get_legend() is None
