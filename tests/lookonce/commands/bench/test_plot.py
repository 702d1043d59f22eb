"""The plot of a run is a well-formed SVG file with a dot for each answer."""

from __future__ import annotations

from xml.etree import ElementTree

import pytest

from lookonce.commands.bench.load import Measured
from lookonce.commands.bench.plot import svg
from tests.lookonce.commands.bench.test_report import answered

_NAME = "{http://www.w3.org/2000/svg}"
_NUM_LEGENDS = 4


@pytest.mark.parametrize(
    "measured",
    [
        [answered(0.1 * number, 0.5 + number, encoded=number % 2) for number in range(9)],
        [answered(0.0, 1e-4)],
        [Measured(0.0, 1.0, None, False, 0, None, "x")],
    ],
)
def test_each_answer_has_a_dot_inside_of_the_frame(measured: list[Measured]) -> None:
    root = ElementTree.fromstring(svg(measured, "reuse < 5 & more"))
    assert root.findtext(f"{_NAME}title") == "reuse < 5 & more"
    circles = root.findall(f"{_NAME}circle")[:-_NUM_LEGENDS]
    assert len(circles) == sum(one.usage is not None for one in measured)
    frame = root.findall(f"{_NAME}rect")[1].attrib
    for circle in circles:
        for place, start, length in (("cx", "x", "width"), ("cy", "y", "height")):
            assert 0 <= float(circle.attrib[place]) - float(frame[start]) <= float(frame[length])
    assert len(root.findall(f"{_NAME}polyline")) == 2
