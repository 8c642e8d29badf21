"""Figures of routing traces: what they show is what the analysis says."""

from typing import Any

import numpy as np
import pytest
from matplotlib.figure import Figure

from moejax.core.config import ModelConfig
from moejax.core.errors import ConfigError
from moejax.report.experiments import save_plots
from moejax.report.routing import (
    co_activation_heatmap,
    load_heatmap,
    load_over_time_plot,
    temporal_locality_plot,
    working_set_plot,
)
from moejax.routing import analysis, locality
from moejax.routing.capture import RoutingCapture
from moejax.routing.generate import generate


@pytest.fixture(scope="module")
def trace() -> RoutingCapture:
    return generate(
        "correlated", num_experts=8, top_k=2, layers=(0, 2), requests=4, prompt_len=8, output_len=30, groups=2
    )


def drawn(figure: Figure | None) -> list[np.ndarray]:
    """The pictures of a figure's heat maps."""
    assert figure is not None
    return [np.asarray(axis.images[0].get_array()) for axis in figure.axes if axis.images]


def test_heat_maps_show_the_loads(trace: RoutingCapture) -> None:
    loads = trace.counts()
    (shown,) = drawn(load_heatmap(trace))
    np.testing.assert_allclose(shown, loads / loads.mean(1, keepdims=True))
    figure = load_heatmap({"one": trace, "two": trace})
    assert len(drawn(figure)) == 2
    assert figure is not None and figure.axes[0].get_title().startswith("one: max/mean")


def test_experts_that_meet_are_neighbours(trace: RoutingCapture) -> None:
    figure = co_activation_heatmap(trace)
    first, last = drawn(figure)
    lift = analysis.co_activation_lift(analysis.co_activation(trace, 0))
    assert figure is not None
    top = figure.axes[0].images[0].norm.vmax
    np.testing.assert_allclose(np.sort(first, axis=None), np.sort(np.clip(lift, 1 / top, top), axis=None))
    for shown in (first, last):
        inside = np.nanmean([shown[:4, :4], shown[4:, 4:]])
        assert inside > 1.3 > 0.8 > np.nanmean(shown[:4, 4:])
    assert len(drawn(co_activation_heatmap(trace, layers=(2,)))) == 1
    with pytest.raises(ConfigError, match="no layer 1"):
        co_activation_heatmap(trace, layers=(1,))


def test_curves_are_the_analysis(trace: RoutingCapture, tiny_config: ModelConfig) -> None:
    figure = working_set_plot(trace, model=tiny_config)
    assert figure is not None
    curve = locality.working_set(trace)
    np.testing.assert_allclose(figure.axes[0].lines[0].get_ydata(), 100 * curve.experts.mean(0) / 8)
    near = locality.temporal_locality(trace)
    figure = temporal_locality_plot({"a": trace})
    assert figure is not None
    np.testing.assert_allclose(figure.axes[0].lines[0].get_ydata(), 100 * near.reuse)
    np.testing.assert_allclose(figure.axes[0].lines[1].get_ydata(), 100 * near.chance)
    (over_time,) = drawn(load_over_time_plot(trace))
    assert over_time.shape == (8, 30)


def test_all_of_them_are_saved(trace: RoutingCapture, tmp_path: Any) -> None:
    result = {"experiment": "routing", "config": {"model": {"name": "small"}}}
    paths = save_plots(result, tmp_path, captures={"a": trace, "b": trace}, model=None)
    names = ["load", "co_activation", "working_set", "temporal_locality", "load_over_time"]
    assert [path.stem for path in paths] == names and all(path.stat().st_size > 5000 for path in paths)


def test_traces_with_nothing_for_a_figure(trace: RoutingCapture, tmp_path: Any) -> None:
    empty = trace.select(np.zeros(trace.num_rows, bool))
    assert save_plots({"experiment": "routing"}, tmp_path, captures=empty, model=None) == []
    one = generate("uniform", num_experts=4, top_k=1, layers=1, requests=2, prompt_len=1, output_len=1)
    assert co_activation_heatmap(one) is None and load_over_time_plot(one) is None
    assert temporal_locality_plot(one) is None
    assert load_heatmap(one) is not None and working_set_plot(one) is not None


def test_pairs_of_many_experts_are_not_drawn() -> None:
    """A table of 32,768 experts by as many would be eight gigabytes."""
    shape = {"top_k": 4, "layers": (0, 1), "requests": 2, "prompt_len": 4, "output_len": 4}
    assert co_activation_heatmap(generate("zipf", num_experts=32768, **shape)) is None
