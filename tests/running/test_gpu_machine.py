"""What the runtime enqueues on GPUs ends, and where too few resources, or a wait, would keep it from that."""

from __future__ import annotations

import random
from contextlib import contextmanager, nullcontext
from functools import cache
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from torch import nn

import gpu_calls
import pplab as pp
from conftest import random_schedule
from gpu_calls import host_calls
from gpu_machine import GpuMachine, hanging_waits
from pplab import lab
from pplab.actions import COMPUTE, RECV_B, RECV_F, Overlap
from pplab.errors import ScheduleError
from pplab.runtime import Reducer
from pplab.runtime.gpu import ENVIRONMENT


@cache
def built(num_ranks: int) -> tuple[pp.Schedule, ...]:
    found = []
    for builder in pp.builders.known():
        for num_microbatches in sorted({1, 4, 2 * num_ranks}):
            try:
                found.append(pp.build(builder.name, num_ranks=num_ranks, num_microbatches=num_microbatches))
            except ValueError:  # not one of this builder's sizes
                pass
    return tuple(found)


def ends(schedule: pp.Schedule, **machine) -> bool:
    try:
        GpuMachine(schedule, **machine).run()
    except ScheduleError:
        return False
    return True


def hanging_single_waits(schedule: pp.Schedule, **machine) -> list[tuple]:
    """All calls, with their ranks, before which one wait of one host for its whole GPU never ends."""
    found = []
    for rank in range(schedule.num_ranks):
        played = GpuMachine(schedule, **machine)
        for at, call in enumerate(played.calls[rank]):
            played.stops[rank] = at  # a host that waits; the others do what they can without it
            played.settle()
            if not played.idle(rank):
                found.append((rank, call))
    return found


@contextmanager
def careless_receives():
    """Every receive is posted one action early, whatever its sender needs first."""

    def moved(row: tuple) -> tuple:
        made, before = [], 0  # where the last action stands
        for step in row:
            if isinstance(step, pp.Overlap) or step.kind in COMPUTE:
                before = len(made)
                made.append(step)
            elif step.kind in (RECV_F, RECV_B):
                made.insert(before, step)
                before += 1
            else:
                made.append(step)
        return tuple(made)

    with mock.patch.object(gpu_calls, "lower", lambda schedule, ahead: map(moved, pp.lower(schedule, ahead=0))):
        yield


def most_at_once(machine: GpuMachine) -> int:
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
        machine = GpuMachine(schedule, ahead).run()
        assert machine.most_resident <= most_at_once(machine) <= 4
        assert all(ends(schedule, ahead=ahead, run_ahead=lag) for lag in (1, 2)), schedule.name


@pytest.mark.parametrize("num_ranks", [2, 3, 4])
def test_replicas_add_up_with_at_most_four_kernels(num_ranks):
    for schedule in built(num_ranks)[1::2]:
        machine = GpuMachine(lab.replicate(schedule, 2), run_ahead=2).run()
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
    for rank, calls in enumerate(host_calls(schedule)):
        context = SimpleNamespace(wire=torch.device("cpu"), rank=rank, group=lambda purpose, ranks: tuple(ranks))
        modules = {stage: nn.Linear(1, 1) for stage in schedule.stages_of(rank)}
        reducer = Reducer(
            SimpleNamespace(job=SimpleNamespace(schedule=schedule), context=context, modules=modules, apart=()), {}
        )
        for bucket in reducer.buckets:
            reducer.start(bucket)
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


def cases(ahead: int, **asked) -> list[pp.Schedule]:
    """Which of the schedules on 2 to 4 ranks hang where every host waits before each call."""
    return [each for num_ranks in (2, 3, 4) for each in built(num_ranks) if hanging_waits(each, ahead=ahead, **asked)]


def test_what_hangs_where_all_hosts_wait():
    """Of the schedules that the page "It hangs" names there, on 2 to 4 ranks."""
    ways = product((0, 1), (0, 8))
    hang = {way: {(each.num_ranks, each.name) for each in cases(way[0], room=way[1])} for way in ways}
    never = {*product((2, 3, 4), ("naive", "GPipe", "TeraPipe"))}
    hanging = {*product((2, 3, 4), ("1F1B", "Interleaved1F1B", "ZBVZeroBubble", "DualPipeV"))}
    assert not never & (hang[0, 0] | hang[1, 0]) and hanging <= hang[0, 0] & hang[1, 0]
    assert (4, "eager-1F1B") in hang[0, 0] - hang[1, 0]
    assert not (never | hanging) & hang[0, 8] and hanging & hang[1, 8]
    text = (Path(__file__).parents[2] / "book" / "it_hangs.md").read_text()
    assert "1F1B hangs on 2 to 4 ranks, and so do interleaved 1F1B, ZB-V and DualPipeV" in text


def test_no_host_that_waits_before_what_may_allocate_gets_further_than_one_that_always_waits():
    """Room for a receive is made when it is posted, and a kernel's when it is asked for."""
    for num_ranks in (2, 3, 4):
        for schedule in built(num_ranks):
            for ahead in (0, 1):
                calls = host_calls(schedule, ahead=ahead)
                each = [(rank, i, what) for rank, row in enumerate(calls) for i, (what, _) in enumerate(row)]
                some = {(rank, i) for rank, i, what in each if what in ("post", "compute")}
                assert ends(schedule, ahead=ahead, waits=some) == ends(schedule, ahead=ahead, waits="all")


def test_where_all_hosts_may_wait_no_waits_hang(rng):
    """Whoever waits less is never behind: with its own random rows, early or careless posts, and some buffers."""
    for _ in range(30):
        schedule = random_schedule(rng, overlap_share=0.2)
        asked = {"ahead": rng.choice((0, 1)), "room": rng.choice((0, 0, 1, 4))}
        with careless_receives() if rng.random() < 0.3 else nullcontext():
            calls = host_calls(schedule, ahead=asked["ahead"])
            every = [(rank, i) for rank, row in enumerate(calls) for i in range(len(row))]
            some = {wait for wait in every if rng.random() < 0.5}
            all_end = ends(schedule, waits="all", **asked)
            assert all_end == (not hanging_waits(schedule, **asked))
            fewer = set(rng.sample(sorted(some), len(some) // 2))
            assert all_end <= ends(schedule, waits=some, **asked) <= ends(schedule, waits=fewer, **asked)
            assert all_end <= (not hanging_single_waits(schedule, **asked))


@pytest.mark.parametrize("ahead, pairs", [(0, 3), (1, 8)])
def test_two_hosts_that_wait_hang_what_one_does_not(ahead, pairs):
    schedule = pp.build("1F1B", num_ranks=2, num_microbatches=4)
    first, second = host_calls(schedule, ahead=ahead)
    waits = [{(0, i), (1, j)} for i in range(len(first)) for j in range(len(second))]
    assert not hanging_single_waits(schedule, ahead=ahead)
    assert sum(not ends(schedule, ahead=ahead, waits=each) for each in waits) == pairs


def test_a_hosts_order_over_all_channels_deadlocks_some_schedules():
    """NCCL_LAUNCH_ORDER_IMPLICIT=1, which the runtime sets to 0."""
    hang = [
        sum(not ends(each, ahead=ahead, in_order=True) for num_ranks in (2, 3, 4) for each in built(num_ranks))
        for ahead in (0, 1)
    ]
    assert hang == [15, 5]
    assert ENVIRONMENT["NCCL_LAUNCH_ORDER_IMPLICIT"] == "0"


def test_what_buffers_hide():
    """Two ranks that both send before they receive. Too few places stay too few."""
    two, four = (pp.build("1F1B", num_ranks=P, num_microbatches=2 * P) for P in (2, 4))
    for ahead, found in ((0, [True, False]), (1, [True, True])):
        assert [bool(hanging_waits(two, ahead=ahead, room=room)) for room in (0, 1)] == found
    assert not ends(four, room=8, kernels=1) and not ends(four, room=8, one_stream=True)


@pytest.mark.parametrize("num_ranks", [2, 3, 4])
def test_an_early_receive_hangs_no_wait_for_the_whole_device(num_ranks):
    """But a ring of ranks may: a send waits for its receive, and with chunks a rank's successor waits for it, too."""
    hang = []
    for schedule in built(num_ranks):
        early, late = (hanging_single_waits(schedule, ahead=ahead) for ahead in (1, 0))
        assert bool(early) <= bool(late), schedule.name
        if late:
            hang.append((schedule.name, schedule.num_microbatches))
    assert hang == {
        3: [("InterleavedZeroBubble", 4), ("InterleavedZeroBubble", 6)],
        4: [("InterleavedZeroBubble", 8)],
    }.get(num_ranks, [])


def test_an_early_receive_hangs_no_random_schedule():
    found = [random_schedule(random.Random(seed), overlap_share=0.2) for seed in range(50)]
    hangs = [[bool(hanging_single_waits(each, ahead=ahead)) for each in found] for ahead in (1, 0)]
    assert all(early <= late for early, late in zip(*hangs, strict=True))


def test_a_careless_receive_hangs_a_wait_for_the_whole_device():
    schedule = pp.build("GPipe", num_ranks=2, num_microbatches=4)
    assert not hanging_waits(schedule)  # of no hosts
    with careless_receives():
        found = hanging_single_waits(schedule)
        tried = [
            (rank, call)
            for rank, calls in enumerate(host_calls(schedule))
            for at, call in enumerate(calls)
            if not ends(schedule, waits={(rank, at)})
        ]
    assert found == tried != []


def test_what_is_stuck_is_named():
    schedule = pp.build("GPipe", num_ranks=2, num_microbatches=4)
    with careless_receives():
        rank, call = hanging_single_waits(schedule)[0]
        at = host_calls(schedule)[rank].index(call)
        says = rf"deadlock on GPUs.*rank {rank}: host before {call[0]} {call[1]}, running"
        with pytest.raises(ScheduleError, match=says):
            GpuMachine(schedule, waits={(rank, at)}).run()
    with pytest.raises(ValueError, match="kernels"):
        GpuMachine(schedule, kernels=0)
    for wrong in ({"waits": "any"}, {"room": -1}):
        with pytest.raises(ValueError, match="any|room"):
            GpuMachine(schedule, **wrong)
