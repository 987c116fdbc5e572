"""Built-in model shapes, and builders that make a model from a name or a directory."""

from pagoda.models.build import build_model, layer_count
from pagoda.models.shapes import SHAPES, ModelShape

__all__ = ["SHAPES", "ModelShape", "build_model", "layer_count"]
