"""Layouts: who communicates with whom, what it costs, and links fitted to measurements."""

from __future__ import annotations

from itertools import permutations

import pytest

import pplab as pp
from pplab import formulas
from pplab.layout import AXES, Layout, Machine, Transformer, best, dp_degree, layouts, plan

MODEL = Transformer(num_layers=8, width=1024, sequence=512)
FAST, SLOW = pp.Link(1e-6, 100e9), pp.Link(1e-5, 10e9)
MACHINE = Machine(4, FAST, SLOW, flops=1e14, memory=80e9)


@pytest.mark.parametrize("order", ["-".join(axes) for axes in permutations(AXES)])
def test_groups_cut_the_ranks_along_each_axis(order):
    layout = Layout(tp=2, pp=3, dp=4, order=order)
    assert len({tuple(layout.place(rank).items()) for rank in range(24)}) == 24
    for axis in AXES:
        groups = layout.groups(axis)
        assert sorted(rank for group in groups for rank in group) == list(range(24))
        for group in groups:
            places = [layout.place(rank) for rank in group]
            assert [place.pop(axis) for place in places] == list(range(getattr(layout, axis)))
            assert all(place == places[0] for place in places)
    first = order.split("-")[0]
    assert layout.groups(first)[0] == tuple(range(getattr(layout, first)))


def test_megatrons_default_keeps_tensors_inside_and_the_pipeline_outside():
    layout = Layout(tp=8, pp=4, dp=2)
    assert [axis for axis in AXES if layout.crosses(axis, 8)] == ["dp", "pp"]
    assert layout.groups("pp")[0] == (0, 16, 32, 48) and layout.groups("dp")[0] == (0, 8)
    inverted = Layout(tp=8, pp=4, dp=2, order="pp-dp-tp")
    assert [axis for axis in AXES if inverted.crosses(axis, 8)] == ["tp"]


def test_replicate_is_the_layout_with_the_pipeline_nearest():
    layout = Layout(pp=4, dp=2, order="pp-dp-tp")
    assert layout.groups("pp") == pp.replicate(pp.build("1F1B", num_ranks=4, num_microbatches=4), 2).replicas


def test_the_data_parallel_degree_is_what_is_left():
    assert (dp_degree(512, 8, 4), dp_degree(32, 8, 2)) == (16, 2)
    with pytest.raises(ValueError, match="500 ranks don't divide into replicas of 8 x 4 = 32"):
        dp_degree(500, 8, 4)
    found = list(layouts(16))
    assert all(each.num_ranks == 16 for each in found) and len(set(found)) == len(found) == 15


def test_a_plan_without_communication_is_the_schedules_closed_form():
    free = Machine(4, pp.Link(), pp.Link(), flops=1e14, memory=80e9)
    found = plan(MODEL, free, Layout(tp=2, pp=4, dp=2), batch=32)
    forward = 2 * MODEL.layer_flops(1) / 2 / 1e14
    assert found.timeline.makespan == pytest.approx(formulas.floor_makespan(4, 16, forward, 2 * forward))
    assert found.step_s == found.timeline.makespan and found.tp_s == found.dp_s == 0
    assert found.compute_s == pytest.approx(16 * 3 * forward)


def test_what_a_plan_sends():
    found = plan(MODEL, MACHINE, Layout(tp=2, pp=4, dp=2), batch=32, microbatch=2)
    boundary = 2 * 512 * 1024 * 2
    assert MODEL.boundary_bytes(2) == boundary
    assert found.sent_bytes["pp"] == 8 * 2 * boundary / 2  # 8 microbatches, one each way, half per tensor rank
    assert found.sent_bytes["tp"] == 8 * 2 * 4 * 2 * (1 / 2) * boundary
    assert found.sent_bytes["dp"] == 2 * (1 / 2) * 2 * 12 * 1024**2 / 2 * 2
    all_reduce = formulas.ring_all_reduce_time(2, boundary, FAST.latency, FAST.bandwidth)
    assert found.tp_s == pytest.approx(8 * 2 * 4 * all_reduce)
    alone = plan(MODEL, MACHINE, Layout(), batch=4)
    assert set(alone.sent_bytes.values()) == {0} and alone.tp_s == alone.dp_s == 0
    assert alone.memory_bytes == 8 * 12 * 1024**2 * 16 + 34 * 512 * 1024 * 8
    sharded = plan(MODEL, MACHINE, Layout(dp=4), batch=4, shard_optimizer=True)
    assert sharded.memory_bytes == 8 * 12 * 1024**2 * 7 + 34 * 512 * 1024 * 8


def test_tensor_ranks_on_several_nodes_are_slower():
    usual, inverted = (plan(MODEL, MACHINE, Layout(4, 4, 1, order), 16) for order in ("tp-dp-pp", "pp-dp-tp"))
    assert usual.tp_s < inverted.tp_s / 5 and usual.step_s < inverted.step_s
    assert usual.compute_s == inverted.compute_s and usual.sent_bytes == inverted.sent_bytes


def test_the_best_plan_fits():
    plans = [plan(MODEL, MACHINE, layout, 64) for layout in layouts(8) if layout.pp <= 8]
    roomy, tight = best(plans, 80e9), best(plans, 0.4e9)
    assert roomy.step_s == min(each.step_s for each in plans) and tight.memory_bytes <= 0.4e9
    assert tight.step_s >= roomy.step_s
    with pytest.raises(ValueError, match="no layout fits in 1e\\+06 bytes"):
        best(plans, 1e6)


@pytest.mark.parametrize(
    ("layout", "batch", "message"),
    [
        (Layout(dp=3), 32, "a batch of 32 doesn't divide into 3 replicas"),
        (Layout(pp=3), 32, "8 layers don't divide into 3 stages"),
        (Layout(tp=3), 32, "width 1024 doesn't divide into 3 parts"),
        (Layout(), 0, "a batch of 0 doesn't divide"),
    ],
)
def test_what_does_not_divide_is_refused(layout, batch, message):
    with pytest.raises(ValueError, match=message):
        plan(MODEL, MACHINE, layout, batch)


def test_a_bad_layout_is_refused():
    with pytest.raises(ValueError, match="tp must be at least 1"):
        Layout(tp=0)
    with pytest.raises(ValueError, match="order must name each of tp, dp and pp once"):
        Layout(order="tp-pp")
    with pytest.raises(ValueError, match="axis must be tp, dp or pp, got 'ep'"):
        Layout().groups("ep")


def test_the_ring_formulas_are_those_of_a_ring():
    """Every rank sends a part to its neighbour, all at once, n-1 rounds to add up and n-1 to spread."""
    for n in (1, 2, 3, 8):
        held = [[{(rank, part)} for part in range(n)] for rank in range(n)]
        rounds = 0
        for phase in range(2):
            for step in range(n - 1):
                sent = [((rank - step + phase) % n, held[rank][(rank - step + phase) % n]) for rank in range(n)]
                for rank, (part, terms) in enumerate(sent):
                    held[(rank + 1) % n][part] = held[(rank + 1) % n][part] | terms
                rounds += 1
        assert all(len(part) == n for row in held for part in row)
        assert formulas.ring_all_reduce_time(n, 12.0, 0.5, 4.0) == pytest.approx(rounds * (0.5 + 12 / n / 4))


def test_a_line_is_found_in_times():
    from pplab.runtime.probe import fit_link

    link = fit_link({size: 0.05 + size / 2e6 for size in (64, 4096, 2**20)})
    assert link.latency == pytest.approx(0.05) and link.bandwidth == pytest.approx(2e6)
    assert fit_link({1: 0.5, 1000: 0.4}).bandwidth == float("inf")
    with pytest.raises(ValueError, match="at least two sizes, got 1"):
        fit_link({1: 1.0})


@pytest.mark.slow
def test_links_and_reductions_are_measured():
    from pplab.runtime import Pool
    from pplab.runtime.probe import all_reduce_times, measure_link

    with Pool(2, device="cpu") as pool:
        link = measure_link(pool, sizes=(64, 2**20), count=5)
        small, large = (min(pool.run(all_reduce_times, size, 5)[0]) for size in (4, 2**22))
    assert 0 < link.latency < 100 and 1e3 < link.bandwidth
    assert 0 < small < large


def test_a_small_layout_is_drawn_with_what_it_sends():
    import matplotlib

    matplotlib.use("Agg")
    from pplab import plot

    ax = plot.ranks(plan(MODEL, MACHINE, Layout(2, 2, 2), 16), ranks_per_node=4)
    assert [t.get_text() for t in ax.texts] == [*map(str, range(8)), "node 0", "node 1"]
    assert len(ax.lines) == 12 and "2 x 2 x 2" in plot.alternative_text(ax.figure)
    assert [t.get_text().split(":")[0] for t in ax.get_legend().get_texts()] == ["tensor", "pipeline", "data"]
    matplotlib.pyplot.close(ax.figure)
    with pytest.raises(ValueError, match="at most 32 ranks"):
        plot.ranks(plan(MODEL, MACHINE, Layout(8, 8, 1), 16), ranks_per_node=4)
