"""Where charts put things, and how they write numbers."""

import re

import pytest

from dspark.measure.bench.report_plots import (
    GREY,
    Axis,
    Columns,
    Line,
    PlotRow,
    Scale,
    column_chart,
    line_chart,
    round_ticks,
    row_chart,
    short,
    styles,
)


@pytest.mark.parametrize(
    ("value", "text"),
    [(0, "0"), (1, "1"), (0.5, "0.5"), (1234.6, "1235"), (0.01234, "0.0123"), (200, "200"), (-1.5, "-1.5")],
)
def test_numbers_have_three_digits_and_no_exponent(value, text):
    assert short(value) == text


def test_ticks_are_round_and_inside():
    assert round_ticks(0, 1) == [0, 0.2, 0.4, 0.6, 0.8, 1.0]
    assert round_ticks(0.95, 1.8) == [1.0, 1.2, 1.4, 1.6, 1.8]
    assert all(30 <= tick <= 170 for tick in round_ticks(30, 170))


def test_a_scale_maps_its_ends_to_the_ends_and_holds_values_inside():
    scale = Scale(Axis("x", low=0, high=10), (), 100, 200)
    assert [scale(value) for value in (0, 5, 10, 20, -3)] == [100, 150, 200, 200, 100]


def test_a_doubling_takes_the_same_room_anywhere_on_a_logarithmic_scale():
    scale = Scale(Axis("x", log2=True), (1, 2, 16), 0, 80)
    assert scale(2) - scale(1) == scale(16) - scale(8) == 20
    assert scale.ticks == [1, 2, 4, 8, 16]


def test_an_axis_without_a_given_end_ends_at_a_tick_above_the_data():
    scale = Scale(Axis("y", low=0), (3, 97), 0, 100)
    assert scale.ticks[-1] == 100 and scale(97) == 97


def test_a_single_value_lands_in_the_middle():
    assert Scale(Axis("x"), (5,), 0, 10)(5) == 5


def test_names_keep_colours_apart_and_leave_grey_to_plain():
    found = styles([f"m{n}" for n in range(15)] + ["plain"], grey=("plain",))
    assert found["plain"] == GREY
    assert len(set(found.values())) == 16
    assert all(style % 8 != GREY for name, style in found.items() if name != "plain")


def test_rows_place_dots_by_value_and_shade_the_noise():
    rows = [PlotRow("slow", ((0.5, 0),)), PlotRow("fast", ((1.5, 1),), (1.2, 1.8), note="1.50x")]
    text = row_chart("speed", Axis("speed-up (times)", low=0, high=2), rows, at=1.0, band=0.1)
    dot = float(re.search(r'<circle cx="([\d.]+)"', text)[1])
    level = float(re.search(r'class="at" x1="([\d.]+)"', text)[1])
    band = re.search(r'class="band" x="([\d.]+)" y="\d+" width="([\d.]+)"', text)
    assert dot < level
    assert float(band[1]) + float(band[2]) / 2 == pytest.approx(level, abs=0.1)
    assert "speed-up (times)" in text and "1.50x" in text


def test_segments_stand_end_to_end():
    text = row_chart("time", Axis("ms", low=0, high=10), [PlotRow("a", segments=((4, 0), (6, 1)))])
    boxes = [
        tuple(map(float, found))
        for found in re.findall(r'class="fill s\d" x="([\d.]+)" y="[\d.]+" width="([\d.]+)"', text)
    ]
    assert boxes[0][0] + boxes[0][1] == pytest.approx(boxes[1][0], abs=0.02)
    assert boxes[1][1] / boxes[0][1] == pytest.approx(1.5, rel=0.01)


def test_long_names_are_cut_but_told_in_full():
    name = "a mode with a name that is far too long to be written"
    text = row_chart("speed", Axis("times"), [PlotRow(name, ((1.0, 0),))])
    assert f"<title>{name}</title>" in text and "…" in text


def test_labels_that_would_cover_another_are_left_out():
    near = [Line("a", 0, ((1, 1), (2, 2)), ("1", "4")), Line("b", 1, ((1, 1), (5, 5)), ("1", "4"))]
    text = line_chart("sweep", Axis("tok/s"), Axis("tok/s"), near)
    assert re.findall(r'class="small"[^>]*>(\d)<', text) == ["1", "4", "4"]


def test_columns_are_as_high_as_their_values():
    text = column_chart("hist", Axis("accepted"), Axis("%", low=0), ["0", "1"], [Columns("a", 0, (60.0, 30.0))])
    heights = [float(h) for h in re.findall(r'class="fill s0"[^>]*height="([\d.]+)"', text)]
    assert heights[0] == pytest.approx(2 * heights[1], rel=0.01)
