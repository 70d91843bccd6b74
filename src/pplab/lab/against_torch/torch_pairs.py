"""Run the halves of an overlap at the same time in PyTorch's runtime, which by itself runs them one
after the other.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from ...actions import Action, B, F
from ...runtime import Rank


def run_pairs(runner: Any, rank: Rank, times: dict) -> None:
    """Let torch's runtime run its overlaps by the rank's `overlap(forward, backward)`. `times`
    notes when.

    What replaces torch's function also has to do what torch does around each half: wait for what
    comes from other ranks, hand over what stays on this one, and count the backwards.
    """
    from torch.distributed.pipelining.schedules import OVERLAP_F_B, _wait_batch_p2p

    stages = {stage.stage_index: stage for stage in runner._stages}

    def forward(context: Any, action: Action) -> None:
        stage, m = stages[action.stage], action.microbatch
        output = stage.forward_one_chunk(m, context.arg_mbs[m], context.kwarg_mbs[m])
        runner._maybe_compute_loss(stage, output, context.target_mbs, m)
        if action.stage + 1 in stages:
            stages[action.stage + 1].set_local_fwd_input(output, m)

    def backward(context: Any, action: Action) -> None:
        stage, m = stages[action.stage], action.microbatch
        runner.backward_counter[action.stage] += 1
        last = runner.backward_counter[action.stage] == runner._n_microbatches
        stage.backward_one_chunk(
            m, loss=runner._maybe_get_loss(stage, m), full_backward=True, last_backward=last
        )
        if action.stage - 1 in stages:
            stages[action.stage - 1].set_local_bwd_input(stage.get_local_bwd_output(m), m)

    def pair(item: Any, context: object) -> None:
        calls = []
        parts = ((F, forward, runner.fwd_recv_ops), (B, backward, runner.bwd_recv_ops))
        for half, (kind, call, receives) in zip(item.sub_actions, parts, strict=True):
            action = Action(half.stage_index, kind, half.microbatch_index)
            if received := receives.pop((action.stage, action.microbatch), None):
                _wait_batch_p2p(received)
            calls.append(call_of(call, context, action))
        begun = rank.clock.mark()
        rank.overlap(*calls)
        times[tuple(call.args[0] for call in calls)] = (begun, rank.clock.mark())

    runner.register_custom_function(OVERLAP_F_B, pair)


def call_of(call: Callable, context: object, action: Action) -> partial:
    """A half in the form that `overlap` takes: a partial function without further arguments, whose
    first argument is the action.
    """
    return partial(lambda action: call(context, action), action)
