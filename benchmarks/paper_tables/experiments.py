"""The papers' experiments, and the same models on the same machines in the simulator: a table and a plot of each."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, partial

from pagoda.models.papers import GPT_VOCAB, PAPER_SHAPES, PaperShape
from pagoda.schedule.served import hit_rate
from paper_tables.largest import gpt_shape, largest
from paper_tables.runs import Run, Setup, fits, run

Points = list[tuple[float, float]]


@dataclass(frozen=True)
class Plot:
    """One pair of axes. `ours` are Pagoda's lines, `theirs` the papers'."""

    name: str
    xlabel: str
    ylabel: str
    ours: dict[str, Points]
    theirs: dict[str, Points] = field(default_factory=dict)
    log: bool = False
    bars: bool = False
    """Categories in place of numbers: a point's number is that of its label in `categories`."""
    categories: Sequence[str] = ()


@dataclass(frozen=True)
class Experiment:
    """A section of the page."""

    title: str
    text: str
    table: list[str]
    plot: Plot


def _table(first: str, rows: list[tuple[str, str, str, str]]) -> list[str]:
    head = f"| {first} | the paper's | Pagoda, simulated | ratio |"
    return [head, "|---|---|---|---:|", *(f"| {' | '.join(row)} |" for row in rows)]


def _result(one: Run) -> str:
    """The rate and the step of a run, and what compute waits for, in a cell."""
    lane, stall = max(one.timeline.stall_s.items(), key=lambda item: item[1], default=("", 0.0))
    share = stall / one.timeline.step_s
    waits = f"; waits {share:.0%} for {lane}" if share > 0.01 else ""
    return f"{one.flop_per_s / 1e12:.3g} TFLOP/s, {one.step_s:,.1f} s{waits}"


def _shape(name: str, layers: int, hidden: int, seq_len: int = 1024, vocab: int = GPT_VOCAB) -> PaperShape:
    base = PAPER_SHAPES["gpt-1b"]
    shape = replace(base, name=name, layers=layers, hidden=hidden, ffn=4 * hidden, heads=hidden // 128, vocab=vocab)
    shape = replace(shape, seq_len=seq_len)
    return replace(shape, nominal=float(shape.params))


@cache
def _of_paper(name: str, setup: Setup) -> Run:
    return run(PAPER_SHAPES[name], setup)


# --- PatrickStar --------------------------------------------------------------------------------------------

_BATCH = 16
_V100 = dict(zip((1, 2, 4, 6, 8, 10, 12, 15, 18), (444, 425, 426, 482, 467, 494, 482, 465, 419), strict=True))
_A100 = dict(zip((6, 10, 15, 20, 30, 40, 50, 60, 68), (1180, 1218, 1134, 1231, 1132, 1109, 952, 920, 857), strict=True))
_DEEPSPEED = dict(zip((6, 10, 15, 20, 30), (728, 738, 773, 865, 578), strict=True))
"""Billions of parameters -> TFLOP/s of eight GPUs, read off PatrickStar's plots."""
_NODES = {"v100-32gx8": ("8xV100-32G, 240 GB", _V100), "a100-40gx8": ("8xA100-40G, 1 TB", _A100)}


@cache
def _on_node(machine: str, billions: int) -> float:
    """TFLOP/s of eight GPUs, counted as PatrickStar does."""
    one = _of_paper(f"gpt-{billions}b", Setup(machine=machine, batch=_BATCH))
    return 8 * one.nominal_flop_per_s / 1e12


def patrickstar() -> Experiment:
    table, ours, theirs = [], {}, {"DeepSpeed, 8xA100-40G": [(float(n), float(t)) for n, t in _DEEPSPEED.items()]}
    for machine, (label, figures) in _NODES.items():
        mine = {billions: _on_node(machine, billions) for billions in figures}
        shown = [*figures][::2]
        rows = {
            label: [f"{billions}B" for billions in shown],
            "---": ["---:"] * len(shown),
            "PatrickStar": [str(figures[billions]) for billions in shown],
            "Pagoda, simulated": [f"{mine[billions]:.0f}" for billions in shown],
        }
        table += [f"| {first} | {' | '.join(cells)} |" for first, cells in rows.items()] + [""]
        ours[f"Pagoda, {label}"] = [(float(n), t) for n, t in mine.items()]
        theirs[f"PatrickStar, {label}"] = [(float(n), float(t)) for n, t in figures.items()]
    text = f"""\
arXiv 2108.05818: TFLOP/s of eight GPUs, read off its plots, at 8 FLOPs a parameter and token. Sequences of 1,024. The
paper gives the best of several batches; Pagoda has {_BATCH} sequences a GPU."""
    plot = Plot("papers_patrickstar", "parameters, billions", "TFLOP/s of eight GPUs", ours, theirs)
    return Experiment("PatrickStar: one node of eight GPUs", text, table[:-1], plot)


# --- AngelPTM's ZeRO-Cache ----------------------------------------------------------------------------------


def zero_cache() -> Experiment:
    node = Setup(machine="a100-40gx8", batch=4)
    most = largest(gpt_shape, partial(fits, setup=node)).params / 1e9
    speed = {n: _on_node("a100-40gx8", n) / t for n, t in _DEEPSPEED.items()}
    four = _of_paper("gpt-100b", replace(node, nodes=4))
    fast = _of_paper("gpt-100b", replace(node, nodes=4, machine="a100-40gx8-dgx"))
    least = min(speed.values())
    rows = [
        (
            "largest model of a node",
            "55B; DeepSpeed 28B (+94.7%)",
            f"{most:.1f}B: +{most / 28 - 1:.0%} over DeepSpeed",
            f"{most / 55:.2f}",
        ),
        (
            "speed over DeepSpeed, one node",
            "+44.4%",
            f"at least +{least - 1:.0%}, 6B to 30B",
            f"{least / 1.444:.2f}",
        ),
        ("100B on 32 GPUs, 100 Gb/s", "+26.8% over DeepSpeed; the network limits", _result(four), "—"),
        ("the same, 8 x 200 Gb/s", "—", _result(fast), "—"),
    ]
    text = """\
Articles on AngelPTM: A100-40G nodes with 1 TB of RAM, against DeepSpeed 0.8.1. Assumed: 4 sequences of 1,024 a GPU, and
the speed of DeepSpeed that PatrickStar measured on such a node."""
    plot = Plot(
        "papers_zero_cache",
        "",
        "largest model of a node, billions of parameters",
        {"Pagoda, simulated": [(2, most)]},
        {"DeepSpeed 0.8.1": [(0, 28)], "ZeRO-Cache": [(1, 55)]},
        bars=True,
        categories=("DeepSpeed 0.8.1", "ZeRO-Cache", "Pagoda"),
    )
    return Experiment("AngelPTM's ZeRO-Cache: capacity and speed", text, _table("case", rows), plot)


# --- Angel-PTM ----------------------------------------------------------------------------------------------

_NETWORKS = {"a100-40gx8": "100 Gb/s", "a100-40gx8-dgx": "8 x 200 Gb/s"}
_FAST = ("a100-40gx8-dgx",)
"""Whose figures the table has. The plot has all."""


def angel() -> Experiment:
    speed = {n: _on_node("a100-40gx8", n) / t for n, t in _DEEPSPEED.items()}
    most = max(speed, key=lambda n: speed[n])
    gain = f"+{speed[most] - 1:.0%}"
    rows = []
    ours: dict[str, Points] = {}
    for name, label, batch, counts in (
        ("gpt3-175b", "GPT3-175B", 4, (64, 128, 256, 512, 768)),
        ("t5-moe-1.2t", "T5-MoE-1.2T", 16, (64, 128, 256, 384, 768)),
    ):
        for machine, network in _NETWORKS.items():
            for gpus in counts:
                experts = gpus if PAPER_SHAPES[name].experts else 1
                setup = Setup(machine=machine, nodes=gpus // 8, batch=batch, experts=experts)
                on_ssd = not fits(PAPER_SHAPES[name], setup)
                one = _of_paper(name, replace(setup, ssd=on_ssd))
                ours.setdefault(f"{label}, {network}", []).append((gpus, gpus * one.flop_per_s / 1e15))
                if gpus in (counts[0], counts[-1]) and machine in _FAST:
                    result = _result(one) + ", part of the state on SSD" * on_ssd
                    rows.append(f"| {label}, {gpus} GPUs, {network} | {result} |")
    text = f"""\
arXiv 2303.02868. Its abstract states at most +88.9% of throughput over DeepSpeed; Pagoda has {gain}, for {most}B on a
node. Its curves were not available. Assumed: 4 sequences of 2,048 a GPU, and 16 of 512 for T5; experts divided over all
ranks, with equal numbers of tokens; state that does not fit elsewhere on SSD (3.5 GB/s a node, or 18.9)."""
    plot = Plot("papers_angel", "GPUs", "PFLOP/s of all GPUs", ours)
    return Experiment(
        "Angel-PTM: throughput and scaling", text, ["| case | Pagoda, simulated |", "|---|---|", *rows], plot
    )


# --- ZeRO ---------------------------------------------------------------------------------------------------

_PFLOPS = 15.0
"""Of 400 GPUs, on average from 8B to 100B."""


def zero() -> Experiment:
    rows, points = [], []
    sixty = replace(PAPER_SHAPES["gpt-60b"], heads=32)
    for nodes, batch in ((4, 1), (8, 3), (16, 3), (25, 4)):
        one = run(sixty, Setup(machine="v100-32gx16", nodes=nodes, batch=batch, gpu_alone=True))
        gpus = one.setup.ranks.count
        total = gpus * one.flop_per_s / 1e15
        points.append((float(gpus), total))
        if gpus in (64, 400):
            theirs, ratio = "superlinear scaling", "—"
            if gpus == 400:
                theirs, ratio = "15 PFLOP/s on average from 8B to 100B", f"{total / _PFLOPS:.2f}"
            rows.append((f"60B, {gpus} GPUs, batch {batch}", theirs, f"{_result(one)}; {total:.1f} PFLOP/s", ratio))
    for name, nodes, batch, theirs, figure in (
        ("gpt-13b", 8, 4, "over 40 TFLOP/s, stage 2", 40.0),
        ("gpt-170b", 25, 1, "trains", 0.0),
    ):
        one = _of_paper(name, Setup(machine="v100-32gx16", nodes=nodes, batch=batch, gpu_alone=True))
        ratio = f"{one.flop_per_s / 1e12 / figure:.2f}" if figure else "—"
        rows.append((f"{name[4:].upper()}, {nodes * 16} GPUs, batch {batch}", theirs, _result(one), ratio))
    text = """\
arXiv 1910.02054, DGX-2 nodes of 16 V100-32G, 800 Gb/s between them. All state is in GPU memory. The paper's batches are
from memory and unverified; 4 for 13B is assumed."""
    plot = Plot(
        "papers_zero",
        "GPUs",
        "PFLOP/s of all GPUs, 60B",
        {"Pagoda, simulated": points},
        {"ZeRO, average of 8B to 100B": [(400.0, _PFLOPS)]},
    )
    return Experiment("ZeRO: GPU memory alone, 64 to 400 GPUs", text, _table("case", rows), plot)


# --- ZeRO-Infinity ------------------------------------------------------------------------------------------

_LOW, _HIGH = 34.0, 49.0
_MODELS = (
    ("0.5T", 124, 18_432, 7),
    ("1T", 128, 25_600, 5),
    ("5T", 174, 49_152, 3),
    ("10T", 200, 65_536, 2),
    ("20T", 205, 90_112, 1),
)
_NODE_MODELS = (("10B", 50, 4_096, 8), ("50B", 62, 8_192, 26), ("100B", 125, 8_192, 24), ("1T", 128, 25_600, 7))


def infinity() -> Experiment:
    rows: list[tuple[str, str, str, str]] = []
    many: Points = []
    few: Points = []
    for name, layers, hidden, batch in _MODELS:
        shape = _shape(f"gpt-{name}", layers, hidden)
        one = run(shape, Setup(machine="v100-32gx16", nodes=32, batch=batch, ssd=True))
        mine = one.flop_per_s / 1e12
        many.append((shape.params / 1e12, mine))
        if name in (_MODELS[0][0], _MODELS[-1][0]):
            case = f"{name} ({layers}x{hidden}), 512 GPUs, batch {batch}"
            theirs = f"{_LOW:.0f} to {_HIGH:.0f} TFLOP/s"
            rows.append((case, theirs, _result(one), f"{mine / _HIGH:.2f} to {mine / _LOW:.2f}"))
    for name, layers, hidden, batch in _NODE_MODELS:
        shape = _shape(f"gpt-{name}", layers, hidden)
        one = run(shape, Setup(machine="v100-32gx16", batch=batch, ssd=True))
        few.append((shape.params / 1e12, one.flop_per_s / 1e12))
        theirs = "trains" if name == "1T" else "over 40 TFLOP/s"
        ratio = "—" if name == "1T" else f"{one.flop_per_s / 40e12:.2f}"
        if name in ("100B", "1T"):
            rows.append((f"{name} ({layers}x{hidden}), one DGX-2, batch {batch}", theirs, _result(one), ratio))
    text = """\
arXiv 2104.07857, DGX-2 nodes with NVMe. Shapes and batches (its table 1) are from memory and unverified; sequences of
1,024. The paper keeps optimizer states on NVMe, and divides each layer over 4 or 8 GPUs. A plan fills GPU memory and
RAM first, and cuts large matrices into tiles."""
    plot = Plot(
        "papers_infinity",
        "parameters, trillions",
        "TFLOP/s a GPU",
        {"Pagoda, 512 V100": many, "Pagoda, one DGX-2": few},
        {
            "ZeRO-Infinity, 512 V100, highest": [(0.5, _HIGH), (20.0, _HIGH)],
            "the same, lowest": [(0.5, _LOW), (20.0, _LOW)],
        },
        log=True,
    )
    return Experiment("ZeRO-Infinity: 0.5T to 20T on 512 GPUs, 1T on one node", text, _table("case", rows), plot)


# --- 10Cache ------------------------------------------------------------------------------------------------

_STEPS, _PAIR_TOKENS = 230, 80
_TRAINED = (
    # name, layers, hidden, vocabulary, with SSD, seconds of an epoch: ZeRO-Infinity, 10Cache; hit rates, per cent
    ("OPT-6.7B", 32, 4_096, 50_272, False, 4469.19, 1758.34, 3.68, 100.0),
    ("Bloom-7B", 30, 4_096, 250_880, False, 9444.80, 3435.88, 17.21, 83.87),
    ("Falcon-7B", 28, 4_608, 65_024, False, 27671.92, 10581.84, 1.03, 89.18),
    ("OPT-13B", 40, 5_120, 50_272, True, 179400.41, 145080.30, 10.38, 100.0),
    ("Falcon-10B", 40, 4_608, 131_072, True, 194424.66, 150285.71, 3.31, 99.64),
    ("Falcon-11B", 45, 4_608, 65_024, True, 205330.16, 155424.31, 9.34, 100.0),
)


TEN_CACHE_SHAPES = [_shape(name, layers, hidden, _PAIR_TOKENS, vocab) for name, layers, hidden, vocab, *_ in _TRAINED]


def ten_cache() -> Experiment:
    rows, hits, at_pace = [], [], []
    for index, (name, *_, ssd, before, after, low, high) in enumerate(_TRAINED):
        one = run(TEN_CACHE_SHAPES[index], Setup(machine="a100-40gx8", gpus=1, batch=16, ssd=ssd, ram_gib=128))
        before_s, after_s = before / _STEPS, after / _STEPS
        own, slow = hit_rate(one.timeline.access_counts), hit_rate(one.at_pace(after_s).access_counts)
        hits.append((float(index), 100 * own))
        at_pace.append((float(index), 100 * slow))
        if index % 2 == 0:
            rows.append(
                (
                    name + (", NVMe" if ssd else ""),
                    f"{before_s:,.1f} -> {after_s:,.1f} s, hit rate {low:.0f}% -> {high:.0f}%",
                    f"{one.step_s:,.1f} s; hit rate {own:.0%}, at its pace {slow:.0%}",
                )
            )
    text = f"""\
arXiv 2511.14124: seconds of a step and hit rates, ZeRO-Infinity's and 10Cache's, from the plots of its repository (an
epoch of MRPC, taken as {_STEPS} steps of 16 pairs). Its machine is not known, so seconds are of two machines. Assumed:
one A100-40G, 128 GiB of RAM, one drive of 3.5 GB/s, {_PAIR_TOKENS} tokens a pair. A *hit* is an access to a unit whose
current weights are on the GPU when compute asks for them. *At its pace*: compute alone takes 10Cache's seconds."""
    names = [one[0] for one in _TRAINED]
    rates = {
        "ZeRO-Infinity": [(float(i), one[-2]) for i, one in enumerate(_TRAINED)],
        "10Cache": [(float(i), one[-1]) for i, one in enumerate(_TRAINED)],
    }
    ours = {"Pagoda, simulated": hits, "Pagoda, at its pace": at_pace}
    plot = Plot("papers_10cache", "", "hit rate, %", ours, rates, bars=True, categories=names)
    table = [
        "| model | the paper's | Pagoda, simulated |",
        "|---|---|---|",
        *(f"| {' | '.join(row)} |" for row in rows),
    ]
    return Experiment("10Cache: hit rates and steps", text, table, plot)


EXPERIMENTS: Sequence[Callable[[], Experiment]] = (zero_cache, angel, patrickstar, zero, infinity, ten_cache)


def sections(made: Sequence[Experiment]) -> Iterator[str]:
    """The page's text, without its introduction."""
    for experiment in made:
        yield f"\n## {experiment.title}\n\n{experiment.text}\n"
        yield f"![{experiment.plot.ylabel}]({experiment.plot.name}.png)\n"
        yield "\n".join(experiment.table)
