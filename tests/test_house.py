"""The house stands: imports point down, packages have no cycles, importing is quiet and light."""

import ast
import inspect
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

import pagoda
from tests import mutants
from tests.worlds import mutants as worlds_mutants

ROOT = Path(pagoda.__file__).parent
HOUSE = (
    "cli",
    "train",
    "integrations",
    "forecast",
    "calibrate",
    "api",
    "budgets",
    "optimizer",
    "prepare",
    "checkpoint",
    "models",
    "engine",
    "threads",
    "autograd",
    "ranks",
    "runtime",
    "parameters",
    "mesh",
    "simulate",
    "schedule",
    "plan",
    "optim",
    "config",
    "console",
    "memory",
    "signals",
    "jit",
    "process",
    "interrupts",
    "errors",
)
"""Top to bottom. A part may import itself and what is below it."""
DOORS = ("__init__", "__main__")
"""Above the house: they may import any part, and no part imports them."""
MOST_LINES = 500

MODULES = {
    ".".join(("pagoda", *path.relative_to(ROOT).with_suffix("").parts)): path for path in sorted(ROOT.rglob("*.py"))
}


@cache
def tree_of(module: str) -> ast.Module:
    return ast.parse(MODULES[module].read_text())


def part(module: str) -> str:
    """The part of the house a module is in: `pagoda.plan.units` -> `plan`."""
    return module.split(".")[1] if "." in module else "__init__"


def resolve(name: str) -> str:
    """The file a dotted name is in: the module itself, a package's `__init__`, or the module that defines it."""
    while name not in MODULES and f"{name}.__init__" not in MODULES:
        name = name.rpartition(".")[0]
    return name if name in MODULES else f"{name}.__init__"


def imports(module: str, *, at_import_time: bool = False) -> Iterator[tuple[str, int]]:
    """(module of this package, line) of each import, wherever it stands, or of those run on import only."""

    def visit(node: ast.AST) -> Iterator[ast.AST]:
        for child in ast.iter_child_nodes(node):
            if at_import_time:
                if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
                    continue
                if isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test):
                    continue
            yield child
            yield from visit(child)

    for node in visit(tree_of(module)):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            above = module.split(".")[: -node.level] if node.level else []
            origin = ".".join([*above, *([node.module] if node.module else [])])
            names = [f"{origin}.{alias.name}" for alias in node.names]
        else:
            continue
        for name in names:
            if name.split(".")[0] == "pagoda":
                yield resolve(name), node.lineno


def test_every_module_is_in_a_part_of_the_house() -> None:
    assert {part(module) for module in MODULES} <= {*HOUSE, *DOORS}


def test_imports_point_down_the_house() -> None:
    wrong = []
    for module in MODULES:
        mine = part(module)
        above = set() if mine in DOORS else set(HOUSE[: HOUSE.index(mine)]) | set(DOORS)
        wrong += [f"{module}, line {line}: {target}" for target, line in imports(module) if part(target) in above]
    assert not wrong, "modules import from above"


def test_the_parts_of_the_scheduler_are_its_own() -> None:
    """Others tell the scheduler events, ask it questions, and read its records."""
    parts = {"order", "versions", "gradients", "leases", "checkpoint", "updates", "staleness"}
    reaches = [
        f"{module}, line {node.lineno}: scheduler.{node.attr}"
        for module in MODULES
        if part(module) != "schedule"
        for node in ast.walk(tree_of(module))
        if isinstance(node, ast.Attribute) and node.attr in parts
        if getattr(node.value, "attr", getattr(node.value, "id", "")).endswith("scheduler")
    ]
    assert not reaches, "ask the scheduler"


def test_the_scheduler_does_not_read_what_executors_know() -> None:
    """Parameters and arguments named `payload` pass it on."""
    reads = [
        f"{module}, line {node.lineno}"
        for module in MODULES
        if part(module) == "schedule"
        for node in ast.walk(tree_of(module))
        if isinstance(node, ast.Attribute) and node.attr in ("payload", "delivery")
    ]
    assert not reads


def test_no_modules_import_each_other_in_a_circle() -> None:
    graph = {
        module: {target for target, _ in imports(module, at_import_time=part(module) != "optim")} - {module}
        for module in MODULES
    }
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        pytest.fail(" -> ".join(error.args[1]))


def test_a_plan_imports_neither_the_engine_nor_kernels() -> None:
    """`pagoda plan` trains nothing, and importing them takes a quarter of a second."""
    left = {module for module in MODULES if part(module) == "forecast"}
    seen: set[str] = set()
    while left:
        seen.add(module := left.pop())
        packages = {f"{'.'.join(module.split('.')[:parts])}.__init__" for parts in range(2, module.count(".") + 1)}
        left |= (packages | {target for target, _ in imports(module, at_import_time=True)}) - seen
    assert seen.isdisjoint({"pagoda.engine", "pagoda.jit"})


def test_no_two_classes_have_one_name() -> None:
    """One word, one class: a name says which one is meant."""
    homes: dict[str, list[str]] = {}
    for module in MODULES:
        for node in tree_of(module).body:
            if isinstance(node, ast.ClassDef):
                homes.setdefault(node.name, []).append(module)
    assert not {name: modules for name, modules in homes.items() if len(modules) > 1}


def test_a_module_fits_a_readers_head() -> None:
    lines = {module: len(path.read_text().splitlines()) for module, path in MODULES.items()}
    assert not {module: count for module, count in lines.items() if count > MOST_LINES}


def test_every_module_says_what_it_is() -> None:
    assert not [module for module in MODULES if not ast.get_docstring(tree_of(module))]


def test_every_mutant_fits_the_code() -> None:
    """One whose line has changed would break nothing, and what should notice it could go."""
    places = [(mutant.breaks, (ROOT / mutant.file).read_text(), mutant.old) for mutant in mutants.MUTANTS]
    places += [(one.breaks, inspect.getsource(one.module), one.old) for one in worlds_mutants.MUTANTS]
    assert not [breaks for breaks, source, old in places if source.count(old) != 1]
    tests = {name for mutant in mutants.MUTANTS for name in mutant.tests.split()}
    assert not [name for name in tests if not Path(mutants.ROOT, "tests", name).exists()]


def test_every_public_name_is_explained() -> None:
    unexplained = []
    for name in pagoda.__all__:
        thing = getattr(pagoda, name)
        # A dataclass without a docstring of its own gets its signature for one.
        if not thing.__doc__ or thing.__doc__.startswith(f"{name}("):
            unexplained.append(name)
        for attribute, value in vars(thing).items() if inspect.isclass(thing) else ():
            if inspect.isfunction(value) and not attribute.startswith("_") and not value.__doc__:
                unexplained.append(f"{name}.{attribute}")
    assert not unexplained


def test_importing_pagoda_is_silent_light_and_leaves_the_root_logger_alone() -> None:
    code = """
import logging, sys
root = logging.getLogger()
before = (list(root.handlers), root.level, root.filters)
import pagoda
assert (root.handlers, root.level, root.filters) == before, "the root logger was changed"
heavy = {"transformers", "matplotlib", "tyro", "rich"} & {name.partition(".")[0] for name in sys.modules}
assert not heavy, f"import pagoda imported {heavy}"
import pagoda.api
slow = {"torch._dynamo", "transformers", "matplotlib"} & {*sys.modules}
assert not slow, f"import pagoda.api imported {slow}, which takes seconds"
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True)
    assert (done.stdout, done.stderr) == ("", "")
