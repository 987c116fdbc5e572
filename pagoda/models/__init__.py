"""Built-in model shapes, and builders that make a model from a name or a directory."""

from pagoda.models.build import build_model, layer_count
from pagoda.models.shapes import SHAPES, ModelShape

Shape = ModelShape
"""The earlier name of `ModelShape`."""

__all__ = ["SHAPES", "ModelShape", "Shape", "build_model", "layer_count"]
