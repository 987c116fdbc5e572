"""The trackers of `--report-to`: those of transformers' trainer."""

from pathlib import Path
from typing import Any

from rich.console import Console
from transformers import TrainerCallback
from transformers.integrations import get_reporting_integration_callbacks

from pagoda.console import say
from pagoda.errors import ConfigError
from pagoda.mesh.mesh import Mesh
from pagoda.mesh.sharing import from_first


class Tracker(TrainerCallback):  # type: ignore[misc]
    """Sends figures to a tracker. One that fails after its start is left out from then on."""

    def __init__(self, name: str, mesh: Mesh, console: Console) -> None:
        """Raises ConfigError if its package is missing."""
        self._name, self._mesh, self._console = name, mesh, console
        self.folder: tuple[Path, int] | None = None
        """Where TensorBoard writes, and the first step of this run. It drops what other files there have of later
        steps."""
        try:
            (kind,) = get_reporting_integration_callbacks([name])
            self._inner: Any = kind()
        except Exception as error:  # of another package, which may raise anything
            raise ConfigError(f"--report-to {name} cannot be used: {error}") from error

    def on_train_begin(self, *args: Any, **kwargs: Any) -> None:
        """Start it on the first rank. Raises ConfigError, so that a wrong key ends the run before its first step."""

        def start() -> None:
            try:
                if self._name == "tensorboard" and self.folder is not None:
                    from torch.utils.tensorboard import SummaryWriter

                    folder, step = self.folder
                    self._inner.tb_writer = SummaryWriter(str(folder), purge_step=step)
                self._inner.on_train_begin(*args, **kwargs)
            except Exception as error:
                raise ConfigError(
                    f"--report-to {self._name} cannot be started: {type(error).__name__}: {error}"
                ) from error

        from_first(self._mesh, "a tracker", start)

    def on_log(self, *args: Any, **kwargs: Any) -> None:
        """Log figures."""
        self._do("on_log", *args, **kwargs)

    def on_train_end(self, *args: Any, **kwargs: Any) -> None:
        """End it."""
        self._do("on_train_end", *args, **kwargs)

    def _do(self, event: str, *args: Any, **kwargs: Any) -> None:
        if self._inner is None or self._mesh.everyone.rank:
            return
        try:
            getattr(self._inner, event)(*args, **kwargs)
        except Exception as error:
            self._inner = None
            why = f"--report-to {self._name} fails: {type(error).__name__}: {error}"
            say(self._console, f"{why}. The run continues without it")
