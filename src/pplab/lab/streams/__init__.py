"""What takes turns beside the ranks' rows: copies to the host, passes that all ranks make together, the queues of NCCL
and of lowered rows, sends that are waited for.

Chapters 5, 8, 11 and 14 use it, and the page on what hangs. All that has times runs on the package's one loop.
`GpuMachine` has none: there a kernel takes whatever place is free on its GPU, where a row has its order beforehand.
"""

from ...optional import lazily

__all__, __getattr__, __dir__ = lazily(
    __name__,
    {
        "gpu_calls": "host_calls",
        "gpu_machine": "GpuMachine hanging_waits",
        "offload": "Offload Offloaded leaving_of offloaded_row",
        "queues": "compute_of parse_lowered simulate_lowered",
        "sends": "SENDS posted simulate_sends",
        "vocabulary": "VocabularyParallel vocabulary_row",
    },
)
