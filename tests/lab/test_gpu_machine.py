"""What the runtime enqueues on GPUs ends, and where too few resources, or a wait, would keep it from that."""

from __future__ import annotations

import random
from functools import cache
from types import SimpleNamespace

import pytest
import torch
from torch import nn

import pplab as pp
from conftest import random_schedule
from pplab import lab
from pplab.actions import Overlap
from pplab.errors import ScheduleError
from pplab.runtime.reduction import Reducer


@cache
def built(num_ranks: int) -> tuple[pp.Schedule, ...]:
    found = []
    for builder in pp.builders.ALL:
        for num_microbatches in (1, 4, 2 * num_ranks):
            try:
                found.append(pp.build(builder.name, num_ranks=num_ranks, num_microbatches=num_microbatches))
            except ValueError:  # not one of this builder's sizes
                pass
    return tuple(found)


def ends(schedule: pp.Schedule, **machine) -> bool:
    try:
        lab.GpuMachine(schedule, **machine).run()
    except ScheduleError:
        return False
    return True


def most_at_once(machine: lab.GpuMachine) -> int:
    """More transfers than this can't be on a GPU, whatever the times: a stream runs one at a time, and the copies' sums
    start when the rank has computed everything, so when all that it receives is there."""
    most = 0
    for rank, streams in enumerate(machine.streams):
        groups = [stream for stream in streams if stream != "compute"]
        receives = [(name, ranks) for name, ranks in groups if name == "channel" and ranks[1] == rank]
        sums = [stream for stream in groups if stream[0] == "sum"]
        most = max(most, len(groups) - len(sums), len(groups) - len(receives))
    return most


@pytest.mark.parametrize("num_ranks", range(2, 9))
@pytest.mark.parametrize("ahead", [0, 1])
def test_every_schedule_ends_with_at_most_four_kernels(num_ranks, ahead):
    """Four places never refuse a transfer, and the host may be as far ahead as the runtime lets it, or less."""
    assert len(built(num_ranks)) > 20
    for schedule in built(num_ranks):
        machine = lab.GpuMachine(schedule, ahead).run()
        assert machine.most_resident <= most_at_once(machine) <= 4
        assert all(ends(schedule, ahead=ahead, run_ahead=lag) for lag in (1, 2)), schedule.name


@pytest.mark.parametrize("num_ranks", [2, 3, 4])
def test_replicas_add_up_with_at_most_four_kernels(num_ranks):
    for schedule in built(num_ranks)[1::2]:
        machine = lab.GpuMachine(lab.replicate(schedule, 2), run_ahead=2).run()
        assert any(call[0] == "start" for call in machine.calls[0])
        assert machine.most_resident <= most_at_once(machine) <= 4


@pytest.mark.parametrize("num_ranks", [3, 5])
def test_pairs_whose_ranks_begin_with_different_halves_end(num_ranks):
    """Odd ranks begin each pair with its second half, so that replicas of an odd number of ranks disagree."""
    pairs = [each for each in built(num_ranks) if any(isinstance(item, Overlap) for row in each.rows for item in row)]
    assert len(pairs) > 2
    for schedule in pairs:
        assert ends(lab.replicate(schedule, 2), kernels=4, run_ahead=2, experts=True), schedule.name


def test_sums_come_in_the_reducers_order(monkeypatch):
    schedule, found = (
        lab.replicate(pp.build("Interleaved1F1B", num_ranks=3, num_microbatches=4, stages_per_rank=4), 2),
        [],
    )
    monkeypatch.setattr("torch.distributed.all_reduce", lambda x, group, async_op: found.append(group))
    for rank, calls in enumerate(lab.host_calls(schedule)):
        context = SimpleNamespace(wire=torch.device("cpu"), rank=rank, group=lambda purpose, ranks: tuple(ranks))
        modules = {stage: nn.Linear(1, 1) for stage in schedule.stages_of(rank)}
        reducer = Reducer(
            SimpleNamespace(job=SimpleNamespace(schedule=schedule), context=context, modules=modules, apart=()), {}
        )
        reducer.begin("row", None)
        while reducer.started < len(reducer.buckets):
            reducer.start()
        assert found == [of.ranks for what, of in calls if what == "start"] != []
        found.clear()


def test_random_schedules_end_where_nothing_is_scarce(rng):
    schedule = random_schedule(rng, overlap_share=0.3)
    assert ends(schedule) and ends(schedule, ahead=0) and ends(schedule, run_ahead=2)


def test_too_few_kernels_queues_or_streams_deadlock():
    naive, dual = (pp.build(name, num_ranks=4, num_microbatches=8) for name in ("1F1B", "DualPipe"))
    assert not ends(naive, kernels=1) and ends(naive, kernels=4)
    assert not ends(dual, queues=1) and ends(dual, queues=6)
    assert not ends(naive, one_stream=True)


@pytest.mark.parametrize("num_ranks", [2, 3, 4])
def test_an_early_receive_hangs_no_wait_for_the_whole_device(num_ranks):
    """But a ring of ranks may: a send waits for its receive, and with chunks a rank's successor waits for it, too."""
    hang = []
    for schedule in built(num_ranks):
        early, late = (lab.hanging_waits(schedule, ahead=ahead) for ahead in (1, 0))
        assert bool(early) <= bool(late), schedule.name
        if late:
            hang.append((schedule.name, schedule.num_microbatches))
    assert hang == {
        3: [("InterleavedZeroBubble", 4), ("InterleavedZeroBubble", 6)],
        4: [("InterleavedZeroBubble", 8)],
    }.get(num_ranks, [])


def test_an_early_receive_hangs_no_random_schedule():
    found = [random_schedule(random.Random(seed), overlap_share=0.2) for seed in range(50)]
    hangs = [[bool(lab.hanging_waits(each, ahead=ahead)) for each in found] for ahead in (1, 0)]
    assert all(early <= late for early, late in zip(*hangs, strict=True))


def test_a_careless_receive_hangs_a_wait_for_the_whole_device():
    schedule = pp.build("GPipe", num_ranks=2, num_microbatches=4)
    found = lab.hanging_waits(schedule, careless=True)
    assert found and not lab.hanging_waits(schedule)
    tried = [
        (rank, call)
        for rank, calls in enumerate(lab.host_calls(schedule, careless=True))
        for at, call in enumerate(calls)
        if not ends(schedule, careless=True, device_wait=(rank, at))
    ]
    assert found == tried


def test_what_is_stuck_is_named():
    schedule = pp.build("GPipe", num_ranks=2, num_microbatches=4)
    rank, call = lab.hanging_waits(schedule, careless=True)[0]
    at = lab.host_calls(schedule, careless=True)[rank].index(call)
    with pytest.raises(
        ScheduleError, match=rf"deadlock on GPUs.*rank {rank}: host before {call[0]} {call[1]}, running"
    ):
        lab.GpuMachine(schedule, device_wait=(rank, at), careless=True).run()
    with pytest.raises(ValueError, match="kernels"):
        lab.GpuMachine(schedule, kernels=0)
