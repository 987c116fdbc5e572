"""Files of settings: `run.yaml` of a run, and what `pagoda train --config` starts another run from."""

import re
from pathlib import Path
from typing import Any

from pagoda.errors import ConfigError
from pagoda.memory.files import read_regular
from pagoda.train.config import TrainConfig

_NOT_SETTINGS = ("output_dir", "resume_from_checkpoint", "trace", "config")
"""Arguments that belong to one command. They are not copied to another run."""
_MOST_BYTES = 1 << 20
_NUMBER = "tag:yaml.org,2002:float", re.compile(r"^[-+]?(\d+\.?\d*|\.\d+)[eE][-+]?\d+$"), list("-+.0123456789")
"""The number format of YAML 1.2, in which 2e-5 is a number. In YAML 1.1, it is a text."""


def read_settings(path: Path) -> TrainConfig:
    """Read a file of settings.

    Raises ConfigError if it cannot be read, or if a setting in it is unknown or has the wrong type.
    """
    settings = read_yaml(path)
    try:
        return TrainConfig.from_settings(settings)
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from error


def read_yaml(path: Path) -> Any:
    """The contents of a file of settings. Raises ConfigError if it cannot be read or is not YAML."""
    import yaml

    class Loader(yaml.SafeLoader):  # type: ignore[misc]
        pass

    Loader.add_implicit_resolver(*_NUMBER)
    try:
        return yaml.load(read_regular(path, most_bytes=_MOST_BYTES), Loader=Loader)
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror or error}: name a file of settings") from error
    except Exception as error:  # a value that does not fit its tag raises errors of many types
        raise ConfigError(f"{path} is not YAML: {' '.join(str(error).split())}") from error


def settings_as_yaml(config: TrainConfig) -> str:
    """All settings of a run except its directory, in the format that `read_settings` reads."""
    import yaml

    class Dumper(yaml.SafeDumper):  # type: ignore[misc]
        pass

    Dumper.add_implicit_resolver(*_NUMBER)  # a text that looks like a number gets quotes
    settings = {k: v for k, v in config.settings().items() if k not in _NOT_SETTINGS}
    text: str = yaml.dump(settings, Dumper=Dumper, sort_keys=False, allow_unicode=True)
    return text
