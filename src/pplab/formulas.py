"""The papers' closed forms, as oracles for the simulator. Imports nothing.

P ranks, M microbatches, V stages per rank; F, I, W the durations of one stage's forward, input gradient and weight
gradient, B = I + W; c the latency of a message between ranks. Times are in the unit of the durations.
"""


def floor_makespan(P, M, F, B):
    """No order of one stage per rank with a full backward is faster: the last rank starts after P-1 forwards, works
    M(F+B), and after its last backward P-1 more follow."""
    return (M + P - 1) * (F + B)


def naive_makespan(P, M, F, B, c=0):
    """One microbatch at a time, through all ranks and back."""
    return M * (P * (F + B) + 2 * (P - 1) * c)


def gpipe_makespan(P, M, F, B, c=0):
    """GPipe (Huang et al. 2019): fill and drain once for the forwards, once for the backwards."""
    return (M + P - 1) * (F + B) + 2 * (P - 1) * c


def one_f_one_b_makespan(P, M, F, B, c=0):
    """1F1B with latency, for P dividing M: every group of P microbatches waits for one round trip."""
    if M % P and c:
        raise ValueError(f"the closed form with latency needs P to divide M, got P={P}, M={M}")
    return (M + P - 1) * (F + B) + (c * (2 * (P - 1) * M // P + 2 * (P - 2)) if P > 1 else 0)


def eager_one_f_one_b_makespan(P, M, F, B, c=0):
    """Eager 1F1B hides the latency when c is at most (F + B) / 2; beyond that the form doesn't hold."""
    if 2 * c > F + B:
        raise ValueError(f"the closed form holds for c <= (F + B) / 2 = {(F + B) / 2}, got c={c}")
    return (M + P - 1) * (F + B) + 2 * (P - 1) * c


def naive_bubble_fraction(P):
    """Idle over total: one rank of P works at a time."""
    return 1 - 1 / P


def bubble_fraction(P, M, V=1):
    """Idle over total rank-time: (P-1) / (VM + P-1). GPipe and 1F1B at V = 1, interleaved 1F1B above, all without
    latency."""
    return (P - 1) / (V * M + P - 1)


def bubble_ratio(P, M, V=1):
    """Idle over ideal: (P-1) / (VM)."""
    return (P - 1) / (V * M)


def gpipe_peak_in_flight(P, M):
    """Per rank: every forward is held until the backwards begin."""
    return (M,) * P


def one_f_one_b_peak_in_flight(P, M):
    """Per rank s: P - s, or M when there are fewer microbatches."""
    return tuple(min(P - s, M) for s in range(P))


def eager_one_f_one_b_peak_in_flight(P, M):
    """Per rank s: 2(P-s)-1, or M when there are fewer microbatches."""
    return tuple(min(2 * (P - s) - 1, M) for s in range(P))
