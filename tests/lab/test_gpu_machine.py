"""What the runtime enqueues on GPUs ends, and where too few resources, or a wait, would keep it from that."""

from __future__ import annotations

from functools import cache

import pytest

import pplab as pp
from conftest import random_schedule
from pplab import lab
from pplab.errors import ScheduleError


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


@pytest.mark.parametrize("num_ranks", range(2, 9))
@pytest.mark.parametrize("ahead", [0, 1])
def test_every_schedule_ends_with_at_most_four_kernels(num_ranks, ahead):
    """A stream runs one transfer at a time, and no rank has more than four: so four places never refuse one."""
    assert len(built(num_ranks)) > 20
    for schedule in built(num_ranks):
        machine = lab.GpuMachine(schedule, ahead).run()
        transfers = [len([stream for stream in streams if stream != "compute"]) for streams in machine.streams]
        assert machine.most_resident <= max(transfers) <= 4
        assert all(ends(schedule, ahead=ahead, run_ahead=lag) for lag in (1, 2)), schedule.name


def test_random_schedules_end_where_nothing_is_scarce(rng):
    schedule = random_schedule(rng, overlap_share=0.3)
    assert ends(schedule) and ends(schedule, ahead=0) and ends(schedule, run_ahead=2)


def test_too_few_kernels_queues_or_streams_deadlock():
    naive, dual = (pp.build(name, num_ranks=4, num_microbatches=8) for name in ("1F1B", "DualPipe"))
    assert not ends(naive, kernels=1) and ends(naive, kernels=4)
    assert not ends(dual, queues=1) and ends(dual, queues=5)
    assert not ends(naive, one_stream=True)


def test_an_early_receive_hangs_a_wait_for_the_whole_device_and_a_late_one_does_not():
    schedule = pp.build("GPipe", num_ranks=2, num_microbatches=4)
    assert lab.hanging_waits(schedule)
    for each in built(2) + built(4)[::3]:
        assert lab.hanging_waits(each, ahead=0) == [], each.name


def test_what_is_stuck_is_named():
    schedule = pp.build("GPipe", num_ranks=2, num_microbatches=4)
    rank, call = lab.hanging_waits(schedule)[0]
    at = lab.host_calls(schedule)[rank].index(call)
    with pytest.raises(
        ScheduleError, match=rf"deadlock on GPUs.*rank {rank}: host before {call[0]} {call[1]}, running"
    ):
        lab.GpuMachine(schedule, device_wait=(rank, at)).run()
    with pytest.raises(ValueError, match="kernels"):
        lab.GpuMachine(schedule, kernels=0)
