import sys
from pathlib import Path

import pytest

from pagoda.errors import ConfigError
from pagoda.forecast.draw import KINDS, draw
from pagoda.simulate.timeline import Span, Timeline

STEP = Timeline(
    1.0,
    (Span("compute", "forward layers.0", 0.0, 0.5), Span("h2d", "fetch layers.1", -0.2, 0.5, 1 << 20)),
    {"h2d": 0.1},
    {"device": ((0.0, 1 << 30), (0.5, 2 << 30)), "ssd": ((0.0, 1 << 30),)},
)


def test_a_picture_has_every_kind_of_work_in_its_colour(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    from matplotlib.colors import to_rgb
    from matplotlib.image import imread

    path = tmp_path / "step.png"
    draw(STEP, {"device": 3 << 30, "ssd": 100 << 30}, "a step", path)
    picture = imread(path)
    assert picture.shape[0] > 200
    assert picture.shape[1] > 800
    for kind in ("forward", "fetch"):
        near = abs(picture[..., :3] - to_rgb(KINDS[kind])).max(axis=-1) < 0.01
        assert near.mean() > 0.005, kind
    assert not (abs(picture[..., :3] - to_rgb(KINDS["write"])).max(axis=-1) < 0.01).any()


def test_a_path_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    with pytest.raises(ConfigError, match=r"--plot .*not-there"):
        draw(STEP, {}, "a step", tmp_path / "not-there" / "step.png")


def test_without_matplotlib_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ConfigError, match=r"pagoda-train\[plot\]"):
        draw(STEP, {}, "a step", tmp_path / "step.png")
