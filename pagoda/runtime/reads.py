"""What a module's forward reads: its own parameters, and those below it that it takes without calling their holder.

torch's attention passes `self.out_proj.weight` on, Mamba's mixer the weights of its convolution, and models that tie by
hand say `linear(x, self.embedding.weight)`. Only their source shows that beforehand.
"""

import ast
import inspect
import textwrap
from collections.abc import Iterator
from functools import cache
from typing import Any

from torch import nn

_NO_VALUE = frozenset(
    {"dtype", "device", "shape", "size", "dim", "ndim", "numel", "requires_grad", "is_cuda", "layout", "element_size"}
)
"""Attributes of a tensor that placeholders have, too."""


def has_forward(module: nn.Module) -> bool:
    """False for what only holds others' parameters or modules, such as torch's lists."""
    return "forward" in vars(module) or type(module).forward is not nn.Module.forward


def params_read_in(module: nn.Module, name: str = "") -> Iterator[tuple[str, nn.Parameter]]:
    """Parameters that a module's forward reads, by name: its own, those of children that have no forward, and those
    that its source names. One may come twice."""
    for short, param in module.named_parameters(recurse=False):
        yield _join(name, short), param
    for short, child in module.named_children():
        if not has_forward(child):
            yield from params_read_in(child, _join(name, short))
    kind: type = type(module)
    for path in _paths_read_by(kind):
        holder, _, short = path.rpartition(".")
        try:
            found = module.get_submodule(holder)._parameters.get(short)
        except AttributeError:
            continue
        if found is not None:
            yield _join(name, path), found


@cache
def _paths_read_by(kind: type) -> tuple[str, ...]:
    """Dotted paths, below a module of this class, of which its forward or what that calls on `self` takes the value:
    ("out_proj.weight",)."""
    found: dict[str, None] = {}
    methods = ["forward"]
    for method in methods:  # which grows
        function = _function(kind, method)
        if function is None or not function.args.args:
            continue
        parents = {child: node for node in ast.walk(function) for child in ast.iter_child_nodes(node)}
        for node in parents:
            path = _path_from(node, function.args.args[0].arg)
            if path is None:
                continue
            if "." in path:
                if _takes_value(node, parents):
                    found[path] = None
            elif path not in methods and inspect.isfunction(getattr(kind, path, None)):
                methods.append(path)
    return tuple(found)


def _function(kind: type, method: str) -> ast.FunctionDef | None:
    try:
        source = textwrap.dedent(inspect.getsource(inspect.unwrap(getattr(kind, method))))
        (function,) = ast.parse(source).body
    except (OSError, TypeError, SyntaxError, ValueError, AttributeError):
        return None  # there is no source
    return function if isinstance(function, ast.FunctionDef) else None


def _path_from(node: Any, name: str) -> str | None:
    """The path of `name.a.b` as "a.b"; None for anything else than reading one."""
    attributes = []
    while isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load):
        attributes.append(node.attr)
        node = node.value
    return ".".join(reversed(attributes)) if attributes and isinstance(node, ast.Name) and node.id == name else None


def _takes_value(node: ast.AST, parents: dict[ast.AST, ast.AST]) -> bool:
    """Whether more is taken of a tensor than what it is like, and whether it is there."""
    around = parents[node]
    if isinstance(around, ast.Attribute):
        return around.attr not in _NO_VALUE
    if isinstance(around, ast.Call) and isinstance(around.func, ast.Name):
        return around.func.id not in ("isinstance", "hasattr", "len")
    if isinstance(around, ast.Compare):
        return not all(isinstance(op, ast.Is | ast.IsNot) for op in around.ops)
    return True


def _join(prefix: str, name: str) -> str:
    return f"{prefix}.{name}" if prefix else name
