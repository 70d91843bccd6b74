"""Layouts: who communicates with whom, what it costs, and links fitted to measurements."""

from __future__ import annotations

from dataclasses import replace
from itertools import permutations

import pytest

import pplab as pp
from pplab import builders, lab
from pplab.lab import Layout, Machine, State, Transformer, formulas, layouts, plan
from pplab.lab.planning.layout import AXES
from pplab_course import figures

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
    with pytest.raises(ValueError, match="ranks_per_node must be an integer of at least 1, got 0"):
        layout.crosses("pp", 0)


def test_context_ranks_are_neighbours_right_after_tensor_ranks_unless_the_order_names_them():
    layout = Layout(tp=2, pp=2, dp=2, cp=2)
    assert layout.num_ranks == 16 and layout.place(13) == {"tp": 1, "cp": 0, "dp": 1, "pp": 1}
    first = {axis: layout.groups(axis)[0] for axis in AXES}
    assert first == {"tp": (0, 1), "cp": (0, 2), "dp": (0, 4), "pp": (0, 8)}
    assert layout.groups("cp", "dp") == ((0, 2, 4, 6), (1, 3, 5, 7), (8, 10, 12, 14), (9, 11, 13, 15))
    assert Layout(2, 2, 2, "tp-dp-cp-pp", 2).groups("cp")[0] == (0, 4)
    with pytest.raises(ValueError, match="cp must be an integer of at least 1, got 0"):
        Layout(cp=0)
    with pytest.raises(ValueError, match="order must name .* got 'tp-cp-cp-pp'"):
        Layout(order="tp-cp-cp-pp")


def test_replicate_is_the_layout_with_the_pipeline_nearest():
    layout = Layout(pp=4, dp=2, order="pp-dp-tp")
    assert layout.groups("pp") == lab.replicate(pp.build("1F1B", num_ranks=4, num_microbatches=4), 2).replicas


def test_all_layouts_have_as_many_ranks():
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
    assert found.sent_bytes["dp"] == 2 * (1 / 2) * 2 * 12 * 1024**2 / 2 * 4
    all_reduce = formulas.ring_all_reduce_time(2, boundary, FAST.latency, FAST.bandwidth)
    assert found.tp_s == pytest.approx(8 * 2 * 4 * all_reduce)
    alone = plan(MODEL, MACHINE, Layout(), batch=4)
    assert set(alone.sent_bytes.values()) == {0} and alone.tp_s == alone.dp_s == 0
    assert alone.memory_bytes == 8 * 12 * 1024**2 * 18 + 34 * 512 * 1024 * 8
    sharded = plan(MODEL, MACHINE, Layout(dp=4), batch=4, shard_optimizer=True)
    assert sharded.memory_bytes == 8 * 12 * 1024**2 * 9 + 34 * 512 * 1024 * 8
    assert sharded.sent_bytes["dp"] == 3 / 4 * 8 * 12 * 1024**2 * (4 + 2)
    ways = [formulas.ring_gather_time(4, 8 * 12 * 1024**2 * size, FAST.latency, FAST.bandwidth) for size in (4, 2)]
    assert sharded.dp_s == pytest.approx(sum(ways))
    frozen = plan(MODEL, MACHINE, Layout(dp=4), batch=4, shard_optimizer=True, state=State(2, 0, 0))
    assert frozen.sent_bytes["dp"] == 0


@pytest.mark.parametrize("name", [builder.name for builder in builders.known()])
def test_no_schedule_changes_the_work(name):
    """8 microbatches of 16 layers of 12 C^2 parameters, over four ranks of two GPUs each."""
    model = replace(MODEL, num_layers=16)
    layout, tokens = Layout(tp=2, pp=4), 8 * 512
    forward_s = (2 * 12 * 1024**2 + 2 * 512 * 1024) * tokens * 16 / 8 / 1e14
    found = plan(model, MACHINE, layout, batch=8, schedule=name)
    all_reduce = formulas.ring_all_reduce_time(2, 512 * 1024 * 2, FAST.latency, FAST.bandwidth)
    assert found.compute_s == pytest.approx(3 * forward_s)
    assert found.tp_s == pytest.approx(8 * 4 * 4 * all_reduce)
    assert found.timeline.busy == pytest.approx([found.compute_s + found.tp_s] * 4)
    again = plan(model, MACHINE, layout, batch=8, schedule=name, recompute=True)
    assert again.timeline.busy == pytest.approx([4 * forward_s + 8 * 4 * 6 * all_reduce] * 4)
    assert again.compute_s == pytest.approx(4 * forward_s)
    head = plan(replace(model, vocabulary=5000), MACHINE, layout, batch=8, schedule=name)
    assert sum(head.timeline.busy) - sum(found.timeline.busy) == pytest.approx(3 * 2 * 5000 * 1024 * tokens / 2 / 1e14)


@pytest.mark.parametrize(
    ("name", "M", "held", "copies"),  # stages' activations on the fullest rank, in layers of 16
    [
        ("naive", 8, 4, 1),
        ("GPipe", 8, 8 * 4, 1),
        ("1F1B", 8, 4 * 4, 1),
        ("Interleaved1F1B", 8, 11 * 2, 1),  # 2(P-1) + P + 1 of half the layers
        ("DualPipe", 8, 5 * 4, 2),
        ("DualPipeV", 8, 9 * 2, 1),
    ],
)
def test_what_a_rank_holds(name, M, held, copies):
    model, one = replace(MODEL, num_layers=16), 12 * 1024**2
    found = plan(model, MACHINE, Layout(pp=4), M, schedule=name)
    assert found.memory_bytes == pytest.approx(copies * 4 * one * 18 + held * 34 * 512 * 1024)
    reduced = formulas.ring_all_reduce_time(copies, copies * 4 * one * 4, FAST.latency, FAST.bandwidth)
    assert found.dp_s == pytest.approx(reduced)
    assert found.sent_bytes["dp"] == (copies - 1) * copies * 4 * one * 4


@pytest.mark.parametrize("again", [4, 1, 3])
def test_recomputing_keeps_the_inputs_of_layers(again):
    """Of so many of a stage's four: 2 numbers each, not 34. They run a forward more."""
    model, state, number = replace(MODEL, num_layers=16), 4 * 12 * 1024**2 * 18, 512 * 1024
    recompute, kept = True if again == 4 else [again] * 4, 2 * again + 34 * (4 - again)
    found = plan(model, MACHINE, Layout(pp=4), 8, recompute=recompute)
    assert found.timeline.busy == pytest.approx([8 * (3 * 4 + again) * model.layer_flops(1) / 1e14] * 4)
    each = [state + flying * kept * number + 32 * number for flying in (4, 3, 2, 1)]  # one layer whole in a backward
    assert found.held_bytes == pytest.approx(each) and found.memory_bytes == found.held_bytes[0]
    split = plan(model, MACHINE, Layout(pp=4), 8, recompute=recompute, schedule="ZB-H1")
    deferred = pp.build("ZB-H1", num_ranks=4, num_microbatches=8)
    most = max(inputs * kept + waiting * 4 * 34 for inputs, waiting in _kept(deferred.rows))
    assert split.memory_bytes == state + most * number


def test_context_ranks_by_hand():
    """A sequence of 512 on 4 context ranks, of width 1,024, 8 layers; two replicas of them on nodes of 4."""
    found, alone = (plan(MODEL, MACHINE, Layout(cp=cp, dp=2), 16) for cp in (4, 1))
    tokens, weights = 512 / 4, 12 * 1024**2
    forward = 8 * (2 * weights * tokens + 2 * 512 * tokens * 1024) / 1e14  # a mean token sees half of 512
    message = 1e-6 + 2 * 1024 * tokens * 2 / 100e9  # keys and values, in a node
    beside = 2 * 512 * tokens * 1024 / 1e14 / 4  # of the attention, while one of 4 parts is there
    waits = 8 * 3 * (message - beside)
    assert waits > 0 and found.costs.forward[0] == pytest.approx(forward + waits)
    assert found.costs.backward_input[0] == pytest.approx(forward + 2 * waits)
    assert found.costs.backward_weight[0] == pytest.approx(forward)
    assert (found.cp_s, found.compute_s) == pytest.approx((8 * 3 * waits, 8 * 3 * forward)) and found.ep_s == 0
    assert found.sent_bytes["cp"] == 8 * 8 * 3 * 3 * 2 * 1024 * tokens * 2  # twice in a backward
    assert found.held_bytes[0] == pytest.approx(18 * 8 * weights + 8 * 34 * 1024 * tokens)
    assert found.dp_s == pytest.approx(2 * 7 * (1e-5 + 8 * weights * 4 / 8 / 10e9))  # over all 8, between nodes
    assert alone.cp_s == alone.sent_bytes["cp"] == 0 and alone.costs.forward[0] == pytest.approx(4 * forward)

    long = plan(replace(MODEL, sequence=2**20), MACHINE, Layout(cp=4), 4)
    assert long.cp_s == 0 < long.sent_bytes["cp"]  # beside so much attention
    three, sharded = (plan(MODEL, MACHINE, Layout(cp=4, pp=2, dp=2), 16, shard_optimizer=s) for s in (False, True))
    assert three.memory_bytes - sharded.memory_bytes == pytest.approx(4 * weights * 12 * 7 / 8)
    assert three.sent_bytes["pp"] == 8 * 512 * 1024 * 2 / 4 and three.costs.message == tokens * 1024 * 2
    with pytest.raises(ValueError, match="a sequence of 512 doesn't divide into two parts for each of 3 context ranks"):
        plan(MODEL, MACHINE, Layout(cp=3), 16)


def test_a_plan_keeps_what_was_asked():
    asked = {"cut": [2, 3, 2, 1], "recompute": [0, 2, 0, 0], "shard_optimizer": True}
    found = plan(MODEL, MACHINE, Layout(pp=4, dp=2), 16, 2, **asked)
    assert (found.model, found.machine, found.layout) == (MODEL, MACHINE, Layout(pp=4, dp=2))
    assert (found.layers, found.recomputed) == ((2, 3, 2, 1), (0, 2, 0, 0))
    assert (found.batch, found.microbatch, found.experts, found.shard_optimizer) == (16, 2, None, True)
    assert plan(MODEL, MACHINE, Layout(pp=4), 8, recompute=True).recomputed == (2, 2, 2, 2)


def test_a_plan_takes_a_schedule_of_ones_own():
    rows = pp.build("ZB-H1", num_ranks=4, num_microbatches=8)
    own, named = (plan(MODEL, MACHINE, Layout(pp=4), 8, schedule=s) for s in (pp.Schedule(rows.rows), "ZB-H1"))
    assert own == named and own.timeline.schedule.name == "custom"
    for layout, batch, needs in ((Layout(pp=2), 8, "2 ranks and 8 micro"), (Layout(pp=4), 6, "4 ranks and 6 micro")):
        with pytest.raises(ValueError, match=f"ZB-H1 has 4 ranks and 8 microbatches, and this needs {needs}batches"):
            plan(MODEL, MACHINE, layout, batch, schedule=rows)
    with pytest.raises(ValueError, match="stages_per_rank: options are for a schedule's name, and ZB-H1 is built"):
        plan(MODEL, MACHINE, Layout(pp=4), 8, schedule=rows, stages_per_rank=2)
    with pytest.raises(pp.ScheduleError, match="rank 0 runs 0B0 before 0F0"):
        plan(MODEL, MACHINE, Layout(pp=1), 1, schedule=pp.Schedule([["0B0", "0F0"]]))


def _kept(rows):
    """Per rank and moment: microbatches that wait for I with their inputs, and that have all for I or for W."""
    for row in rows:
        inputs = waiting = 0
        for action in map(str, row):
            inputs += ("F" in action) - ("I" in action or "B" in action)
            if "B" in action:
                yield inputs, waiting + 1
            waiting += "I" in action
            yield inputs, waiting
            waiting -= "W" in action


@pytest.mark.parametrize(
    ("name", "M", "crossings"), [("naive", 1, 2), ("GPipe", 1, 2), ("LoopedBFS", 1, 6), ("V-Min", 1, 4)]
)
def test_every_link_between_nodes_has_its_price(name, M, crossings):
    """Alone in the pipeline, a microbatch waits for each crossing: ranks 1 to 2, and in a loop from 3 to 0 as well."""
    model, free = replace(MODEL, num_layers=16), pp.Link()
    slow = pp.Link(1.0)
    one, two = (plan(model, Machine(n, free, slow, 1e14, 80e9), Layout(pp=4), M, schedule=name) for n in (4, 2))
    assert two.timeline.makespan - one.timeline.makespan == pytest.approx(crossings)


@pytest.mark.parametrize(
    ("name", "per_microbatch"),
    [("1F1B", 2), ("Interleaved1F1B", 4), ("ZBVZeroBubble", 4), ("DualPipe", 2), ("DualPipeV", 4)],
)
def test_what_several_stages_send(name, per_microbatch):
    """A middle rank sends down and up for each of its stages; DualPipe's two see half of the microbatches each."""
    found = plan(replace(MODEL, num_layers=16), MACHINE, Layout(pp=4), 8, schedule=name)
    assert found.sent_bytes["pp"] == 8 * per_microbatch * 512 * 1024 * 2


def test_tensor_ranks_on_several_nodes_are_slower():
    usual, inverted = (plan(MODEL, MACHINE, Layout(4, 4, 1, order), 16) for order in ("tp-dp-pp", "pp-dp-tp"))
    assert usual.tp_s < inverted.tp_s / 5 and usual.step_s < inverted.step_s
    assert usual.compute_s == pytest.approx(inverted.compute_s) and usual.sent_bytes == inverted.sent_bytes


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
    with pytest.raises(ValueError, match="heads 16 doesn't divide into 32 parts"):
        plan(replace(MODEL, heads=16), MACHINE, Layout(tp=32), 32)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"schedule": "Interleaved1F1B", "stages_per_rank": 3}, "8 layers don't divide into 6 stages: give cut"),
        ({"cut": (4, 2, 2)}, "cut must say for each of 2 stages how many of 8 layers it has, got \\(4, 2, 2\\)"),
        ({"cut": (4, 5)}, "cut must say"),
        ({"cut": (9, -1)}, "cut must say"),
        ({"recompute": [5, 0]}, "how many of each stage's 4, 4 layers run .* again, or name modules, got \\[5, 0\\]"),
        ({"recompute": [1]}, "recompute must be True, or say how many"),
        ({"recompute": [-1, 0]}, "recompute must be True"),
        ({"schedule": "DualPipe"}, "DualPipe on 2 ranks needs an even number of microbatches"),
        ({"schedule": "2F2B"}, "unknown schedule '2F2B'"),
        ({"stages_per_rank": 2}, "unknown option of 1F1B 'stages_per_rank'"),
        ({"state": 16}, "state must be a State, got 16"),
        ({"microbatch": 0}, "microbatch must be an integer of at least 1, got 0"),
        ({"model": None}, "model must be a Transformer"),
        ({"machine": "h100"}, "machine must be a Machine, got 'h100'"),
        ({"layout": (1, 2, 1)}, "layout must be a Layout"),
    ],
)
def test_a_plan_says_what_it_cannot_take(options, message):
    with pytest.raises(ValueError, match=message):
        plan(**{"model": MODEL, "machine": MACHINE, "layout": Layout(pp=2), "batch": 3} | options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"heads": 6}, "width must be a multiple of heads"),
        ({"heads": 8, "kv_heads": 3}, "and heads of kv_heads, got 1024, 8 and 3"),
        ({"kv_heads": 4}, "and heads of kv_heads, got 1024, 1 and 4"),
        ({"vocabulary": -1}, "vocabulary must be an integer of at least 0"),
        ({"mlp_width": 0}, "mlp_width must be an integer of at least 1"),
    ],
)
def test_a_shape_that_cannot_be_is_refused(options, message):
    with pytest.raises(ValueError, match=message):
        replace(MODEL, **options)


def test_a_bad_layout_is_refused():
    with pytest.raises(ValueError, match="tp must be an integer of at least 1"):
        Layout(tp=0)
    with pytest.raises(ValueError, match="order must name each of tp, dp and pp once"):
        Layout(order="tp-pp")
    with pytest.raises(ValueError, match="axis must be tp, cp, dp or pp, got 'ep'"):
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
    from pplab.lab import fit_link

    link = fit_link({size: 0.05 + size / 2e6 for size in (64, 4096, 2**20)})
    assert link.latency == pytest.approx(0.05) and link.bandwidth == pytest.approx(2e6)
    assert fit_link({1: 0.5, 1000: 0.4}).bandwidth == float("inf")
    with pytest.raises(ValueError, match="at least two sizes, got 1"):
        fit_link({1: 1.0})


@pytest.mark.slow
def test_links_are_measured():
    from pplab.lab import measure_link
    from pplab.runtime import Pool

    with Pool(2, device="cpu") as pool:
        link, back = (measure_link(pool, (64, 2**20), 5, pair) for pair in ((0, 1), (1, 0)))
        with pytest.raises(ValueError, match=r"two different ranks of 0 to 1, got \(1, 2\)"):
            measure_link(pool, pair=(1, 2))
    assert all(0 < each.latency < 100 and 1e3 < each.bandwidth for each in (link, back))


def test_a_small_layout_is_drawn_with_what_it_sends():
    import matplotlib

    matplotlib.use("Agg")

    ax = lab.ranks(plan(MODEL, MACHINE, Layout(2, 2, 2), 16), ranks_per_node=4)
    assert [t.get_text() for t in ax.texts] == [*map(str, range(8)), "node 0", "node 1"]
    assert len(ax.lines) == 12 and "2 x 2 x 2" in figures.alternative_text(ax.figure)
    assert [t.get_text().split(":")[0] for t in ax.get_legend().get_texts()] == ["tensor", "pipeline", "data"]
    matplotlib.pyplot.close(ax.figure)
    ax = lab.ranks(plan(MODEL, MACHINE, Layout(2, 2, 2, cp=2), 16), ranks_per_node=8)
    assert len({t.get_position() for t in ax.texts[:16]}) == 16 and len(ax.lines) == 32
    assert "tensor x context x pipeline x data = 2 x 2 x 2 x 2" in figures.alternative_text(ax.figure)
    matplotlib.pyplot.close(ax.figure)
    with pytest.raises(ValueError, match="at most 32 ranks"):
        lab.ranks(plan(MODEL, MACHINE, Layout(8, 8, 1), 16), ranks_per_node=4)
