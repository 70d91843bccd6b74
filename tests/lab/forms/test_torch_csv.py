"""Schedules exchanged with torch.distributed.pipelining, both ways, by torch's own reading, writing and checking."""

import pytest

import pplab as pp
from conftest import random_schedule, registry
from pplab import lab

schedules = pytest.importorskip("torch.distributed.pipelining.schedules")


def torch_runtime(s: pp.Schedule):
    """torch's schedule runtime without stages: enough to read, lower, check and write CSV."""
    runtime = schedules._PipelineScheduleRuntime.__new__(schedules._PipelineScheduleRuntime)
    runtime.pipeline_order = {}
    runtime.pp_group_size, runtime._num_stages, runtime._n_microbatches = s.num_ranks, s.num_stages, s.num_microbatches
    runtime._stages, runtime._defer_pp_recv = [], False
    runtime._unshard_lookahead, runtime._max_active_stages = "full", 3  # these from torch 2.15 on
    runtime._defer_reduce_grad_wait, runtime._max_outstanding_sends = False, None
    return runtime


def torch_rows(order) -> list[list[str]]:
    """The computation of torch's per-rank lists, as text."""
    return [[str(a) for a in order[rank] if a is not None and a.is_compute_op] for rank in sorted(order)]


def one_of_each(P: int, M: int) -> list[pp.Schedule]:
    """Every schedule of the registry that torch can take: it knows no bidirectional placement."""
    return [s for s in registry(P, M) if pp.builders.find(s.name).placement != "bidirectional"]


def test_torch_reads_what_pplab_writes(rng, tmp_path):
    for s in [random_schedule(rng), *one_of_each(3, 6)]:
        path = tmp_path / "schedule.csv"
        path.write_text(lab.to_csv(s))
        runtime = torch_runtime(s)
        runtime._load_csv(str(path))  # reads, validates, lowers
        assert torch_rows(runtime.pipeline_order) == [[str(a) for a in row] for row in s.rows]
        assert runtime.stage_index_to_group_rank == dict(enumerate(s.placement))


def test_pplab_reads_what_torch_writes(rng, tmp_path):
    s = random_schedule(rng)
    path, lowered = tmp_path / "compute.csv", tmp_path / "lowered.csv"
    path.write_text(lab.to_csv(s))
    runtime = torch_runtime(s)
    runtime._load_csv(str(path))
    runtime._dump_csv(str(path), format="compute_only")
    runtime._dump_csv(str(lowered), format="compute_comms")
    assert lab.read_csv(path) == lab.read_csv(lowered) == s


def test_what_torch_prints_is_read(rng):
    """Its table, which ends all errors of its runtime, and its lists; other separators, and older names of actions."""
    s = random_schedule(rng)
    order = {rank: [schedules._Action.from_str(str(x)) for x in row] for rank, row in enumerate(s.rows)}
    printed = schedules._format_pipeline_order(order, error_step_number=0)
    for text in (printed, f"AssertionError: Rank 1, step 0\n\nFull pipeline schedule:\n{printed}", str(order)):
        assert lab.read_csv(text) == s
    assert lab.read_csv("0F0 0B0\n1F0\t1B0") == lab.read_csv("F0_s0;None;B0_s0\nF0_s1;B0_s1")
    steps = "0F0,\n0F1,1F0\n,1B0\n0B0,1F1\n,1B1\n0B1,"
    with pytest.raises(pp.ScheduleError, match="a row for each step and a column for each rank; turn it"):
        lab.read_csv(steps)
    with pytest.raises(pp.ScheduleError, match="'rank0' is not an action.*without headers"):
        lab.read_csv("rank0,rank1\n" + steps)


def test_torch_runs_pplabs_lowered_rows(rng, tmp_path):
    """torch's simulator takes our sends and receives, where a receive stands directly before its use."""
    for s in [random_schedule(rng), *one_of_each(4, 8)]:
        if s.columns.overlaps:
            continue  # torch's simulator knows no overlap
        path = tmp_path / "lowered.csv"
        path.write_text(lab.to_csv(pp.lower(s)))
        order = {
            rank: [schedules._Action.from_str(cell) for cell in line.split(",")]
            for rank, line in enumerate(path.read_text().splitlines())
        }
        schedules._simulate_comms_compute(order, lambda stage, s=s: s.placement[stage], s.num_stages)


@pytest.mark.parametrize(("P", "M"), [(1, 1), (2, 4), (4, 8), (3, 7), (4, 4)])
def test_the_orders_are_torchs(P, M):
    for name, cls in (("GPipe", "ScheduleGPipe"), ("1F1B", "Schedule1F1B")):
        single = getattr(schedules, cls).__new__(getattr(schedules, cls))
        single._num_stages, single._n_microbatches = P, M
        theirs = torch_rows(single._get_pipeline_order())
        ours = [[str(a) for a in row] for row in pp.build(name, num_ranks=P, num_microbatches=M).rows]
        if name == "1F1B":  # torch's listing counts the last rank's forwards from 1 to M; its runtime runs 0 to M-1
            last = (pp.parse(cell) for cell in theirs[-1])
            theirs[-1] = [str(a._replace(microbatch=a.microbatch - (a.kind is pp.Kind.F))) for a in last]
        assert theirs == ours


SEVERAL_STAGES = {
    "Interleaved1F1B": "ScheduleInterleaved1F1B",
    "LoopedBFS": "ScheduleLoopedBFS",
    "InterleavedZeroBubble": "ScheduleInterleavedZeroBubble",
    "ZBVZeroBubble": "ScheduleZBVZeroBubble",
    "DualPipeV": "ScheduleDualPipeV",
}


@pytest.mark.parametrize(
    ("P", "M"), [(1, 2), (2, 1), (2, 4), (2, 5), (3, 4), (3, 7), (4, 8), (4, 10), (4, 16), (8, 32)]
)
@pytest.mark.parametrize("name", SEVERAL_STAGES)
def test_the_orders_of_several_stages_per_rank_are_torchs(name, P, M):
    for V in (2,) if name in ("ZBVZeroBubble", "DualPipeV") else (1, 2, 3):
        theirs = getattr(schedules, SEVERAL_STAGES[name]).__new__(getattr(schedules, SEVERAL_STAGES[name]))
        theirs.pp_group_size, theirs._n_microbatches, theirs._num_stages = P, M, P * V
        theirs.n_local_stages, theirs._stages, theirs.num_stages = V, [None] * V, P * V
        theirs.number_of_rounds = max(1, M // P)
        theirs.microbatches_per_round = M // theirs.number_of_rounds
        if name.startswith("Interleaved") and M % theirs.number_of_rounds:
            continue  # torch refuses it
        if name == "DualPipeV" and M < 2 * P:
            with pytest.raises(ValueError, match="at least 2P"):
                pp.build(name, num_ranks=P, num_microbatches=M)
            continue
        options = {} if name in ("ZBVZeroBubble", "DualPipeV") else {"stages_per_rank": V}
        ours = pp.build(name, num_ranks=P, num_microbatches=M, **options)
        for rank, row in enumerate(ours.rows):
            listed = [a for a in theirs._calculate_single_rank_operations(rank) if a is not None]
            assert [str(a) for a in row] == [str(a) for a in listed], (V, rank)


def read_by_torch(s: pp.Schedule, path) -> list[list[str]]:
    path.write_text(lab.to_csv(s))
    runtime = torch_runtime(s)
    runtime._load_csv(str(path))
    return torch_rows(runtime.pipeline_order)


def test_overlaps_of_any_kind_are_read_back_and_torch_takes_those_that_are_not_refused(rng, tmp_path):
    """What `for_torch` refuses torch refuses, and the reverse; pplab reads both."""
    kinds = set()
    for _ in range(60):
        s = random_schedule(rng, overlap_share=rng.choice([0, 0.1, 0.6]), split_share=rng.choice([0, 0.5]))
        assert lab.read_csv(lab.to_csv(s)) == s
        strange = [str(a) for row in s.rows for a in row if "OVERLAP" in str(a) and not str(a).endswith("OVERLAP_F_B")]
        kinds |= {each.partition("OVERLAP_")[2] for each in strange}
        if strange:
            with pytest.raises(RuntimeError, match="Invalid computation type"):
                read_by_torch(s, tmp_path / "any.csv")
            with pytest.raises(
                pp.ScheduleError, match=r"torch's CSV has no name for .*, only .*OVERLAP_F_B; put"
            ) as told:
                lab.to_csv(s, for_torch=True)
            assert str(told.value.action) == strange[0] and f"no name for {strange[0]}, only" in str(told.value)
            assert s.rows[told.value.rank].count(told.value.action) == 1
        else:
            assert lab.to_csv(s, for_torch=True) == lab.to_csv(s)
            assert read_by_torch(s, tmp_path / "any.csv") == [[str(a) for a in row] for row in s.rows]
    assert {"F_I", "W_I", "B_F", "F_F"} <= kinds


def test_a_stage_on_two_ranks_has_no_form_of_torchs():
    s = pp.build("DualPipe", num_ranks=2, num_microbatches=4)
    assert lab.read_csv(lab.to_csv(s)) == s
    with pytest.raises(
        pp.ScheduleError, match="stage . is on ranks 0 and 1, and torch's CSV has one rank for each; run"
    ):
        lab.to_csv(s, for_torch=True)


def test_pairs_slices_and_found_orders_are_exchanged(tmp_path):
    """Slices are microbatches to torch: the numbers are the schedule's, and the file has no count of them."""
    split = pp.build("paired-1F1B", num_ranks=2, num_microbatches=4, split=True)
    assert lab.read_csv(lab.to_csv(split)) == split
    with pytest.raises(pp.ScheduleError, match="OVERLAP_F_I, only"):
        lab.to_csv(split, for_torch=True)
    made = [
        pp.build("paired-1F1B", num_ranks=3, num_microbatches=7),
        pp.build("Seq1F1B", num_ranks=3, num_microbatches=12, slices=3),
        pp.build("Seq1F1B", num_ranks=2, num_microbatches=8, slices=4, stages_per_rank=2, split=True),
        pp.build("TeraPipe", num_ranks=2, num_microbatches=6, slices=2),
        lab.search(3, 5, placement="V", limit=5, tries=50).timeline.schedule,
        lab.v_half_block(3).reorder(6).schedule,
    ]
    for s in made:
        again = lab.read_csv(lab.to_csv(s, for_torch=True))
        assert again == s and read_by_torch(s, tmp_path / "made.csv") == [[str(a) for a in row] for row in s.rows]
    even = lab.Slices.even(3, attention=0.5)
    assert even.simulate(lab.read_csv(lab.to_csv(made[1]))).spans == even.simulate(made[1]).spans
