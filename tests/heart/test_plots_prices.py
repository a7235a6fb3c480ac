"""Pictures of what moving and computing cost: HBM traffic over N, and the price of a FLOP."""

from collections import Counter

import pytest
from pictures import drawn, tagged, words

from fa2_lab.plots import (
    flop_costs,
    hbm_traffic,
)

# HBM traffic ------------------------------------------------------------------------------------------------


def test_traffic_is_what_the_loops_move():
    _, _, data = drawn("hbm_traffic")
    N, d = 16384, 64
    outer = data["M"] // (4 * d)  # 128 rows stay, 64 stream
    T = N // outer
    assert dict(data["over_N"]["standard"]["form"])[N] == 4 * N * N + 4 * N * d
    assert dict(data["over_N"]["FA2"]["form"])[N] == N * d + 2 * T * N * d + N * d + N
    assert dict(data["over_N"]["FA1"]["form"])[N] == 2 * N * d + T * N * (3 * d + 4) + N * (d + 2)


@pytest.mark.parametrize("panel", ["over_N", "over_M"])
def test_the_meter_lies_on_the_closed_form(panel):
    _, _, data = drawn("hbm_traffic")
    for curve in data[panel].values():
        assert len(curve["meter"]) >= 2
        assert all(dict(curve["form"])[x] == y for x, y in curve["meter"])


def test_traffic_lines_and_dots_are_the_data():
    data = drawn("hbm_traffic")[2]
    figure, alt = hbm_traffic.draw(**data | dict(counters=None))
    for ax, panel in zip(figure.axes, ("over_N", "over_M"), strict=True):
        lines = {line.get_label(): line for line in ax.lines}
        for name, curve in data[panel].items():
            for kind in ("form", "meter"):
                assert list(map(tuple, lines[f"{name} {kind}"].get_xydata())) == curve[kind]
        assert len([name for name in lines if not name.startswith("_")]) == 7
        assert [y for _, y in lines["floor"].get_xydata()] == [
            4 * (x if panel == "over_N" else data["N"]) * data["d"] for x, _ in data[panel]["FA2"]["form"]
        ]
    assert "no counters yet" in alt


def test_counters_come_as_crosses_and_their_source_is_named():
    counters = dict(source="H200, FA2", points={"L2": (4096, 3 * 10**7), "DRAM": (2048, 4 * 10**6)})
    figure, alt = hbm_traffic.draw(**drawn("hbm_traffic")[2] | dict(counters=counters))
    crosses = [line for line in figure.axes[0].lines if line.get_marker() == "x"]
    at = {line.get_label().removesuffix(" counter"): tuple(line.get_xydata()[0]) for line in crosses}
    assert at == counters["points"]
    named = {text.get_text(): text.xy for text in figure.axes[0].texts if text.get_text() in at}
    assert named == counters["points"]
    assert "crosses are hardware counters of H200, FA2: L2 30M at N = 4,096, DRAM 4M at N = 2,048" in alt


def test_counts_are_written_short():
    assert [hbm_traffic.short(n) for n in (12, 1_500, 262_144, 4_456_448, 2 * 10**9)] == [
        "12",
        "1.5k",
        "262k",
        "4.46M",
        "2G",
    ]


# The price of a FLOP ----------------------------------------------------------------------------------------


def test_prices_and_clocks_by_hand():
    _, _, data = drawn("flop_costs")
    assert data["prices"]["A100"] == {"matmul": 1, "FP32": 16, "exp": 128}  # 2048 / (2 · 64), 2048 / 16
    assert data["prices"]["H100"] == {"matmul": 1, "FP32": 16, "exp": 256}
    b, c, d = 128, 64, 128
    assert data["clocks"]["A100", "after"]["matmul"] == 4 * b * c * d / 2048
    assert data["clocks"]["H100", "after"]["exp"] == (b * c + b) / 16
    for chip, lanes in (("A100", 64), ("H100", 128)):  # tweak 1 takes out one scaling of b × d, and some of length b
        saved = data["clocks"][chip, "before"]["FP32"] - data["clocks"][chip, "after"]["FP32"]
        assert b * d <= saved * lanes <= b * d + 8 * b
        assert data["clocks"][chip, "before"]["matmul"] == data["clocks"][chip, "after"]["matmul"]


def test_bars_are_as_long_as_they_say():
    figure, _, data = drawn("flop_costs")
    left, right = figure.axes
    ends = Counter(round(bar.get_x() + bar.get_width(), 6) for bar in tagged(left, "price"))
    assert ends == Counter(price for prices in data["prices"].values() for price in prices.values())
    for kind in flop_costs.FILLS:
        lengths = [bar.get_width() for bar in tagged(right, kind)]
        assert lengths == [parts[kind] for parts in data["clocks"].values()]
    assert all(f"{sum(parts.values()):,.0f}" in words(right) for parts in data["clocks"].values())
