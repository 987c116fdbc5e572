"""Runs of `pagoda train` in a folder of their own."""

from pathlib import Path
from typing import Any

from pagoda.cli.main import main
from pagoda.train.metrics import read_metrics
from tests.tiny import write_model

STEPS = 6


class Workspace:
    """A folder with a tiny model, a text, an SSD directory, and runs of `pagoda train` on them. `usual` are flags that
    all runs have."""

    def __init__(self, root: Path, model: Path | None = None, **usual: object) -> None:
        self.root = root
        self.model = model or root / "model"
        self.text = root / "text.txt"
        self.ssd = root / "ssd"
        self.ssd.mkdir()
        if model is None:
            write_model(self.model)
        self.text.write_text("the quick brown fox jumps over the lazy dog. " * 200)
        self._usual: dict[str, object] = {
            "model": self.model, "data": self.text, "steps": STEPS, "batch_size": 2, "seq_len": 32, "optim__lr": 3e-3,
            "memory__host": "1MiB", "memory__ssd": self.ssd, **usual,
        }  # fmt: skip

    def args(self, out: str, /, *flags: str, **changes: object) -> list[str]:
        """The command line of a run in `out`; `changes` replace flags of the same name."""
        settings = {**self._usual, "out": self.root / out, **changes}
        names = {name: name.replace("__", ".").replace("_", "-") for name in settings}
        given = ((f"--{names[name]}", str(value)) for name, value in settings.items() if value is not None)
        return ["train", *(part for pair in given for part in pair), *flags]

    def train(self, out: str, /, *flags: str, **changes: object) -> list[dict[str, Any]]:
        """Runs to the end and returns the metrics."""
        assert main(self.args(out, *flags, **changes)) == 0
        return self.metrics(out)

    def metrics(self, out: str) -> list[dict[str, Any]]:
        return read_metrics(self.root / out / "metrics.jsonl")


def curve(metrics: list[dict[str, Any]]) -> list[tuple[object, ...]]:
    """What must not differ by a bit between runs of the same arithmetic."""
    return [(line["step"], line["loss"], line["grad_norm"], line["lr"]) for line in metrics]
