"""Names for the actions of other people's pipelines in the traces that they record: `pplab:0F1`.

`python -m pplab.watch` calls both functions where a program imports the schedules.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import wraps
from pkgutil import resolve_name
from typing import Any


def _named(text: str) -> AbstractContextManager:
    """A span of that name in the trace, or none without a name."""
    from torch.profiler import record_function

    return record_function(f"pplab:{text}") if text else nullcontext()


def watch_torch() -> None:
    """Name every action of torch's pipelining, whatever the class, in the traces of this process:
    `pplab:0F1` is stage 0's forward of microbatch 1.

    Call it before the first step. A second call changes nothing. The name is around the computing
    alone, without the wait for a message and the sending. The loss is part of the last stage's
    forward. An evaluation's backwards compute nothing and get no name. It costs a `record_function`
    per action.
    """
    from torch.distributed.pipelining.schedules import _PipelineSchedule
    from torch.distributed.pipelining.stage import _PipelineStageBase

    def named(owner: type, method: str, name: Callable[..., str]) -> None:
        plain = getattr(owner, method)

        @wraps(plain)
        def call(*given: Any, **options: Any) -> Any:
            with _named(name(*given, **options)):
                return plain(*given, **options)

        if not hasattr(plain, "__wrapped__"):
            setattr(owner, method, call)

    def backward(
        stage: Any, m: int, loss: object = None, full_backward: bool = True, **_: object
    ) -> str:
        return f"{stage.stage_index}{'B' if full_backward else 'I'}{m}" * stage.has_backward

    def loss(_: object, stage: Any, output: object, target: object, m: int, *__: object) -> str:
        return f"{stage.stage_index}F{m}" * stage.is_last

    named(
        _PipelineStageBase,
        "forward_one_chunk",
        lambda stage, m, *_, **__: f"{stage.stage_index}F{m}",
    )
    named(_PipelineStageBase, "backward_one_chunk", backward)
    named(
        _PipelineStageBase,
        "backward_weight_one_chunk",
        lambda stage, m, **_: f"{stage.stage_index}W{m}",
    )
    named(_PipelineSchedule, "_maybe_compute_loss", loss)


def watch_megatron() -> None:
    """Name every action of Megatron-LM's schedules, as `watch_torch` does for PyTorch's. Record the
    traces with its `--profile --use-pytorch-profiler`.

    With `--overlap-moe-expert-parallel-comm` Megatron-LM runs other functions, whose actions get no
    names.
    """
    parallel_state = resolve_name("megatron.core.parallel_state")
    schedules = resolve_name("megatron.core.pipeline_parallel.schedules")

    forward, backward = schedules.forward_step, schedules.backward_step
    if hasattr(forward, "__wrapped__"):
        return
    # by the output of their forward, which is the same object until then
    backwards: dict[int, str] = {}

    def first(output: Any) -> int:
        return first(output[0]) if isinstance(output, (list, tuple)) else id(output)

    @wraps(forward)
    def named_forward(
        *given: Any, current_microbatch: int | None = None, vp_stage: int | None = None, **more: Any
    ) -> Any:
        stage = parallel_state.get_pipeline_model_parallel_rank()
        stage += (vp_stage or 0) * parallel_state.get_pipeline_model_parallel_world_size()
        known = current_microbatch is not None
        with _named(f"{stage}F{current_microbatch}" * known):
            output = forward(
                *given, current_microbatch=current_microbatch, vp_stage=vp_stage, **more
            )
        backwards[first(output[0])] = f"{stage}B{current_microbatch}" * known
        return output

    @wraps(backward)
    def named_backward(input_tensor: Any, output_tensor: Any, *given: Any, **more: Any) -> Any:
        with _named(backwards.pop(first(output_tensor), "")):
            return backward(input_tensor, output_tensor, *given, **more)

    schedules.forward_step, schedules.backward_step = named_forward, named_backward
