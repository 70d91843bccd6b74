"""How long a pair takes at best: beside all orders of its pieces, a solver, and the order that Megatron-LM gives."""

from __future__ import annotations

from itertools import combinations

import pytest
from ortools.sat.python import cp_model

from pplab import lab
from pplab.actions import B, F, I, W
from pplab_course.pictures import streams

KINDS = ((F, B), (F, I), (I, W), (F, W), (B, W), (B, I), (F, F))


def in_all_orders(one, other):
    """The least of all orders in which the pieces can be started; each starts when its stream and its half are free."""
    best = float("inf")
    for places in combinations(range(len(one) + len(other)), len(one)):
        free, done, rest = {True: 0, False: 0}, [0, 0], [iter(one), iter(other)]
        for place in range(len(one) + len(other)):
            half = place not in places
            _, computes, length = next(rest[half])
            done[half] = free[computes] = max(free[computes], done[half]) + length
        best = min(best, max(done))
    return best


def solved(one, other):
    model, most = cp_model.CpModel(), sum(length for *_, length in (*one, *other))
    last, uses = model.new_int_var(0, most, ""), {True: [], False: []}
    for half in (one, other):
        before = 0
        for _, computes, length in half:
            start = model.new_int_var(0, most, "")
            uses[computes].append(model.new_fixed_size_interval_var(start, length, ""))
            model.add(start >= before)
            before = start + length
        model.add(last >= before)
    for intervals in uses.values():
        model.add_no_overlap(intervals)
    model.minimize(last)
    solver = cp_model.CpSolver()
    solver.parameters.num_workers, solver.parameters.max_time_in_seconds = 1, 60
    assert solver.solve(model) == cp_model.OPTIMAL
    return round(solver.objective_value)


def bound(p, layers):
    """(pair), of a forward and a backward of as many layers."""
    compute, network = p.attention + p.experts, p.dispatch + p.combine
    return layers * max(2 * compute + network, 3 * compute, 2 * network)


def test_a_pair_at_best_is_the_best_of_all_orders(rng):
    for _ in range(25):
        p = lab.Pieces(*(rng.randint(1, 6) for _ in range(4)))
        (a, b), n, m = rng.choice(KINDS), rng.randint(1, 2), rng.randint(1, 2)
        one, other = (a, n), (b, m)
        assert p.at_best(one, other) == p.at_best(other, one) == in_all_orders(p.of(*one), p.of(*other)), (
            p,
            one,
            other,
        )


def test_a_pair_at_best_is_what_a_solver_proves(rng):
    """With layers that run again and a head, and more layers than all orders could be tried of."""
    for _ in range(12):
        p = lab.Pieces(*(rng.randint(1, 9) for _ in range(4)))
        (a, b), n, m = rng.choice(KINDS), rng.randint(1, 4), rng.randint(1, 4)
        one, other = (a, n, rng.randint(0, n), rng.randint(0, 9)), (b, m, rng.randint(0, m), rng.randint(0, 9))
        assert p.at_best(one, other) == solved(p.of(*one), p.of(*other)), (p, one, other)


def test_when_the_bound_is_met(rng):
    assert lab.Pieces(1, 3, 4, 3).at_best((F, 1), (B, 1)) == 18 > bound(lab.Pieces(1, 3, 4, 3), 1) == 16
    above = 0
    for _ in range(150):
        attention, network, experts, layers = (rng.randint(1, 9) for _ in range(4))
        even, p = lab.Pieces(*[attention, network] * 2), lab.Pieces(attention, network, experts, network)
        assert even.at_best((F, layers), (B, layers)) == bound(even, layers)
        found, least = p.at_best((F, layers), (B, layers)), bound(p, layers)
        assert found >= least
        above += found > least
    assert 30 < above < 120  # where pieces differ, it's above in some and met in others


def test_megatrons_order_is_the_best_where_both_all_to_alls_take_equally_long(rng):
    for _ in range(150):
        attention, network, experts, layers = (rng.randint(1, 9) for _ in range(4))
        took, delayed = (
            max(start + length for *_, start, length in streams(order, attention, network, experts, layers))
            for order in ("a pair", "--delay-wgrad-compute")
        )
        p = lab.Pieces(attention, network, experts, network)
        assert delayed <= took == p.at_best((F, layers), (B, layers)), p


@pytest.mark.parametrize(
    ("half", "pieces"),
    [
        ((F, 2), "AdEcAdEc"),
        ((F, 1, 0, 5), "AdEch"),
        ((I, 2, 1), "cEdA AdEc cEdA"),
        ((B, 1, 1, 5), "h AdEc cEdA"),
        ((W, 2, 1, 5), "h EA EA"),
    ],
)
def test_pieces_of_halves(half, pieces):
    """A forward runs again before its layer's backward; a head comes first in a backward."""
    made = lab.Pieces(1, 2, 3, 4).of(*half)
    letters = {"attention": "A", "dispatch": "d", "experts": "E", "combine": "c", "head": "h"}
    assert "".join(letters[name] for name, *_ in made) == pieces.replace(" ", "")
    assert all(computes == (name not in ("dispatch", "combine")) for name, computes, _ in made)


@pytest.mark.parametrize("layers", [-1, 1.5, "2"])
def test_a_half_has_a_number_of_layers(layers):
    with pytest.raises(ValueError, match="layers of a half must be an integer of at least 0, got"):
        lab.Pieces().at_best((F, 1), (B, layers))


@pytest.mark.parametrize("half", [(B, 2, 3), (I, 2, -1)])
def test_layers_that_cannot_be_are_refused(half):
    with pytest.raises(ValueError, match="some of a half's layers run again, got .* of .*: give 0 to all of them"):
        lab.Pieces().at_best((F, 1), half)
