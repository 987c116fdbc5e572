"""Built-in model shapes, and builders that make a model from a name or a directory."""

from pagoda.models.build import build_model, layer_count
from pagoda.models.shapes import SHAPES, Shape

__all__ = ["SHAPES", "Shape", "build_model", "layer_count"]
