"""Measures this machine, and how long a model's compute takes on it."""

from pagoda.calibrate.machine import calibrate
from pagoda.calibrate.meter import Effort
from pagoda.calibrate.model import ComputeProfiler

__all__ = ["ComputeProfiler", "Effort", "calibrate"]
