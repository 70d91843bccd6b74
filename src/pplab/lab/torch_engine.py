"""The same stages and batches under PyTorch's own pipelining runtime, for comparison."""

from __future__ import annotations

import tempfile
import threading
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
from queue import SimpleQueue

import torch
import torch.distributed as dist

from .. import text
from ..actions import RECV_B, RECV_F, SEND_B, SEND_F, Action, B, F, I, W, parts
from ..lowering import LoweredRow
from ..runtime.job import Job, RankContext, RankReport, State, stage_modules
from ..runtime.stage import autocast
from ..runtime.trace import Allocator, Meter, Recorder, StepTrace, paced, settle
from .profiling import NoSpans, Recording

CLASSES = {
    "GPipe": "ScheduleGPipe",
    "1F1B": "Schedule1F1B",
    "Interleaved1F1B": "ScheduleInterleaved1F1B",
    "LoopedBFS": "ScheduleLoopedBFS",
    "InterleavedZeroBubble": "ScheduleInterleavedZeroBubble",
    "ZBVZeroBubble": "ScheduleZBVZeroBubble",
    "DualPipeV": "ScheduleDualPipeV",
}


def train_torch(
    context: RankContext, job: Job, rows: Sequence[LoweredRow] | None = None, one_queue: bool = False
) -> RankReport:
    """Run the job's steps with `torch.distributed.pipelining`: its class for the schedule's name, or its interpreter.

    Times are those of its calls into the stages, without the waits between them; a paced call lasts at least its pace.
    Bytes are what autograd saves. `rows` are the schedule's rows with sends and receives of your own, which torch's
    interpreter then runs as they stand. `one_queue` lets a rank's messages pass one after the other, in the order in
    which torch posts them, as on a GPU's stream, and records when each did.
    """
    schedule, workload, device = job.schedule, job.workload, context.device
    context.watch("setting up", 0, False)
    recorder = context.recorder()
    times: dict[Action, tuple[object, object]] = {}
    modules = stage_modules(context, job)
    row = [action for item in schedule.rows[context.rank] for action in parts(item)]  # torch runs halves in turn
    recording = Recording(job.profile, context.rank, row, device, modules.values())
    spans = NoSpans()
    messages = _Messages(recorder) if one_queue else None
    runner = _runner(
        context, job, modules, recorder.clock.mark, times, lambda action: spans.action(action), rows, messages
    )
    state = State(context, job, modules)

    def run_pass(step: int, meter: Meter | None = None, update: bool = False) -> tuple[StepTrace, float]:
        for module in modules.values():
            module.zero_grad(set_to_none=True)
        batch = workload.batch(step).to(device)
        inputs = batch.inputs if 0 in modules else ()
        losses: list[torch.Tensor] = []
        last = {"target": batch.target, "losses": losses} if schedule.num_stages - 1 in modules else {}
        context.watch("at the barrier", 0, True)
        recorder.tie()
        dist.barrier()
        times.clear()
        recorder.begin()
        context.watch("in a step of torch's runtime", 0, False)  # where in its row, only torch knows
        with spans.named("pp.step"):
            with autocast(device, job.autocast), meter or nullcontext():
                runner.step(*inputs, **last, **batch.context)
            if update:
                state.update(recorder, spans)
            settle(device, job.profile)
        for item in schedule.rows[context.rank]:
            halves = [times[action] for action in parts(item)]
            recorder.action(item, halves[0][0], halves[-1][1])
        loss = torch.stack([x.detach() for x in losses]).sum().item() * job.loss_scale if losses else 0.0
        return recorder.finish(), loss

    run_pass(0)  # torch learns the shapes in its first step, with an extra pass
    meter = Meter(t for module in modules.values() for t in (*module.parameters(), *module.buffers()))
    _, first_loss = run_pass(0, meter)
    gradients = state.gradients()
    for _ in range(job.warmup):
        run_pass(0)
    state.restore_buffers()
    spans = recording.spans
    allocator = Allocator(device, modules.values())
    with recording:
        measured = [run_pass(step, update=True) for step in range(job.steps)]
    if messages:
        messages.close()
    traces, losses = [trace for trace, _ in measured], [loss for _, loss in measured]
    found = {"profile": recording.summary, "allocated": allocator.read()}
    found |= {"gradient_norms": tuple(state.norms), "saved": state.saved() if job.save else None}
    return RankReport(traces, losses, 0, meter.peak, {}, gradients, first_loss, **found)


def _runner(
    context: RankContext,
    job: Job,
    modules: dict,
    mark: Callable[[], object],
    times: dict,
    span: Callable[[Action], AbstractContextManager],
    rows: Sequence[LoweredRow] | None,
    messages: _Messages | None,
):
    """torch's runtime on stages that note when each action runs."""
    from torch.distributed import pipelining  # takes a second: only where it is used
    from torch.distributed.pipelining.schedules import _PipelineScheduleRuntime

    schedule, device = job.schedule, context.device

    class Timed(pipelining.PipelineStage):
        def forward_one_chunk(self, fwd_chunk_id, *args, **kwargs):
            return self._time(F, fwd_chunk_id, super().forward_one_chunk, *args, **kwargs)

        def backward_one_chunk(self, bwd_chunk_id, loss=None, full_backward=True, **kwargs):
            kind = B if full_backward else I
            call = super().backward_one_chunk
            return self._time(kind, bwd_chunk_id, call, loss=loss, full_backward=full_backward, **kwargs)

        def backward_weight_one_chunk(self, bwd_chunk_id, **kwargs):
            return self._time(W, bwd_chunk_id, super().backward_weight_one_chunk, **kwargs)

        def _get_init_p2p_neighbors_ops(self):
            """Without messages to this rank itself: torch before 2.13 makes them for V placements, and gloo can't."""
            return [op for op in super()._get_init_p2p_neighbors_ops() if op.group_peer != self.group_rank]

        def _time(self, kind, chunk, call, *args, **kwargs):
            action = Action(self.stage_index, kind, chunk)
            settle(device, job.pace_s)
            start = mark()
            with span(action), paced(device, job.pace_s and job.pace_s[kind][self.stage_index]):
                made = call(chunk, *args, **kwargs)
            times[action] = (start, mark())
            return made

        def get_fwd_recv_ops(self, chunk):
            return self._queued(RECV_F, chunk, super().get_fwd_recv_ops(chunk))

        def get_fwd_send_ops(self, chunk):
            return self._queued(SEND_F, chunk, super().get_fwd_send_ops(chunk))

        def get_bwd_recv_ops(self, chunk):
            return self._queued(RECV_B, chunk, super().get_bwd_recv_ops(chunk))

        def get_bwd_send_ops(self, chunk):
            return self._queued(SEND_B, chunk, super().get_bwd_send_ops(chunk))

        def _queued(self, kind, chunk, ops):
            if messages:
                for op in ops:
                    op.op = partial(messages.post, Action(self.stage_index, kind, chunk), op.op)
            return ops

    group = context.group("all", range(context.num_ranks)) if device.type == "cuda" else None
    stages = [Timed(module, index, schedule.num_stages, device, group=group) for index, module in modules.items()]
    options = {"loss_fn": job.workload.loss, "scale_grads": job.loss_scale != 1}
    name = CLASSES.get(schedule.name)
    if name is None or rows is not None:
        runner = _PipelineScheduleRuntime(stages, schedule.num_microbatches, **options)
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder, "schedule.csv")
            if rows is None:
                path.write_text(schedule.to_csv())
                runner._load_csv(str(path))
            else:
                path.write_text(text.write_csv(_with_reductions(rows)))
                runner._load_csv(str(path), format="compute_comms")
        return runner
    only_one = schedule.num_stages == schedule.num_ranks and name in ("ScheduleGPipe", "Schedule1F1B")
    return getattr(pipelining, name)(stages[0] if only_one else stages, schedule.num_microbatches, **options)


def _with_reductions(rows: Sequence[LoweredRow]) -> list[list[object]]:
    """The rows with `REDUCE_GRAD` of every stage at their ends, where torch divides gradients by the microbatches."""
    stages = [dict.fromkeys(a.stage for item in row for a in parts(item) if a.kind in (F, B, I, W)) for row in rows]
    return [[*row, *(f"{stage}REDUCE_GRAD" for stage in own)] for row, own in zip(rows, stages, strict=True)]


class _Messages:
    """A rank's sends and receives, one after the other: each begins when the one before it has passed."""

    def __init__(self, recorder: Recorder):
        self._recorder, self._posted = recorder, SimpleQueue()
        threading.Thread(target=self._pass, daemon=True).start()

    def post(self, action: Action, op: Callable, tensor: torch.Tensor, **options: object) -> _Message:
        """Take the place of `isend` or `irecv`, which will be called when the message's turn has come."""
        if "group_src" in options and action.kind in (SEND_F, SEND_B):  # torch takes what isn't its isend for a receive
            options["group_dst"] = options.pop("group_src")
        message = _Message()
        self._posted.put((message, action, partial(op, tensor, **options)))
        return message

    def close(self) -> None:
        """End the thread."""
        self._posted.put(None)

    def _pass(self) -> None:
        while (posted := self._posted.get()) is not None:
            message, action, start = posted
            begun = self._recorder.clock.mark()
            try:
                start().wait()
                self._recorder.other(action, begun, self._recorder.clock.mark())
            except Exception as error:  # whoever waits for the message raises it
                message.error = error
            message.passed.set()


class _Message:
    """What torch waits for in place of gloo's work."""

    def __init__(self):
        self.passed, self.error = threading.Event(), None

    def wait(self) -> None:
        """Wait until the message has passed. Raises what sending or receiving raised."""
        self.passed.wait()
        if self.error is not None:
            raise self.error
