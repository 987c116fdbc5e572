"""Runs of `pagoda train` in a folder of their own, and what runs leave on an SSD."""

from contextlib import closing
from pathlib import Path
from typing import Any

from pagoda.cli.main import main
from pagoda.memory.arena import Arena
from pagoda.memory.page import PageRun
from pagoda.memory.ssd.committed import open_commit
from pagoda.train.metrics import read_metrics
from tests.memory.ssd_parts import PAGE, Tier, make_checkpoint, make_directory, pattern
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
            write_model(self.model, num_hidden_layers=2)
        self.text.write_text("the quick brown fox jumps over the lazy dog. " * 200)
        self._usual: dict[str, object] = {
            "model": self.model, "data": self.text, "max_steps": STEPS, "per_device_train_batch_size": 2,
            "max_length": 32, "learning_rate": 3e-3, "memory__host": "1MiB", "memory__ssd": self.ssd,
            "precision": "bf16", **usual,
        }  # fmt: skip

    def args(self, out: str, /, *flags: str, **changes: object) -> list[str]:
        """The command line of a run in `out`; `changes` replace flags of the same name. True is a flag by itself."""
        settings = {**self._usual, "output_dir": self.root / out, **changes}
        names = {name: name.replace("__", ".").replace("_", "-") for name in settings}
        given = {f"--{names[name]}": value for name, value in settings.items() if value is not None}
        named = (part for flag, value in given.items() for part in (flag, *[str(value)] * (value is not True)))
        return ["train", *named, *flags]

    def train(self, out: str, /, *flags: str, **changes: object) -> list[dict[str, Any]]:
        """Runs to the end and returns the metrics."""
        assert main(self.args(out, *flags, **changes)) == 0
        return self.metrics(out)

    def resuming(self, out: str, /, *flags: str) -> list[str]:
        """The command line that continues a run, with the directory of its pages."""
        ssd = ["--memory.ssd", str(self.ssd)] if self._usual["memory__ssd"] else []
        return ["train", "--resume-from-checkpoint", "last", "--output-dir", str(self.root / out), *ssd, *flags]

    def metrics(self, out: str) -> list[dict[str, Any]]:
        return read_metrics(self.root / out / "metrics.jsonl")


def curve(metrics: list[dict[str, Any]]) -> list[tuple[object, ...]]:
    """What must not differ by a bit between runs of the same arithmetic."""
    return [(line["step"], line["loss"], line["grad_norm"], line["lr"]) for line in metrics]


class Saved:
    """An SSD directory and a run with two checkpoints of four pages, of which one page changed in between."""

    def __init__(self, root: Path, *drives: str) -> None:
        self.drives = [make_directory(root / drive) for drive in drives or ("ssd",)]
        self.ssd = self.drives[0]
        self.run = root / "run"
        self.references: list[dict[str, Any]] = []
        with Tier(dict.fromkeys(self.drives), 4, PAGE, 8) as tier:
            run = tier.alloc(4)
            for step in (1, 2):
                tier.store(run, 0, pattern(4, 1) if step == 1 else pattern(1, 2))
                with closing(tier.freeze_all()) as frozen:
                    checkpoint = make_checkpoint(self.run / "checkpoints" / f"step-{step}")
                    self.references.append(frozen.commit(*checkpoint))

    def there(self) -> list[bool]:
        """Whether the pages of each checkpoint can still be read."""
        found = []
        for reference in self.references:
            into = Arena(4 * PAGE).view(0, 4 * PAGE)
            try:
                with closing(open_commit(reference)) as pages:
                    pages.load(PageRun(0, 4), 0, into)
                found.append(True)
            except OSError:
                found.append(False)
        return found
