"""Units partition the parameters of any module tree, top down, and lay each one out flat."""

import pytest
from hypothesis import given, strategies as st

from pagoda.errors import BudgetError
from pagoda.plan.units import ALIGN_ELEMENTS, ModuleSpec, ParamSpec, UnitSpec, discover, enclosing, forward_uses

from .strategies import module_trees

limits = st.integers(0, 4_000)
itemsizes = st.sampled_from([2, 4])


def modules(root: ModuleSpec) -> list[ModuleSpec]:
    return [root, *(module for child in root.children for module in modules(child))]


def weight_bytes(module: ModuleSpec, itemsize: int) -> int:
    return sum(param.numel for param in module.walk()) * itemsize


def names(unit: UnitSpec) -> set[str]:
    return {slot.param.name for slot in unit.slots}


@given(module_trees, limits, itemsizes)
def test_units_are_consecutive_parameters_of_whole_modules_within_the_limit_aligned_with_trainable_ones_first(
    root: ModuleSpec, limit: int, itemsize: int
) -> None:
    units = discover(root, limit, itemsize)
    position = {param.name: place for place, param in enumerate(root.walk())}
    placed = [sorted(position[slot.param.name] for slot in unit.slots) for unit in units]
    assert [place for stretch in placed for place in stretch] == list(range(len(position)))
    own = {module.name: {param.name for param in module.params} for module in modules(root)}
    for unit in units:
        if sum(slot.param.numel for slot in unit.slots) * itemsize > limit:
            assert names(unit) == own[unit.module], "only a module's own parameters may exceed the limit"
    for module in modules(root):
        subtree = {param.name for param in module.walk()}
        if subtree and weight_bytes(module, itemsize) <= limit:
            assert any(subtree <= names(unit) for unit in units), "a subtree that fits is never split"
    for unit in units:
        end = 0
        for slot in unit.slots:
            assert slot.offset % ALIGN_ELEMENTS == 0
            assert slot.offset >= end
            end = slot.offset + slot.param.numel
            if slot.param.trainable:
                assert end <= unit.trainable_numel
            else:
                assert slot.offset >= unit.trainable_numel
        assert end <= unit.numel < end + ALIGN_ELEMENTS
        assert (unit.trainable_numel > 0) == any(slot.param.trainable for slot in unit.slots)


@given(module_trees, limits, itemsizes)
def test_around_a_unit_are_the_parameters_that_modules_around_its_own_hold_themselves(
    root: ModuleSpec, limit: int, itemsize: int
) -> None:
    units = discover(root, limit, itemsize)
    found = enclosing(units)
    assert sorted(found) == [unit.index for unit in units]
    inside = {
        module.name: {below.name for child in module.children for below in modules(child)} for module in modules(root)
    }
    for unit in units:
        assert found[unit.index] == {other.index for other in units if unit.module in inside[other.module]}


def test_a_model_without_parameters_is_refused() -> None:
    with pytest.raises(BudgetError, match="no floating-point parameters"):
        discover(ModuleSpec("", (), (ModuleSpec("relu", ()),)), 1024, 2)


def test_a_tied_parameter_is_used_where_its_second_module_stands() -> None:
    embedding = ModuleSpec("embedding", (ParamSpec("embedding.weight", (64, 8)),))
    layers = tuple(ModuleSpec(f"layers.{i}", (ParamSpec(f"layers.{i}.weight", (8, 8)),)) for i in range(2))
    head = ModuleSpec("head", (), tied=("embedding.weight",))
    root = ModuleSpec("", (), (embedding, ModuleSpec("layers", (), layers), head))
    units = discover(root, 128, 2)
    assert [unit.module for unit in units] == ["embedding", "layers.0", "layers.1"]
    uses = [(use.unit, use.module) for use in forward_uses(root, units)]
    assert uses == [(0, "embedding"), (1, "layers.0"), (2, "layers.1"), (0, "head")]
    (whole,) = discover(root, 1 << 20, 2)
    assert [use.unit for use in forward_uses(root, (whole,))] == [0]
