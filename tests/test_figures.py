"""Figures on the pages are those of the files in benchmarks/results, and plans are what `pagoda plan` says now."""

import json
import re
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from statistics import median
from typing import Any

import pytest
from transformers import LlamaConfig

import cards
import in_ram
import roofline
import sequence_tiles
import two_ranks
from marks import between_marks
from pagoda.forecast.config import PlanConfig
from pagoda.forecast.forecast import forecast
from pagoda.forecast.machine import find_machine_for
from pagoda.memory.sizes import format_bytes
from pagoda.models.shapes import SHAPES
from peer_suite import report as peers

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
TABLES: dict[str, tuple[str, Callable[[Any], str]]] = {
    "cards.py": ("cards", cards.table),
    "in_ram.py": ("in_ram", in_ram.table),
    "peers.py": ("peers", peers.tables),
    "roofline.py": ("roofline", roofline.tables),
    "sequence_tiles.py": ("sequence_tiles", sequence_tiles.table),
    "two_ranks.py": ("ranks", two_ranks.tables),
}
"""Script between whose marks a page has a table -> the file of results, and what makes the table of it."""


@cache
def results(name: str) -> Any:
    """What a benchmark has measured."""
    return json.loads((RESULTS / f"{name}.json").read_text())


def words(text: str) -> str:
    """A text on one line."""
    return " ".join(text.split())


def beyond_memory(model: str) -> tuple[str, str]:
    """The state of a model that trains on SSD, and the memory of its process."""
    of = next(one for one in results("beyond_memory") if one["model"] == model)
    state = sum(size for name, size in of["plan_bytes"]["ssd"].items() if name != "versions")
    return f"{state / 2**30:.1f} GiB", format_bytes(of["peak_rss"])


def defaults() -> str:
    """What runs with default settings learn: at least a third of what ten times the epochs give."""
    losses = {name: [loss for _, loss in run["evaluations"]] for name, run in results("defaults")["runs"].items()}
    best = {name: min(of) for name, of in losses.items()}
    for trained in ("all weights", "adapters"):
        before = losses[f"{trained}, defaults"][0]
        assert before - best[f"{trained}, defaults"] >= (before - best[f"{trained}, ten times the epochs"]) / 3
    first, of_adapters = (losses[f"{trained}, defaults"][0] for trained in ("all weights", "adapters"))
    return (
        f"fell from {first:.2f} to {best['all weights, defaults']:.2f}. Ten times the epochs gave "
        f"{best['all weights, ten times the epochs']:.2f} in the first 140 steps. With adapters and 34 conversations, "
        f"it fell from {of_adapters:.2f} to {best['adapters, defaults']:.2f}; ten times the epochs gave "
        f"{best['adapters, ten times the epochs']:.2f} at best."
    )


def errors(name: str, **of: object) -> list[float]:
    """By how much forecasts were wrong, as shares; `of` selects cases."""
    cases = [case for case in results(name) if of.items() <= case.items()]
    return [abs(case["predicted_s"] / case["measured_s"] - 1) for case in cases]


def regrets(model: str, placement: str, clipping: bool) -> str:
    """How much faster another plan was, in the last run."""
    runs = [
        one["regret"]
        for one in results("regret")
        if (one["model"], one["placement"], one["clipping"]) == (model, placement, clipping)
    ]
    return f"{runs[-1]:.1%}"


def in_benchmarks() -> Iterator[str]:
    """The texts of docs/benchmarks.md that have figures of a result file, except for generated tables."""
    in_ram, on_ssd = results("step_time")["results"]
    yield f"all state in RAM, 2,048 tokens, clipping: against plain PyTorch | {in_ram['ratio_ram']:.2f} ("
    yield f"moments on SSD, 2,048 tokens, clipping: against the limit | {in_ram['ratio_ssd']:.2f} ("
    yield f"all state in RAM, 512 tokens, no clipping: against plain PyTorch | {on_ssd['ratio_ram']:.2f} ("
    yield f"moments on SSD, 512 tokens, no clipping: against the limit | {on_ssd['ratio_ssd']:.2f} ("
    for of in results("beyond_memory"):
        state, process = beyond_memory(of["model"])
        ram = "1 GiB" if of["host_budget"] == 2**30 else f"{of['host_budget'] >> 20:,} MiB"
        yield f"| `{of['model']}` | {state} | {ram} | {of['limit'] >> 30} GiB | {process} |"
    length = results("sequence_length")
    yield f"at least {length['pagoda']:,} tokens with a chunked loss, and {length['plain']:,} with plain PyTorch"
    bf16, fp32 = errors("predict_bf16"), errors("predict")
    yield f"bf16, {len(bf16)} cases | fp32, {len(fp32)} cases"
    yield f"{median(bf16):.1%}; {max(bf16):.1%} | {median(fp32):.1%}; {max(fp32):.1%} |"
    places = ("RAM", "SSD state", "all on SSD")
    each = ["; ".join(f"{median(errors(n, placement=p)):.1%}" for p in places) for n in ("predict_bf16", "predict")]
    yield f"in the median: state in RAM; moments on SSD; all on SSD | {each[0]} | {each[1]} |"
    clipped = [f"{of['ratio']:.2f}" for of in results("clipping")["figures"]]
    yield f"state in RAM; moments on SSD | {'; '.join(clipped)} |"
    tiles = results("tiling")
    yield f"{tiles['bytes_ratio']:.1f} times fewer weight bytes; {tiles['time_ratio']:.1f} times faster"
    loss = results("sequence_throughput")
    low, high = loss["ratio_quartiles"]
    yield f"| {loss['ratio']:.2f} (quartiles {low:.2f} to {high:.2f}) |"
    above = [of["above"] for of in results("late_weights_study")["study"] if not of.get("sync")]
    yield f"predicted | {'; '.join(f'{of:.1%}' for of in above[1:])} |"
    saved = results("checkpoint")["results"]
    call = saved["ssd"]["call_s"]
    median_ms, most_ms = (f"{call[name] * 1e3:.0f} ms" for name in ("median", "max"))
    yield f"the call of `save_checkpoint` takes {median_ms} (at most {most_ms} of 6 calls)"
    ram = saved["ram"]
    yield f"steps while {ram['written_bytes'] / 1e9:.1f} GB are written take {ram['step_while_written']:.2f} times"
    yield f"The drive needs {ram['drive_s']:.1f} s for these bytes, and a step takes {ram['step_s']:.1f} s"


def in_targets() -> Iterator[str]:
    """The texts of docs/internals/targets.md that have figures of a result file."""
    for model, missed in (("llama-15m", ""), ("llama-110m", " (target 3%, **missed**)")):
        llama = [regrets(model, place, clip) for place in ("SSD state", "all on SSD") for clip in (False, True)]
        yield f"`{model}`, moments on SSD: {llama[0]}, and with clipping {llama[1]}{missed}."
        yield f"Everything on SSD: {llama[2]}, and with clipping {llama[3]}."
    ratios = {of["name"]: of["ratio"] for of in results("cpu_update")["figures"] if "ratio" in of}
    rules = [
        f"{rule} {dtype}" for rule in ("adamw", "adam", "sgd", "sgd momentum", "lion") for dtype in ("bf16", "fp32")
    ]
    yield f"| {min(ratios[rule] for rule in rules):.2f} to {max(ratios[rule] for rule in rules):.2f} |"
    yield f"| {ratios['adamw fp16, gradients fp16']:.2f}; {ratios['adamw bf16, moments bf16']:.2f} | the same |"
    ssd = results("ssd")
    shares = ssd["streaming_share_of_raw"], ssd["streaming_share_of_raw_without_hashing"]
    yield f"| {shares[0]:.2f} (target 0.95, **missed**); {shares[1]:.2f} without hashing |"


def in_other_pages() -> Iterator[tuple[str, str]]:
    """Pages, and their texts that have figures of a result file."""
    wrong = errors("predict_bf16")
    told = f"took {median(wrong):.1%} more or less time than planned in the median, and {max(wrong):.0%} at worst"
    yield "tutorials/plan-for-a-machine.md", told
    of = results("in_ram")
    yield "../README.md", f"fp32, {of['machine']}, {of['tokens']} tokens a step, commit {of['commit']}."
    estimates = results("activations_estimate")["estimate"]
    shares = [of["measured_mib"] / of["estimated_mib"] for of in estimates]
    assert 0.9 <= min(shares) <= max(shares) <= 1, "within 10%, and never less than a step takes"
    yield "plan.md", f"measured between {min(shares):.2f} and {max(shares):.2f} times the estimate"
    grown = [of["with_malloc_mib"] / of["estimated_mib"] for of in estimates]
    yield "plan.md", f"{min(grown):.1f} to {max(grown):.1f} times the estimate, because glibc's malloc"
    yield "reference/cli.md", defaults()
    given_back, kept = ([run["step_s"] for run in runs] for runs in results("page_faults")["runs"].values())
    yield (
        "internals/design.md",
        f"{max(given_back) - 0.02:.2f} s, and {min(kept):.2f} to {max(kept):.2f} s once malloc kept freed",
    )
    adamw, adafactor, lion = (f"{of['last_tenth']:.3f}" for of in results("optimizers")["figures"])
    yield "optimizers.md", f"{adamw} with AdamW (learning rate 1e-3), {adafactor} with Adafactor (3e-2,"
    yield "optimizers.md", f"and {lion} with Lion (2e-4)"
    compiled = {name: f"{of['ratio']:.2f}" for name, of in results("compiled").items() if isinstance(of, dict)}
    eager, layers, model = (compiled[f"Pagoda, {what}"] for what in ("eager", "layers", "model"))
    yield (
        "integrations.md",
        f"takes {eager} times as long as plain PyTorch's, {layers} with compiled",
    )
    yield "integrations.md", f"and {model} with a compiled model (plain PyTorch: {compiled['plain, layers']} and"
    ram, ssd = results("resident")["figures"]
    yield "integrations.md", f"{ram['inside_over_plain']:.2f} times as fast as in plain PyTorch, or"
    yield "integrations.md", f"or {ssd['inside_over_plain']:.2f} with weights on SSD, and"
    yield "integrations.md", f"and {ram['inside_over_outside']:.2f} times as fast as outside"
    for of in results("codecs")["figures"]:
        if "former" not in of["codec"]:
            apart = ", ".join(f"{value:+.4f}" for value in of.get("minus bf16", ()))
            name = "SmolLM2-135M" if "SmolLM2" in of["model"] else "Llama, 14M"
            yield "codecs.md", f"| {name} | `{of['codec']}` | {of['mean']:.4f} | {apart}".rstrip()


TEXTS = [
    *(("benchmarks.md", text) for text in in_benchmarks()),
    *(("internals/targets.md", text) for text in in_targets()),
    *in_other_pages(),
]


@pytest.mark.parametrize(("page", "text"), TEXTS)
def test_a_figure_on_a_page_is_that_of_the_result_file(page: str, text: str) -> None:
    assert text in words((ROOT / "docs" / page).read_text())


@pytest.mark.parametrize("script", TABLES)
def test_a_table_between_marks_is_what_its_script_makes_of_the_result_file(script: str) -> None:
    name, table = TABLES[script]
    (page,) = (page for page in PAGES if f"benchmarks/{script} writes them" in page.read_text())
    assert between_marks(page, script) == table(results(name)), f"run benchmarks/{script} with --part docs"


def test_every_mark_is_checked() -> None:
    marked = {name for page in PAGES for name in re.findall(r"figures: benchmarks/(\w+\.py) writes", page.read_text())}
    assert marked == {*TABLES}


def test_every_result_file_is_compared_with_a_page() -> None:
    read = {*re.findall(r"""['\"](\w+)['\"]""", Path(__file__).read_text())}
    # What forecasts assume, which tests/simulate compares; and a study for those who work on late weights.
    elsewhere = {"update_work", "late_weights_study"}
    assert {path.stem for path in RESULTS.glob("*.json")} <= read | elsewhere


def test_every_measured_figure_of_the_readme_comes_from_a_result_file() -> None:
    text = (ROOT / "README.md").read_text().replace("Python 3.11+ · PyTorch 2.11+", "")
    text = words(re.sub(r"^```.*?^```|<!-- figures.*?end of figures -->", "", text, flags=re.MULTILINE | re.DOTALL))
    assert not re.findall(r"\d[\d.,]* (?:[KMGT]i?B|M|s|times)\b|\d+(?:\.\d+)?%|\b\d+\.\d\d\b", text)


def test_the_commands_of_the_table_are_those_of_its_cases() -> None:
    assert [of["command"] for of in results("cards")] == [f"pagoda plan {case.flags}" for case in cards.CASES]


FAST, *SLOW = range(len(cards.CASES))


@pytest.mark.parametrize("number", [FAST, *(pytest.param(number, marks=pytest.mark.slow) for number in SLOW)])
def test_the_planner_says_now_what_the_table_of_cards_has(number: int) -> None:
    made = cards.planned(cards.CASES[number])
    assert made == pytest.approx(results("cards")[number]), "run `python benchmarks/cards.py` as its docstring says"


@pytest.mark.parametrize(
    ("card", "tokens"), [("h100", 524288), pytest.param("rtx4090", 131072, marks=pytest.mark.slow)]
)
def test_the_plans_of_long_sequences_are_what_the_page_says(card: str, tokens: int, tmp_path: Path) -> None:
    settings = {**SHAPES["llama3.1-8b"].settings, "max_position_embeddings": tokens}
    LlamaConfig(**settings).save_pretrained(tmp_path)
    config = PlanConfig(
        model=str(tmp_path), hardware=card, max_length=tokens, sequence_tiles="auto", plan="usual", precision="bf16"
    )
    made = forecast(config, find_machine_for(config), measure=False)
    assert made.fits
    page = words((ROOT / "docs" / "long-sequences.md").read_text())
    taken, away = (f"{nbytes / 2**30:.0f} GiB" for nbytes in (made.activations.total, made.activations.offloaded))
    texts = {
        "h100": f"{tokens:,} tokens on one H100, with {taken} of activations and {away} offloaded",
        "rtx4090": f"on {tokens:,} on an RTX 4090",
    }
    assert texts[card] in page
