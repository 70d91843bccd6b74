"""The simulator against closed forms, published figures, and a second simulator; and what a timeline says of itself."""

import json
from fractions import Fraction

import pytest

import pplab as pp
from conftest import random_schedule, slow_simulate
from pplab import formulas
from pplab.metrics import summary


def run(name: str, P: int, M: int, costs: pp.Costs | None = None, **options) -> pp.Timeline:
    return pp.simulate(pp.build(name, num_ranks=P, num_microbatches=M, **options), costs)


# P=4, M=8, F=I=W=1: makespan, bubble fraction, span bubble, makespan at F,I,W = 3,4,2, peaks
TABLE = {
    "naive": (96, Fraction(3, 4), None, None, (1, 1, 1, 1)),
    "GPipe": (33, Fraction(3, 11), Fraction(3, 11), 99, (8, 8, 8, 8)),
    "1F1B": (33, Fraction(3, 11), Fraction(3, 11), 99, (4, 3, 2, 1)),
    "eager-1F1B": (33, Fraction(3, 11), Fraction(3, 11), 99, (7, 5, 3, 1)),
}


@pytest.mark.parametrize("name", TABLE)
def test_the_reference_table(name):
    makespan, bubble, span_bubble, other, peaks = TABLE[name]
    t = run(name, 4, 8)
    assert t.makespan == makespan
    assert t.bubble_fraction == pytest.approx(float(bubble), abs=1e-15)
    assert t.bubble_ratio == pytest.approx(float(bubble / (1 - bubble)), abs=1e-15)
    assert t.peak_in_flight == peaks
    if span_bubble is not None:
        assert t.span_bubble_fraction == pytest.approx(float(span_bubble), abs=1e-15)
        assert run(name, 4, 8, pp.Costs(3, 4, 2)).makespan == other


def test_latency_tells_the_schedules_apart():
    makespans = {name: run(name, 4, 8, pp.Costs(latency=1)).makespan for name in ("GPipe", "1F1B", "eager-1F1B")}
    assert makespans == {"GPipe": 39, "1F1B": 49, "eager-1F1B": 39}
    assert run("eager-1F1B", 4, 8, pp.Costs(latency=2)).makespan == 48


def test_a_warm_up_one_forward_short():
    assert run("1F1B", 4, 8, in_flight=(3, 2, 1, 1)).makespan == 54
    for M in (1, 2, 8):
        assert run("1F1B", 2, M, in_flight=(1, 1)).makespan == run("naive", 2, M).makespan


def test_a_slow_rank_costs_1f1b_by_its_place_and_gpipe_always_the_same():
    def slow(rank):
        return pp.Costs(*[[2 * x if r == rank else x for r in range(4)] for x in (1, 1, 1)])

    assert [run("1F1B", 4, 8, slow(rank)).makespan for rank in range(4)] == [51, 53, 55, 57]
    assert [run("GPipe", 4, 8, slow(rank)).makespan for rank in range(4)] == [57] * 4


def test_overhead_per_action_sets_a_best_number_of_microbatches():
    """The same batch in 4, 8 and 32 microbatches, each action 0.3 longer than its work."""
    made = []
    for M in (4, 8, 32):
        work = Fraction(8, M)
        F, B = work + Fraction(3, 10), 2 * work + Fraction(3, 10)
        made.append(float(run("1F1B", 4, M, pp.Costs(F, B, 0)).makespan))
    assert made == [46.2, 39.6, 47.25]


def test_full_recomputation_keeps_the_fraction_and_costs_a_third():
    t = run("1F1B", 4, 8, pp.Costs(1, 2, 1))
    assert (t.makespan, round(t.bubble_fraction, 4)) == (44, 0.2727)


GRID = [(P, M) for P in (1, 2, 3, 4, 5, 8) for M in (1, 2, 3, 4, 8, 9, 24)]
TIMES = [(1, 1, 1, 0), (3, 4, 2, 0), (1, 1, 1, 1), (5, 3, 8, 2), (2, 7, 1, 4)]


@pytest.mark.parametrize(("F", "I", "W", "c"), TIMES)
@pytest.mark.parametrize(("P", "M"), GRID)
def test_closed_forms(P, M, F, I, W, c):  # noqa: E741
    B, costs = I + W, pp.Costs(F, I, W, latency=c)
    assert run("naive", P, M, costs).makespan == formulas.naive_makespan(P, M, F, B, c)
    assert run("GPipe", P, M, costs).makespan == formulas.gpipe_makespan(P, M, F, B, c)
    if not c or M % P == 0:
        assert run("1F1B", P, M, costs).makespan == formulas.one_f_one_b_makespan(P, M, F, B, c)
    if 2 * c <= F + B:
        assert run("eager-1F1B", P, M, costs).makespan == formulas.eager_one_f_one_b_makespan(P, M, F, B, c)
    if not c:
        for name in ("GPipe", "1F1B", "eager-1F1B"):
            t = run(name, P, M, costs)
            assert t.makespan == formulas.floor_makespan(P, M, F, B)
            assert t.bubble_fraction == pytest.approx(formulas.bubble_fraction(P, M))
            assert t.bubble_ratio == pytest.approx(formulas.bubble_ratio(P, M))
        assert run("naive", P, M, costs).bubble_fraction == pytest.approx(formulas.naive_bubble_fraction(P))
    assert run("GPipe", P, M, costs).makespan == run("GPipe", P, M, costs, reverse_backward=True).makespan


@pytest.mark.parametrize(("P", "M"), GRID)
def test_peaks(P, M):
    assert run("naive", P, M).peak_in_flight == (1,) * P
    assert run("GPipe", P, M).peak_in_flight == formulas.gpipe_peak_in_flight(P, M)
    assert run("1F1B", P, M).peak_in_flight == formulas.one_f_one_b_peak_in_flight(P, M)
    assert run("eager-1F1B", P, M).peak_in_flight == formulas.eager_one_f_one_b_peak_in_flight(P, M)


@pytest.mark.parametrize(
    ("form", "arguments"),
    [(formulas.one_f_one_b_makespan, (4, 6, 1, 2, 1)), (formulas.eager_one_f_one_b_makespan, (4, 8, 1, 2, 2))],
)
def test_a_closed_form_refuses_what_it_does_not_hold_for(form, arguments):
    with pytest.raises(ValueError, match="closed form"):
        form(*arguments)


@pytest.mark.parametrize(("P", "M"), [(2, 4), (3, 2), (4, 8)])
def test_no_order_of_full_backwards_beats_the_floor(P, M, rng):
    """Random legal orders of one stage per rank never end before (M + P - 1)(F + B)."""
    from pplab.validate import stuck_at

    for _ in range(30):
        rows = []
        for r in range(P):
            row, ready = [], []
            for a in rng.sample(range(M), M):
                row.append(f"{r}F{a}")
                ready.append(a)
                while ready and rng.random() < 0.5:
                    row.append(f"{r}B{ready.pop(rng.randrange(len(ready)))}")
            rows.append(row + [f"{r}B{a}" for a in ready])
        s = pp.Schedule(rows)
        if not stuck_at(s):
            assert pp.simulate(s, pp.Costs(3, 4, 2)).makespan >= formulas.floor_makespan(P, M, 3, 6)


@pytest.mark.parametrize("latency", [0, 1.5])
def test_a_second_simulator_agrees(rng, latency):
    for _ in range(60):
        s = random_schedule(rng)
        times = {k: [rng.randint(0, 9) for _ in range(s.num_stages)] for k in "FIW"}
        costs = pp.Costs(times["F"], times["I"], times["W"], latency=latency)
        duration = lambda k, stage, t=times: t["I"][stage] + t["W"][stage] if k == "B" else t[k][stage]  # noqa: E731
        expected = slow_simulate(s, duration, latency)
        t = pp.simulate(s, costs)
        assert {span.action: (span.start, span.end) for span in t.spans} == expected


def test_an_overlap_runs_both_halves_at_once():
    s = pp.Schedule([["0F0", "(0F1;0B0)OVERLAP_F_B", "0B1"], ["1F0", "1B0", "1F1", "1B1"]])
    t = pp.simulate(s)
    assert [(str(x.action), x.start, x.end) for x in t.spans[:3]] == [
        ("0F0", 0, 1),
        ("(0F1;0B0)OVERLAP_F_B", 4, 7),
        ("0B1", 10, 12),
    ]
    assert t.busy == (6, 6)
    assert pp.Timeline.from_dict(t.to_dict()) == t
    assert [str(x.action) for x in pp.critical_path(t)][:4] == ["0F0", "1F0", "1B0", "(0F1;0B0)OVERLAP_F_B"]


def test_two_ranks_may_wait_for_one_overlap():
    s = pp.Schedule(
        [["0F0", "0F1", "0B0", "0B1"], ["1F0", "(1F1;1B0)OVERLAP_F_B", "1B1"], ["2F0", "2B0", "2F1", "2B1"]]
    )
    pp.validate(s)
    assert pp.simulate(s).makespan == 15


def test_costs_per_stage_and_finer_stages():
    t = run("1F1B", 2, 1, pp.Costs(forward=[1, 2], backward_input=[3, 4], backward_weight=[5, 6]))
    assert t.makespan == 1 + 2 + 4 + 6 + 3 + 5
    assert pp.Costs(forward=[2, 4]).finer(2) == pp.Costs([1.0, 2.0], 0.5, 0.5)
    assert run("1F1B", 4, 8, pp.Costs().finer(2)).makespan == 33 / 2


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"forward": -1}, "forward must be a finite number of at least 0, got -1"),
        ({"forward": "1"}, "forward must be a finite number"),
        ({"backward_input": [1, None]}, "backward_input must be a finite number of at least 0, got None"),
        ({"latency": float("nan")}, "latency must be a finite number"),
        ({"latency": True}, "latency must be"),
    ],
)
def test_bad_costs_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        pp.Costs(**options)


def test_costs_must_fit_the_stages():
    with pytest.raises(ValueError, match="forward has 3 values for 4 stages"):
        run("1F1B", 4, 8, pp.Costs(forward=[1, 2, 3]))


def test_metrics_hang_together(rng):
    for _ in range(30):
        s = random_schedule(rng)
        t = pp.simulate(s, pp.Costs(2, 3, 1, latency=rng.choice([0, 1, 2.5])))
        idle = pp.idle_intervals(t)
        for rank in range(s.num_ranks):
            assert sum(i.end - i.start for i in idle if i.rank == rank) == pytest.approx(t.idle[rank])
        assert t.bubble_fraction == pytest.approx(sum(t.idle) / (s.num_ranks * t.makespan))
        assert t.bubble_ratio == pytest.approx(sum(t.idle) / sum(t.busy))
        assert tuple(max(counts) for _, counts in pp.in_flight(t)) == t.peak_in_flight
        assert all(counts[-1] == 0 for _, counts in pp.in_flight(t))
        path = pp.critical_path(t)
        assert path[0].start == 0 and path[-1].end == t.makespan
        for before, after in zip(path, path[1:], strict=False):
            assert before.end <= after.start


def test_without_latency_the_critical_path_is_as_long_as_the_step(rng):
    for _ in range(30):
        t = pp.simulate(random_schedule(rng), pp.Costs(2, 3, 1))
        assert sum(span.end - span.start for span in pp.critical_path(t)) == t.makespan


def test_an_idle_interval_says_what_it_waits_for():
    said = [str(i) for i in pp.idle_intervals(run("1F1B", 2, 2))]
    assert said == [
        "rank 0 is idle from 2 to 4: it waits for 1B0 on rank 1",
        "rank 0 is idle from 6 to 7: it waits for 1B1 on rank 1",
        "rank 1 is idle from 0 to 1: it waits for 0F0 on rank 0",
        "rank 1 is idle from 7 to 9: it has nothing left to do",
    ]


def test_the_balance_sheet():
    table = pp.table(run(name, 4, 8) for name in TABLE)
    assert str(table).splitlines()[2].split("  ")[0] == "GPipe"
    assert table[2] == ("1F1B", "33", "0.2727", "0.3750", "0.2727", "4, 3, 2, 1", "48", "1")
    assert "<td>1F1B</td><td>33</td>" in table._repr_html_()


def test_json_is_complete_enough_to_redraw(rng):
    t = pp.simulate(random_schedule(rng), pp.Costs(1, 2, 3, latency=0.5, unit="ms"))
    again = pp.Timeline.from_dict(json.loads(json.dumps(t.to_dict())))
    assert again.spans == t.spans and again.unit == "ms" and again.schedule == t.schedule
    json.dumps(summary(t))


def test_perfetto_has_every_action_and_an_arrow_for_every_message(tmp_path):
    t = run("1F1B", 3, 4, pp.Costs(unit="ms", latency=1))
    t.to_perfetto(tmp_path / "trace.json")
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    slices = {e["name"]: e for e in events if e["ph"] == "X"}
    assert len(slices) == 24
    assert slices["0B0"]["dur"] == 2000 and slices["2F0"]["ts"] == 4000
    starts, ends = ([e for e in events if e["ph"] == ph] for ph in "sf")
    assert len(starts) == len(ends) == pp.num_messages(t.schedule) == 16
    for start, end in zip(starts, ends, strict=True):
        assert start["id"] == end["id"] and start["ts"] < end["ts"] and start["tid"] != end["tid"]
    assert {e["args"]["name"] for e in events if e["name"] == "thread_name"} == {"rank 0", "rank 1", "rank 2"}


def test_a_long_schedule_does_not_recurse():
    t = run("1F1B", 2, 20_000)
    assert t.makespan == 3 * 20_001
    assert run("naive", 64, 50).makespan == 64 * 50 * 3


def test_the_bubble_of_an_uncapped_depth_first_order():
    """Backward first, but no cap on forwards: at P=8, M=64 the first rank holds 22."""
    assert max(depth_first(8, 64).peak_in_flight) == 22


def depth_first(P: int, M: int) -> pp.Schedule:
    """Every rank runs a backward when one is ready, else a forward when one is ready; B takes two units, F one."""
    rows = [[] for _ in range(P)]
    f_end, b_end, free, time = {}, {}, [0] * P, 0
    while any(len(row) < 2 * M for row in rows):
        for r in range(P):
            if free[r] > time:
                continue
            m_b, m_f = sum(a[1] == "B" for a in rows[r]), sum(a[1] == "F" for a in rows[r])
            above = f_end.get((r, m_b), 1e9) if r == P - 1 else b_end.get((r + 1, m_b), 1e9)
            if m_b < M and above <= time:
                rows[r].append((r, "B", m_b))
                free[r] = b_end[r, m_b] = time + 2
            elif m_f < M and (r == 0 or f_end.get((r - 1, m_f), 1e9) <= time):
                rows[r].append((r, "F", m_f))
                free[r] = f_end[r, m_f] = time + 1
        time += 1
    return pp.Schedule([[f"{s}{k}{m}" for s, k, m in row] for row in rows])
