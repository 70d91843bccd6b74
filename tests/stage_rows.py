"""What rows of `make gpu` and `make bench` must be by construction, whatever the times are."""

from __future__ import annotations

import pytest

from pplab.lab import results


def stages_are_sane(rows: list[dict], paces: dict[str, tuple[str, ...]]) -> None:
    """Of the part stages: dtypes, and what can set their pace."""
    assert [(row["dtype"], row["width"], row["tokens"]) for row in rows] == [
        (dtype, 16, tokens) for dtype in paces for tokens in (16, 32)
    ]
    for row in rows:
        assert row["flops"]["I"] + row["flops"]["W"] == row["flops"]["B"] == 2 * row["flops"]["F"]
        assert row["rounds"] >= 3 and row["layers"] == 2 and min(row["ms"].values()) > 0
        assert row["pace"] in paces[row["dtype"]] and (row["hosts_share"] is None) == (row["pace"] == "core")
        for kind, rate in row["tflops"].items():
            assert rate * row["ms"][kind] * 1e9 == pytest.approx(row["flops"][kind])
        for low, middle, high in row["ratios"].values():
            assert 0 < low <= middle <= high
    assert rows[1]["flops"]["F"] == 2 * rows[0]["flops"]["F"]  # twice the tokens in sequences as long


def copies_are_sane(recording: results.Recording) -> None:
    """Of copies one way, the other, and both."""
    assert [row["ways"] for row in recording.rows("copies")] == ["out", "back", "out and back"]
    for row in recording.rows("copies"):
        assert row["slower"] == row["beside_ms"] / row["compute_ms"]
        assert row["alone_gb_per_s"] > 0 < row["beside_gb_per_s"]
