"""What a report says of e4m3's scales: zeros, outliers, and what they cost the rest of a row."""

import ml_dtypes
import numpy as np
import pytest

from graphs.parity.compare import ReplayCase
from graphs.parity.fp8_stats import activation_stats, weight_stats

CASE = ReplayCase("dense_000_prefill", "dense", 0, "prefill")


def test_a_row_of_zeros_has_the_least_scale_and_loses_nothing() -> None:
    stats = activation_stats(CASE, "mlp.down", np.zeros((1, 4), np.float32))
    assert (stats.rows, stats.floor_rows, stats.at_peak, stats.flushed) == (1, 1, 0, 0)
    assert stats.log2_scale == [(-100, 1)]  # 1e-30


def test_a_row_with_a_million_keeps_its_peak_and_loses_what_is_small() -> None:
    row = np.array([[1e6, 1.0, 0.5, 0.0, -1e6]], np.float32)
    stats = activation_stats(CASE, "mlp.down", row)
    assert (stats.values, stats.at_peak, stats.flushed, stats.floor_rows) == (5, 2, 2, 0)
    assert stats.log2_scale == [(11, 1)]  # 1e6 / 448 = 2232


def test_a_rows_scale_is_counted_in_its_power_of_two() -> None:
    rows = np.array([[448.0], [447.0], [896.0]], np.float32)
    stats = activation_stats(CASE, "mlp.down", rows)
    assert stats.log2_scale == [(-1, 1), (0, 1), (1, 1)] and stats.at_peak == 3


def test_a_weights_rows_are_its_output_channels() -> None:
    codes = np.array([[448, 1, 0], [-448, 448, 2]]).astype(ml_dtypes.float8_e4m3fn)
    stats = weight_stats(CASE, "mlp.down", codes, np.array([0.5, 0.25, 0.25], np.float32))
    assert (stats.values, stats.at_peak, stats.rows) == (6, 3, 3)
    assert stats.log2_scale == [(-2, 2), (-1, 1)]
    assert (stats.case, stats.layer, stats.module, stats.kind) == (
        "dense_000_prefill",
        0,
        "mlp.down",
        "weight",
    )


def test_stats_are_of_a_layer() -> None:
    with pytest.raises(AssertionError):
        activation_stats(
            ReplayCase("head", "head", None, None), "lm_head", np.ones((1, 1), np.float32)
        )
