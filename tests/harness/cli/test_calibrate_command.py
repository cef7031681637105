"""What `harness calibrate` says of constants that times alone do not tell."""

from __future__ import annotations

from harness.cli.calibrate import _size_note
from simulators.calibration.fit import Fit
from simulators.calibration.model import Constants


def fit(**intervals: tuple[float, float] | None) -> Fit:
    return Fit(Constants(model_bytes=8e6, service_bytes_per_second=1e8), intervals, {}, {}, 24, 0.03)


def test_where_only_the_time_of_a_transfer_is_known_the_option_is_named() -> None:
    both = fit(model_bytes=(1.5e3, 4e11), service_bytes_per_second=(1.9e4, 5e12))
    assert _size_note(both).startswith("times tell how long a server takes to send the model, 0.08 s, and neither")
    assert "give --model-bytes" in _size_note(both)
    for known in (
        fit(service_bytes_per_second=(1.9e4, 5e12)),  # the size was given
        fit(model_bytes=(7e6, 9e6), service_bytes_per_second=(9e7, 1.1e8)),
        fit(model_bytes=None, service_bytes_per_second=None),
    ):
        assert _size_note(known) == ""
