"""Tests of `parameters` wrap models as those of `runtime` do."""

from runtime.conftest import _no_hooks_left, lanes_keep_up, wrap  # noqa: F401
