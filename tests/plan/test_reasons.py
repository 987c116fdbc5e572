"""Every sentence about a plan is true of it."""

import re
from collections.abc import Callable
from dataclasses import replace
from re import Match

from hypothesis import given, settings, strategies as st

from pagoda.config.memory import Split
from pagoda.errors import BudgetError
from pagoda.memory.page import PAGE_BYTES
from pagoda.memory.sizes import format_bytes
from pagoda.optim import SGD, AdamW
from pagoda.plan.layout import GRAD, WEIGHT
from pagoda.plan.options import Options
from pagoda.plan.placement import LEASES
from pagoda.plan.planner import Plan, make_plan
from pagoda.plan.ranks import ALONE, Ranks
from pagoda.plan.tiers import DEVICE, HOST, SSD, Budgets
from pagoda.plan.units import ModuleSpec

from .strategies import LARGE, Draw, large_trees

NAMES = {"host RAM": HOST, "the device": DEVICE, "The device": DEVICE, "SSD": SSD}


def larger(module: ModuleSpec, factor: int) -> ModuleSpec:
    """The same tree with parameters that many times as large, so that RAM may have less room than for all states."""
    params = tuple(replace(param, shape=tuple(size * factor for size in param.shape)) for param in module.params)
    return replace(module, params=params, children=tuple(larger(child, factor) for child in module.children))


@st.composite
def plans(draw: Draw) -> Plan:
    """Plans of random models with random settings, in budgets that are roomy or tight."""
    separate, asynchronous = draw(st.booleans()), draw(st.integers(0, 5)) == 0
    split = st.none() | st.builds(
        Split, device_update_share=st.sampled_from([0.0, 0.3, 1.0]), device_home_share=st.sampled_from([0.0, 1.0, None])
    )
    options = Options(
        page_bytes=draw(st.sampled_from([None, 4096])),
        unit_limit=draw(st.none() | st.integers(64, 400_000)),
        gradient_accumulation_steps=draw(st.sampled_from([None, 1, 2])),
        clipping=draw(st.booleans()),
        may_skip=draw(st.booleans()),
        split=draw(split) if separate else None,
        keep_checkpoints=draw(st.sampled_from([None, 0, 2])),
        asynchronous=asynchronous,
        speculate=draw(st.sampled_from([True, True, False])),
    )
    rule = draw(st.sampled_from([AdamW(lr=1.0), SGD(lr=1.0)]))
    ranks = draw(
        st.sampled_from(
            [ALONE, Ranks(4, 4), Ranks(4, 4, 1, replicas=2), Ranks(2, 2, 2, replicas=2), Ranks(2, 4, tensor_parallel=2)]
        )
    )
    root = larger(draw(large_trees), draw(st.sampled_from([1, 30])))
    states = rule.states(draw(st.sampled_from(["bf16", "fp32"])))
    room, ssd = draw(st.sampled_from([1.0, 1.0, 1.3, 50.0])), draw(st.sampled_from([None, LARGE, LARGE]))
    budgets = Budgets(1, 1 if separate else None, ssd)
    for _ in range(50):
        try:
            return make_plan(root, states, budgets, options, ranks)
        except BudgetError as refusal:
            tier = refusal.tier or HOST
            budgets = replace(budgets, **{tier: int((refusal.needed_bytes or 1) * room)})
    raise AssertionError("the refusals name what is needed")


def trained(plan: Plan) -> set[int]:
    return {unit.index for unit in plan.units if unit.trainable_numel}


def with_pages(plan: Plan, tier: str, states: list[str]) -> set[int]:
    """Units of which a tier has pages of some states."""
    homes, layout = plan.placement.homes, plan.layout
    return {
        unit
        for (unit, state), home in homes.items()
        if home == tier and state in states and layout.pages(layout.units[unit], state)
    }


def all_states(plan: Plan) -> list[str]:
    return [state.name for state in plan.layout.states]


def units(plan: Plan, said: Match[str]) -> bool:
    count, largest, limit, why, larger = said.groups()
    itemsize = plan.layout.weight.dtype.itemsize
    most, eighth = max(unit.numel for unit in plan.units) * itemsize, plan.parameters * itemsize // 8
    given = plan.options.unit_limit
    reasons = {
        "memory.unit_limit, or what a search found": given is not None and plan.unit_limit == given,
        "an eighth of the weights, within limits": given is None
        and plan.unit_limit == min(max(eighth, 1 << 16), 1 << 29),
    }
    tight = given is None and why.startswith("with ") and plan.unit_limit < max(eighth, 1 << 16)
    sizes = int(count) == len(plan.units) and (largest, limit) == (format_bytes(most), format_bytes(plan.unit_limit))
    return sizes and (reasons.get(why, False) or tight) and bool(larger) == (most > plan.unit_limit)


def pages(plan: Plan, said: Match[str]) -> bool:
    size, why = said.groups()
    if plan.options.page_bytes is not None:
        return why == "memory.page_size, or what a search found" and size == format_bytes(plan.options.page_bytes)
    fullest = replace(plan.layout, rank=plan.layout.slices.fullest_rank)
    names = [*all_states(plan), *[GRAD] * (plan.ranks.data_parallel > 1)]
    exact = sum(map(fullest.with_page_bytes(4096).total_bytes, names))

    def wastes_little(page: int) -> bool:
        return sum(map(fullest.with_page_bytes(page).total_pages, names)) * page <= 1.02 * exact

    larger = [page for page in (4096 << n for n in range(1, 11)) if plan.page_bytes < page <= PAGE_BYTES]
    none = not any(map(wastes_little, larger)) and size == format_bytes(plan.page_bytes)
    return none and (plan.page_bytes == 4096 if why.startswith("larger") else wastes_little(plan.page_bytes))


def passing(plan: Plan, said: Match[str]) -> bool:
    through = {
        unit
        for unit in plan.placement.on_device
        if any(plan.placement.homes[unit, state] != DEVICE for state in (*all_states(plan), GRAD))
    }
    others = len(trained(plan) - plan.placement.on_device)
    return int(said[1]) == len(through) and int(said[3] or 0) == others


def none_on_device(plan: Plan, said: Match[str]) -> bool:
    assert plan.options.split is not None
    return not plan.placement.on_device and said[1] == f"{plan.options.split.device_update_share:.0%}"


def resident(plan: Plan, said: Match[str]) -> bool:
    homes: dict[int, set[str]] = {}
    for (unit, _), home in plan.placement.homes.items():
        homes.setdefault(unit, set()).add(home)
    leases = format_bytes(plan.bytes[DEVICE].get(LEASES, 0))
    return int(said[1]) == sum(tiers == {DEVICE} for tiers in homes.values()) and said[3] == leases


def home_by_state(plan: Plan, said: Match[str]) -> bool:
    found = [len(plan.placement.units_with(DEVICE, [state])) for state in (WEIGHT, GRAD)]
    return found == [int(said[1]), int(said[2])] and int(said[3]) == len(plan.units)


def limits(plan: Plan, said: Match[str]) -> bool:
    split = plan.options.split
    assert split is not None
    assert DEVICE in plan.bytes
    home = "what leases leave" if split.device_home_share is None else f"{split.device_home_share:.0%}"
    return said.groups() == (f"{split.device_update_share:.0%}", home)


def on_ssd(plan: Plan, said: Match[str]) -> bool:
    moments = [state.name for state in plan.layout.moments]
    names = re.findall(r"the (weights|moments) of (\d+)", said[1])
    counts = {"weights": len(with_pages(plan, SSD, [WEIGHT])), "moments": len(with_pages(plan, SSD, moments))}
    return (
        all(int(count) == counts[name] for name, count in names)
        and any(int(count) for _, count in names)
        and (("gradients" in said[2]) <= (not plan.options.asynchronous and not plan.options.update_during_backward))
        and ("moments" in said[0]) == bool(moments)
    )


def everywhere(plan: Plan, said: Match[str]) -> bool:
    tiers = {NAMES[name] for name in re.findall("[Tt]he device|host RAM", said[0])}
    holds = {tier for tier in (DEVICE, HOST, SSD) if with_pages(plan, tier, all_states(plan))}
    return tiers == holds and bool(said[2]) == bool(plan.bytes.get(SSD, {}).get(GRAD))


def ahead(plan: Plan, said: Match[str]) -> bool:
    count, _, in_ram, decided = said.groups()
    early = plan.placement.speculated
    whole = early - with_pages(plan, SSD, all_states(plan))
    assert not whole & with_pages(plan, DEVICE, all_states(plan))
    known = plan.options.clipping if "clipped" in decided else plan.options.may_skip and not plan.options.clipping
    return int(count) == len(early) and int(in_ram or 0) == len(whole) and early <= trained(plan) and known


def afterwards(plan: Plan, said: Match[str]) -> bool:
    which, why = said[1], said[2]
    options, late = plan.options, trained(plan) - plan.placement.speculated
    causes = {
        "the number of backward passes is not announced": options.gradient_accumulation_steps is None,
        "the norm for clipping is known only then": options.clipping,
        "whether a scaled gradient is not finite is known only then": options.may_skip,
    }
    every = {"Each unit": len(plan.units), "Each unit that trains": len(trained(plan))}
    named = len(late) == every[which] if which in every else bool(plan.placement.speculated and late)
    return causes[why] and named and not options.update_during_backward


def on_ranks(plan: Plan, said: Match[str]) -> bool:
    ranks, text = plan.ranks, said[0]
    each = ranks.data_parallel // ranks.replicas
    divides = re.search(r"(\d+) ranks divide (.*)optimizer states(.*) \(ZeRO", text)
    kept = {1: ("", ""), 2: ("", " and gradients"), 3: ("weights, gradients and ", "")}
    return (
        (divides is None) == (each == 1)
        and (divides is None or divides.groups() == (str(each), *kept[ranks.stage]))
        and (f"{ranks.tensor_parallel} ranks divide the tensors" in text) == (ranks.tensor_parallel > 1)
        and ("each of 2 ranks has a whole copy" in text) == (each == 1 and ranks.replicas == 2)
        and ("in each of 2 copies" in text) == (each > 1 and ranks.replicas == 2)
    )


Check = Callable[[Plan, Match[str]], bool]
SENTENCES: dict[str, Check] = {
    r"(\d+) units, the largest with (.*?) of weights: modules of at most (.*?) \((.*)\)(, and larger .*)?\.": units,
    r"Pages of (.*?): (.*)\.": pages,
    r"(\d+) of \d+ units are updated on the device: .* through it( while the CPU updates (\d+) others?)?\.": passing,
    r"No unit is small enough to be (\d+%) of the updates, so the CPU does them all\.": none_on_device,
    r"(\d+) of (\d+) units have all their states on .* Leases of the others have (.*) there\.": resident,
    r"The device is home to the weights of (\d+) and the gradients of (\d+) of (\d+) units\. .*": home_by_state,
    r"At most (\d+%) of the updates pass through the device, and (.*) of its memory .*": limits,
    r"SSD holds (.*) of \d+ units\. RAM goes to (.*?); of each, to units in the order of forward.*": on_ssd,
    r"(.*) (?:fits in host RAM|holds? every state)(; SSD keeps room for gradients .*)?\.": everywhere,
    r"SSD has room for the pages of (\d+) checkpoints? .*": lambda plan, said: (
        plan.placement.spare_on_ssd == int(said[1]) * plan.placement.changing_on_ssd
    ),
    r"SSD sets no room aside .*": lambda plan, _: plan.options.keep_checkpoints == 0 and no_spare(plan),
    r"The (.*) of SSD that the run may use have no room .*": lambda plan, _: no_spare(plan),
    r"State takes ([\d.]+) bytes a (?:trained )?parameter: .*\.": lambda plan, said: (
        said[1] == f"{sum(plan.layout.bytes_per_parameter.values()):.2f}"
    ),
    r"Units are updated while .* lag one step, .*": lambda plan, _: plan.options.asynchronous,
    r"Each unit( that trains)? is updated during backward, as soon as .*": lambda plan, said: (
        plan.options.update_during_backward and bool(said[1]) == (len(trained(plan)) < len(plan.units))
    ),
    r"(\d+) of \d+ units( \((\d+) of them .*\))? are updated during backward, before .* whether (.*?): .*": ahead,
    r"(.*) (?:is|are) updated after backward \((.*)\), just before the next forward uses (?:it|them)\.": afterwards,
    r"(?:\d+ ranks divide|each of) .*\.": on_ranks,
}
"""The form of a sentence -> what makes it true."""


def no_spare(plan: Plan) -> bool:
    """Whether SSD has no room beside states but for speculative updates."""
    return plan.placement.spare_on_ssd == 0


def check(plan: Plan) -> None:
    """Each sentence has one of the forms, and is true."""
    for sentence in plan.reasons:
        (form,) = [form for form in SENTENCES if re.fullmatch(form, sentence)] or ["no form"]
        said = re.fullmatch(form, sentence)
        assert said is not None, sentence
        assert SENTENCES[form](plan, said), f"{sentence!r} is false"


@given(plans())
@settings(max_examples=60)
def test_every_sentence_about_a_plan_is_true_of_it(plan: Plan) -> None:
    check(plan)
