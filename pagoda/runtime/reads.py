"""Finds what a module's forward reads: its own parameters, and parameters of submodules that it reads without calling
them.

torch's attention passes `self.out_proj.weight` on, Mamba's mixer the weights of its convolution, and models that tie by
hand call `linear(x, self.embedding.weight)`. Only their source shows this in advance.
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
"""Attributes of a tensor that placeholders have too."""


def has_forward(module: nn.Module) -> bool:
    """False for modules that only hold parameters or modules, such as torch's lists."""
    return "forward" in vars(module) or type(module).forward is not nn.Module.forward


def params_read_in(module: nn.Module, name: str = "") -> Iterator[tuple[str, nn.Parameter]]:
    """Parameters that a module's forward reads, with names: its own, those of children without a forward, and those
    that its source names. A parameter may come twice."""
    for short, param in module.named_parameters(recurse=False):
        yield join(name, short), param
    for short, child in module.named_children():
        if not has_forward(child):
            yield from params_read_in(child, join(name, short))
    kind: type = type(module)
    for path in _paths_read_by(kind, "forward"):
        found = _param_at(module, path) if "." in path else None
        if found is not None:
            yield join(name, path), found


def methods_reading_params(module: nn.Module) -> dict[str, list[nn.Parameter]]:
    """Public methods of a module's class, other than torch's and `forward`, that read parameters of the module or its
    children and write none. Returns name -> parameters."""
    kind: type = type(module)
    found: dict[str, list[nn.Parameter]] = {}
    for method in _public_methods(kind):
        paths = _paths_read_by(kind, method)
        read = {path: param for path in paths if (param := _param_at(module, path)) is not None}
        written = [path for path in read for other in paths if other.startswith(f"{path}.") and other.endswith("_")]
        if read and not written:
            found[method] = [*read.values()]
    return found


@cache
def _public_methods(kind: type) -> tuple[str, ...]:
    """Public methods of classes with a forward. Mixins, such as those of transformers models with hundreds of methods,
    are left out."""
    bases = [base for base in kind.__mro__ if getattr(base, "forward", nn.Module.forward) is not nn.Module.forward]
    methods = {name: method for base in reversed(bases) for name, method in vars(base).items()}
    return tuple(
        name
        for name, method in methods.items()
        if inspect.isfunction(method)
        and not name.startswith("_")
        and not method.__module__.startswith("torch.")
        and not hasattr(nn.Module, name)
        and not inspect.isgeneratorfunction(method)
        and not inspect.iscoroutinefunction(method)
    )


def _param_at(module: nn.Module, path: str) -> nn.Parameter | None:
    holder, _, short = path.rpartition(".")
    try:
        return module.get_submodule(holder)._parameters.get(short)
    except AttributeError:
        return None


@cache
def _paths_read_by(kind: type, method: str) -> tuple[str, ...]:
    """Paths below a module of this class whose value a method reads, itself or through calls on `self`, such as
    ("out_proj.weight",). A path that is written to appears once more with a call that ends in "_", such as
    "weight.fill_"."""
    found: dict[str, None] = {}
    methods = [method]
    for method in methods:  # which grows
        function = _function(kind, method)
        if function is None or not function.args.args:
            continue
        parents = {child: node for node in ast.walk(function) for child in ast.iter_child_nodes(node)}
        for node in parents:
            path = _path_from(node, function.args.args[0].arg)
            if path is None:
                continue
            if inspect.isfunction(getattr(kind, path, None)):
                if path not in methods:
                    methods.append(path)
            elif _takes_value(node, parents):
                found[path] = None
                found.update(dict.fromkeys(_writes(path, node, parents[node])))
    return tuple(found)


def _function(kind: type, method: str) -> ast.FunctionDef | None:
    try:
        source = textwrap.dedent(inspect.getsource(inspect.unwrap(getattr(kind, method))))
        (function,) = ast.parse(source).body
    except (OSError, TypeError, SyntaxError, ValueError, AttributeError):
        return None  # there is no source
    return function if isinstance(function, ast.FunctionDef) else None


def _path_from(node: Any, name: str) -> str | None:
    """The path of `name.a.b` as "a.b". None for any other expression."""
    attributes = []
    while isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load):
        attributes.append(node.attr)
        node = node.value
    return ".".join(reversed(attributes)) if attributes and isinstance(node, ast.Name) and node.id == name else None


def _takes_value(node: ast.AST, parents: dict[ast.AST, ast.AST]) -> bool:
    """Whether an expression uses a tensor's value, and not only its shape, dtype, device or presence."""
    around = parents[node]
    if isinstance(around, ast.Attribute):
        return around.attr not in _NO_VALUE
    if isinstance(around, ast.Call) and isinstance(around.func, ast.Name):
        return around.func.id not in ("isinstance", "hasattr", "len")
    if isinstance(around, ast.Compare):
        return not all(isinstance(op, ast.Is | ast.IsNot) for op in around.ops)
    return True


def _writes(path: str, node: ast.AST, around: ast.AST) -> Iterator[str]:
    """A path that ends in "_" if the tensor is assigned to in part, or passed to a function whose name ends in "_"."""
    if isinstance(around, ast.Attribute | ast.Subscript) and isinstance(around.ctx, ast.Store):
        yield f"{path}._"
    if isinstance(around, ast.Call) and node in around.args:
        name = getattr(around.func, "attr", getattr(around.func, "id", ""))
        if name.endswith("_"):
            yield f"{path}.{name}"


def join(prefix: str, name: str) -> str:
    """The qualified name of something in the module `prefix`."""
    return f"{prefix}.{name}" if prefix else name
