"""The papers' closed forms, as oracles for the simulator. Imports nothing.

P ranks, M microbatches, V stages per rank; F, I, W the durations of one stage's forward, input
gradient and weight gradient, B = I + W; c the latency of a message between ranks. Times are in the
unit of the durations, and a bubble that isn't said to be a fraction or a ratio is idle time per
rank.

>>> one_f_one_b_makespan(P=4, M=8, F=1, B=2), bubble_fraction(P=4, M=8), bubble_ratio(P=4, M=8)
(33, 0.2727272727272727, 0.375)
>>> slow = dict(P=4, M=8, F=1, B=2, c=0.5)
>>> one_f_one_b_makespan(**slow), eager_one_f_one_b_makespan(**slow)
(41.0, 36.0)
>>> one_f_one_b_peak_in_flight(P=4, M=8)
(4, 3, 2, 1)
>>> sliced_makespan(P=4, M=8, k=1, F=0.5, B=1, V=2), zb_h1_bubble(P=4, F=1, I=1, W=1)
(28.5, 3)
>>> dualpipe_idle(4, 2, 1, 3)
2.0
"""


def floor_makespan(P: int, M: int, F: float, B: float) -> float:
    """No order of one stage per rank with a full backward is faster: the last rank starts after P-1
    forwards, works M(F+B), and after its last backward P-1 more follow.
    """
    return (M + P - 1) * (F + B)


def naive_makespan(P: int, M: int, F: float, B: float, c: float = 0) -> float:
    """One microbatch at a time, through all ranks and back."""
    return M * (P * (F + B) + 2 * (P - 1) * c)


def gpipe_makespan(P: int, M: int, F: float, B: float, c: float = 0) -> float:
    """GPipe (Huang et al. 2019): fill and drain once for the forwards, once for the backwards."""
    return (M + P - 1) * (F + B) + 2 * (P - 1) * c


def one_f_one_b_makespan(P: int, M: int, F: float, B: float, c: float = 0) -> float:
    """1F1B with latency, for P dividing M: every group of P microbatches waits for one round
    trip.
    """
    if M % P and c:
        raise ValueError(f"the closed form with latency needs P to divide M, got P={P}, M={M}")
    return (M + P - 1) * (F + B) + (c * (2 * (P - 1) * M // P + 2 * (P - 2)) if P > 1 else 0)


def waiting_one_f_one_b_makespan(P: int, M: int, F: float, B: float, c: float = 0) -> float:
    """1F1B whose ranks stand still for what they send, as Megatron-LM's and torch's Schedule1F1B.
    For M >= P.

    >>> slow = dict(P=4, M=8, F=1, B=2, c=1)
    >>> waiting_one_f_one_b_makespan(**slow), one_f_one_b_makespan(**slow)
    (52, 49)
    """
    if M < P or c > min(F, B):
        raise ValueError(
            f"the closed form holds for M >= P and c <= min(F, B), got P={P}, M={M}, F={F}, B={B}, "
            f"c={c}"
        )
    return (M + P - 1) * (F + B) + c * (2 * (M + P) - 5 if P > 2 else (P - 1) * (M + 1))


def eager_one_f_one_b_makespan(P: int, M: int, F: float, B: float, c: float = 0) -> float:
    """Eager 1F1B hides the latency when c is at most (F + B) / 2; beyond that the form doesn't
    hold.
    """
    if 2 * c > F + B:
        raise ValueError(f"the closed form holds for c <= (F + B) / 2 = {(F + B) / 2}, got c={c}")
    return (M + P - 1) * (F + B) + 2 * (P - 1) * c


def bubble_fraction(P: int, M: int, V: int = 1) -> float:
    """Idle over total rank-time: (P-1) / (VM + P-1). GPipe and 1F1B at V = 1, interleaved 1F1B
    above, all without latency.
    """
    return (P - 1) / (V * M + P - 1)


def bubble_ratio(P: int, M: int, V: int = 1) -> float:
    """Idle over ideal: (P-1) / (VM)."""
    return (P - 1) / (V * M)


def one_f_one_b_peak_in_flight(P: int, M: int) -> tuple[int, ...]:
    """Per rank s: P - s, or M when there are fewer microbatches."""
    return tuple(min(P - s, M) for s in range(P))


def eager_one_f_one_b_peak_in_flight(P: int, M: int) -> tuple[int, ...]:
    """Per rank s: 2(P-s)-1, or M when there are fewer microbatches."""
    return tuple(min(2 * (P - s) - 1, M) for s in range(P))


def sliced_makespan(P: int, M: int, k: int, F: float, B: float, V: int = 1) -> float:
    """Seq1F1B (Sun et al. 2024) with k slices of equal times, and at V = 1 TeraPipe (Li et al.
    2021); F and B of a whole microbatch, of one of the V stages. Without latency, for M >= 1, and
    kM >= P where V > 1.

    The bubble is that of 1F1B with microbatches of a k-th: (P-1)(F+B)/k. Found by simulating. With
    k = 1 it is interleaved 1F1B's (Narayanan et al. 2021), who have it for P dividing M; with even
    groups, larger ones first, it holds for every M of at least P.
    """
    if V > 1 and k * M < P:
        raise ValueError(f"the closed form needs at least P slices, got P={P}, k={k}, M={M}")
    return (k * V * M + P - 1) * (F + B) / k


def sliced_peak_in_flight(P: int, M: int, k: int) -> tuple[float, ...]:
    """Seq1F1B with one stage per rank: per rank s, in whole microbatches' activations, (P-s+k-1)/k,
    at most M.

    >>> sliced_peak_in_flight(P=4, M=8, k=2), sliced_peak_in_flight(P=4, M=8, k=4)
    ((2.5, 2.0, 1.5, 1.0), (1.75, 1.5, 1.25, 1.0))
    """
    return tuple(min(P - s + k - 1, k * M) / k for s in range(P))


def zb_h1_bubble(P: int, F: float, I: float, W: float) -> float:  # noqa: E741
    """ZB-H1 (Qi et al. 2023): idle time per rank, for W <= I and at least P microbatches. 1F1B's is
    (P-1)(F+I+W).

    The paper's form is (P-1)(F+I-W), for W <= F as well: a weight gradient fills no more than the
    gap it is put in.
    """
    return (P - 1) * max(I, F + I - W)


def zb_h2_makespan(P: int, M: int, F: float, I: float, W: float) -> float:  # noqa: E741
    """ZB-H2: whatever the spans, the last rank starts after P-1 forwards. For W <= F, W <= I and M
    >= 2P.
    """
    return M * (F + I + W) + (P - 1) * max(F, F + I - 2 * W)


def dualpipe_idle(PP: int, B: float, W: float, overlapped: float) -> float:
    """DualPipe and DualPipeV (DeepSeek-AI 2024): idle time per rank, for F = I >= W and at least 2P
    microbatches.

    PP is the number of stages: P, and 2P for DualPipeV. `overlapped` is the duration of a forward
    and a backward at once, at least that of the backward.
    """
    return (PP / 2 - 1) * (overlapped + B - 3 * W)


def paired_peak_in_flight(P: int, M: int, V: int = 1) -> tuple[int, ...]:
    """Interleaved 1F1B in pairs, per rank r, in stages: 2(P-r) + (V-1)P, one more than interleaved
    1F1B; never more than MV.
    """
    return tuple(min(2 * (P - r) + (V - 1) * P, M * V) for r in range(P))


def message_time(size: float, latency: float, bandwidth: float) -> float:
    """A message of `size`: what it takes whatever its size, and what its size takes (the alpha-beta
    model).
    """
    return latency + size / bandwidth


def ring_all_reduce_time(n: int, size: float, latency: float, bandwidth: float) -> float:
    """All of n ranks get the sum of their `size`: a reduce-scatter and an all-gather, n-1 messages
    of size/n each.

    >>> ring_all_reduce_time(n=8, size=1e9, latency=10e-6, bandwidth=100e9)
    0.01764
    """
    return 2 * ring_gather_time(n, size, latency, bandwidth)


def ring_gather_time(n: int, size: float, latency: float, bandwidth: float) -> float:
    """An all-gather, or a reduce-scatter, of what is `size` in all: n-1 messages of size/n around
    the ring.
    """
    return (n - 1) * message_time(size / n, latency, bandwidth)


def sharded_step(
    passes: int, forward: float, backward: float, gather: float, reduce: float, *, zero: int = 3
) -> float:
    """Replicas that store parts (Rajbhandari et al. 2020): a step of `passes` forwards and
    backwards, phase by phase.

    A phase lasts as long as its work, or as what is sent beside it. FSDP (`zero` 3) gathers the
    weights beside every forward and once more beside every backward, which also hides the
    gradients' reduce-scatter. ZeRO-2 keeps the weights that it gathered beside the first forward;
    ZeRO-1 also reduces once, beside the last backward.

    >>> [sharded_step(2, 1, 2, 0.5, 2, zero=zero) for zero in (3, 2, 1)]
    [7.0, 6, 6]
    """
    whole = zero == 3
    return sum(
        max(forward, gather * (whole or at == 0))
        + max(backward, gather * whole + reduce * (zero > 1 or at == passes - 1))
        for at in range(passes)
    )


def free_bandwidth(n: int, parameters: float, forward: float, g: float = 2, r: float = 2) -> float:
    """From so many bytes per second on, FSDP over n ranks takes as long as its work: `forward` in
    seconds, of what is computed per gather; its backward takes two. A parameter travels in g bytes,
    and in r as a gradient.
    """
    return (n - 1) / n * parameters / forward * max(g, (g + r) / 2)


def free_tokens(n: int, flops: float, bandwidth: float, g: float = 2, r: float = 2) -> float:
    """The same as tokens per rank and gather, at two FLOPs per parameter and token in a forward.

    >>> free_tokens(64, 400e12, 50e9), free_tokens(64, 400e12, 50e9, r=4)
    (7875.0, 11812.5)
    """
    return (n - 1) / n * flops / (2 * bandwidth) * max(g, (g + r) / 2)


def mfu(flops: float, step_s: float, gpus: int, peak: float) -> float:
    """Model FLOP utilisation (Chowdhery et al. 2022): the share of the GPUs' `peak`, in FLOP/s
    each, that goes into the model's own `flops` of a step; what is computed again doesn't count.

    >>> round(mfu(flops=6 * 8e9 * 2**17, step_s=4, gpus=4, peak=989e12), 4)
    0.3976
    """
    return flops / (step_s * gpus * peak)
