"""Built-in model shapes and the builder that turns a name or a directory into a model."""

from pagoda.models.build import build_model, layer_count
from pagoda.models.shapes import SHAPES, Shape

__all__ = ["SHAPES", "Shape", "build_model", "layer_count"]
