"""The papers' experiments beside what plans of the same models on the same machines do in the simulator: a table and a
plot of each."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, partial

from pagoda.models.papers import GPT_VOCAB, PAPER_SHAPES, PaperShape
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


def _table(first: str, rows: list[tuple[str, str, str, str, str]]) -> list[str]:
    head = f"| {first} | the paper's | Pagoda, simulated | ratio | why |"
    return [head, "|---|---|---|---:|---|", *(f"| {' | '.join(row)} |" for row in rows)]


def _said(one: Run) -> str:
    """What a run does, in a cell."""
    copied = ", activations copied" if one.mode != "recompute" else ""
    lane = one.timeline.binding_lane
    return f"{one.flop_per_s / 1e12:.3g} TFLOP/s a GPU, {one.step_s:,.1f} s; {lane} binds{copied}"


def _waits(one: Run) -> str:
    """What binds a run, in the last cell."""
    lane = one.timeline.binding_lane
    stall = one.timeline.stall_s.get(lane)
    return (
        "Every lane ends under compute"
        if stall is None
        else f"Compute waits {stall / one.timeline.step_s:.0%} for {lane}"
    )


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
_NODES = {"v100-32g-8": ("8xV100-32G, 240 GB", _V100), "a100-40g": ("8xA100-40G, 1 TB", _A100)}


@cache
def _on_node(machine: str, billions: int) -> float:
    """TFLOP/s of eight GPUs, counted as PatrickStar does."""
    one = _of_paper(f"gpt-{billions}b", Setup(machine=machine, batch=_BATCH))
    return 8 * one.nominal_flop_per_s / 1e12


def patrickstar() -> Experiment:
    rows, ours, theirs = [], {}, {"DeepSpeed, 8xA100-40G": [(float(n), float(t)) for n, t in _DEEPSPEED.items()]}
    for machine, (label, figures) in _NODES.items():
        for billions, figure in figures.items():
            one = _of_paper(f"gpt-{billions}b", Setup(machine=machine, batch=_BATCH))
            mine, why = _on_node(machine, billions), f"{_waits(one)}; PatrickStar's copies wait for each other"
            deepspeed = _DEEPSPEED.get(billions) if machine == "a100-40g" else None
            said = f"{figure}" + (f"; DeepSpeed {deepspeed}" if deepspeed else "")
            rows.append((f"{label}: {billions}B", said, f"{mine:.0f}", f"{mine / figure:.2f}", why))
        ours[f"Pagoda, {label}"] = [(float(n), _on_node(machine, n)) for n in figures]
        theirs[f"PatrickStar, {label}"] = [(float(n), float(t)) for n, t in figures.items()]
    text = f"""\
arXiv 2108.05818: TFLOP/s of eight GPUs, read off its plots, at 8 FLOPs a parameter and token. Its shapes, sequences of
1,024. The paper gives the best of several batches; assumed: {_BATCH} sequences a GPU in each case."""
    plot = Plot("papers_patrickstar", "parameters, billions", "TFLOP/s of eight GPUs", ours, theirs)
    return Experiment("PatrickStar: one node of eight GPUs", text, _table("node and model", rows), plot)


# --- AngelPTM's ZeRO-Cache ----------------------------------------------------------------------------------


def zero_cache() -> Experiment:
    node = Setup(machine="a100-40g", batch=4)
    most = largest(gpt_shape, partial(fits, setup=node)).params / 1e9
    speed = {n: _on_node("a100-40g", n) / t for n, t in _DEEPSPEED.items()}
    one, four = _of_paper("gpt-55b", node), _of_paper("gpt-100b", replace(node, nodes=4))
    fast = _of_paper("gpt-100b", replace(node, nodes=4, machine="a100-40g-dgx"))
    least = min(speed.values())
    rows = [
        (
            "largest model of a node",
            "55B; DeepSpeed 28B (+94.7%)",
            f"{most:.1f}B: +{most / 28 - 1:.0%} over DeepSpeed",
            f"{most / 55:.2f}",
            "14 bytes a parameter with clipping in place of 16 to 20, and what RAM has no room for lives on GPUs",
        ),
        (
            "speed over DeepSpeed, one node",
            "+44.4%",
            f"+{least - 1:.0%} at the least, for 6B to 30B",
            f"{least / 1.444:.2f}",
            "DeepSpeed's figures are those that PatrickStar measured on such a node; the article has its own",
        ),
        ("55B on a node", "trains; no figure was read", _said(one), "—", "Whether it fits is what the article says"),
        (
            "100B on 32 GPUs, 100 Gb/s",
            "+26.8% over DeepSpeed; the network limits",
            _said(four),
            "—",
            "The network limits here too: each node gathers all weights twice a step",
        ),
        ("the same, 8 x 200 Gb/s", "—", _said(fast), "—", "What the network costs above"),
    ]
    text = """\
Articles on AngelPTM (A100-40G nodes with 1 TB of RAM, 100 Gb/s between nodes; against DeepSpeed 0.8.1 and
Megatron-DeepSpeed). They give ratios; tokens are not known. Assumed: 4 sequences of 1,024 a GPU."""
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

_NETWORKS = {"a100-40g": "100 Gb/s", "a100-40g-dgx": "8 x 200 Gb/s"}


def angel() -> Experiment:
    speed = {n: _on_node("a100-40g", n) / t for n, t in _DEEPSPEED.items()}
    most = max(speed, key=lambda n: speed[n])
    rows = [
        (
            "most throughput over DeepSpeed",
            "+88.9%",
            f"+{speed[most] - 1:.0%}, {most}B on a node",
            f"{speed[most] / 1.889:.2f}",
            "DeepSpeed's figure is the one of PatrickStar's plot; the paper's model and tokens for it are not known",
        )
    ]
    ours: dict[str, Points] = {}
    for name, label, batch, counts in (
        ("gpt3-175b", "GPT3-175B", 4, (64, 128, 256, 512, 768)),
        ("t5-moe-1.2t", "T5-MoE-1.2T", 16, (64, 128, 256, 384, 768)),
    ):
        for machine, network in _NETWORKS.items():
            base = 0.0
            for gpus in counts:
                experts = gpus if PAPER_SHAPES[name].experts else 1
                setup = Setup(machine=machine, nodes=gpus // 8, batch=batch, experts=experts)
                on_ssd = not fits(PAPER_SHAPES[name], setup)
                one = _of_paper(name, replace(setup, ssd=on_ssd))
                total = gpus * one.flop_per_s / 1e15
                ours.setdefault(f"{label}, {network}", []).append((gpus, total))
                base = base or one.flop_per_s
                said = f"{_said(one)}: {total:.1f} PFLOP/s" + ", part of the state on SSD" * on_ssd
                why = f"{one.flop_per_s / base:.3g} times a GPU's rate of 64 GPUs. {_waits(one)}"
                rows.append((f"{label}, {gpus} GPUs, {network}", "scales; curve not at hand", said, "—", why))
    text = """\
arXiv 2303.02868. Its abstract gives +88.9% of throughput at most, and says that GPT3-175B and T5-MoE-1.2T scale over
hundreds of GPUs. The figures of its curves are not at hand, so there is no ratio, but how a GPU's rate changes from 64
GPUs on. Assumed: 4 sequences of 2,048 a GPU, of T5 16 of 512; experts divided over all ranks (2,304 experts: 384 GPUs
in place of 512); networks of 100 Gb/s a node as in the articles, and of a DGX A100; equal shares of tokens for all
experts. State that RAM and GPUs have no room for is on SSD: 3.5 GB/s a node, and 25 GB/s in the DGX. With more GPUs
each has fewer experts' states to update for the same FLOPs, so the T5's rate grows faster than the number of GPUs
until the network binds."""
    plot = Plot("papers_angel", "GPUs", "PFLOP/s of all GPUs", ours)
    return Experiment("Angel-PTM: throughput and scaling", text, _table("case", rows), plot)


# --- ZeRO ---------------------------------------------------------------------------------------------------

_PFLOPS = 15.0
"""Of 400 GPUs, on average from 8B to 100B."""


def zero() -> Experiment:
    rows, points = [], []
    sixty = replace(PAPER_SHAPES["gpt-60b"], heads=32)
    first = 0.0
    for nodes, batch in ((4, 1), (8, 3), (16, 3), (25, 4)):
        one = run(sixty, Setup(machine="v100-32g", nodes=nodes, batch=batch, gpu_alone=True))
        gpus = one.setup.ranks.count
        total = gpus * one.flop_per_s / 1e15
        points.append((float(gpus), total))
        first = first or total
        theirs = "15 PFLOP/s on average from 8B to 100B" if gpus == 400 else "superlinear; figure not at hand"
        grown = f"{total / first:.1f} times the rate of 64 GPUs for {gpus / 64:.2f} times the GPUs"
        ratio = f"{total / _PFLOPS:.2f}" if gpus == 400 else "—"
        rows.append(
            (f"60B, {gpus} GPUs, {batch} sequences a GPU", theirs, f"{_said(one)}: {total:.1f} PFLOP/s", ratio, grown)
        )
    for name, nodes, batch, theirs, figure in (
        ("gpt-13b", 8, 4, "over 40 TFLOP/s a GPU, data parallel only", 40.0),
        ("gpt-100b", 25, 2, "37.5 TFLOP/s a GPU on average up to 100B", 37.5),
        ("gpt-170b", 25, 1, "trains; figure not at hand", 0.0),
    ):
        one = _of_paper(name, Setup(machine="v100-32g", nodes=nodes, batch=batch, gpu_alone=True))
        ratio = f"{one.flop_per_s / 1e12 / figure:.2f}" if figure else "—"
        why = f"{_waits(one)}. Stage 3 needs no model parallelism"
        if name == "gpt-13b":
            why = f"{_waits(one)}. The paper has stage 2 there"
        rows.append((f"{name[4:].upper()}, {nodes * 16} GPUs, {batch} sequences a GPU", theirs, _said(one), ratio, why))
    text = """\
arXiv 1910.02054, DGX-2 nodes of 16 V100-32G, 800 Gb/s between them. The paper uses GPU memory alone, and so do these
plans: every unit has its home there (`device_home_share`), stage 3, at 14 bytes a parameter with clipping; RAM has up
to 8 GiB a rank of buffers. The paper divides layers over 16 GPUs too (model parallelism); here all ranks are data
parallel, with as many sequences a GPU as the paper's batches come to (64, 384, 768 and 1,600 sequences; 800 for 100B,
300 for 170B, rounded up to one a GPU: from memory, unverified; 4 a GPU for 13B is assumed). Its superlinear scaling
comes from memory: with more GPUs, each has room for more sequences.
Stage 3 on 64 GPUs reaches nearly all of a GPU's rate with one sequence, so there is less to gain."""
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
    rows: list[tuple[str, str, str, str, str]] = []
    many: Points = []
    few: Points = []
    for name, layers, hidden, batch in _MODELS:
        shape = _shape(f"gpt-{name}", layers, hidden)
        one = run(shape, Setup(machine="v100-32g", nodes=32, batch=batch, ssd=True))
        many.append((shape.params / 1e12, one.flop_per_s / 1e12))
        mine = one.flop_per_s / 1e12
        why = _waits(one)
        if name == "20T":
            why += "; the paper has 1.25 sequences a GPU, with layers divided over 8 GPUs"
        rows.append(
            (
                f"{name} ({layers}x{hidden}), 512 GPUs, batch {batch}",
                f"{_LOW:.0f} to {_HIGH:.0f} TFLOP/s a GPU over the five",
                _said(one),
                f"{mine / _HIGH:.2f} to {mine / _LOW:.2f}",
                why,
            )
        )
    for name, layers, hidden, batch in _NODE_MODELS:
        shape = _shape(f"gpt-{name}", layers, hidden)
        one = run(shape, Setup(machine="v100-32g", batch=batch, ssd=True))
        few.append((shape.params / 1e12, one.flop_per_s / 1e12))
        theirs = "trains; figure not at hand" if name == "1T" else "over 40 TFLOP/s a GPU"
        ratio = "—" if name == "1T" else f"{one.flop_per_s / 40e12:.2f}"
        rows.append((f"{name} ({layers}x{hidden}), one DGX-2, batch {batch}", theirs, _said(one), ratio, _waits(one)))
    text = """\
arXiv 2104.07857, DGX-2 nodes with NVMe. Shapes and sequences a GPU are those of its table 1, from memory, unverified;
sequences of 1,024. It keeps optimizer states, and of the largest models weights too, on NVMe; a plan fills GPU memory
and RAM first and puts the rest on the drives. It also divides each layer over 4 or 8 GPUs; here large matrices are cut
in tiles, and all ranks are data parallel."""
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


def ten_cache() -> Experiment:
    rows, hits = [], []
    for index, (name, layers, hidden, vocab, ssd, before, after, low, high) in enumerate(_TRAINED):
        shape = _shape(name, layers, hidden, _PAIR_TOKENS, vocab)
        one = run(shape, Setup(machine="a100-40g", gpus=1, batch=16, ssd=ssd, ram_gib=128))
        hits.append((float(index), 100 * one.hit_rate))
        before_s, after_s = before / _STEPS, after / _STEPS
        theirs = f"{before_s:,.1f} -> {after_s:,.1f} s a step, {before / after:.2f} times as fast as ZeRO-Infinity"
        ours = f"{one.step_s:.2f} s a step, {before_s / one.step_s:,.1f} times as fast as ZeRO-Infinity"
        rows.append(
            (
                name + (", NVMe" if ssd else ""),
                f"{theirs}; hit rate {low:.0f}% -> {high:.0f}%",
                f"{ours}; hit rate {one.hit_rate:.0%}",
                f"{after_s / one.step_s:,.1f}",
                _waits(one),
            )
        )
    text = f"""\
arXiv 2511.14124; seconds and hit rates are those of its repository's plots: an epoch of MRPC, {_STEPS} steps of 16
pairs. Its machine is not known here. Assumed: one A100-40G, 128 GiB of RAM (enough for the 7B models in 16 bytes a
parameter, and not for the others), one drive of 3.5 GB/s, {_PAIR_TOKENS} tokens a padded pair; the epochs of 10B to
13B are taken as {_STEPS} steps too, though its script may end after 31. So the seconds are of two machines, and their
ratio says little; how much compute waits says more. Falcon's shapes here have the paper's size, not its single key and
value head. A *hit* here is an access to a unit's weights for which compute does not wait, in forward and in backward;
10Cache counts weights that are on the GPU when they are asked for. **The hit rate is worse than the paper's**: with so
few tokens a step, the link is busy longer than compute, however early a copy starts, and a plan keeps no weights on the
GPU from one step to the next unless their states live there too."""
    names = [one[0] for one in _TRAINED]
    rates = {
        "ZeRO-Infinity": [(float(i), one[-2]) for i, one in enumerate(_TRAINED)],
        "10Cache": [(float(i), one[-1]) for i, one in enumerate(_TRAINED)],
    }
    plot = Plot("papers_10cache", "", "hit rate, %", {"Pagoda, simulated": hits}, rates, bars=True, categories=names)
    return Experiment("10Cache: hit rates and steps", text, _table("model", rows), plot)


EXPERIMENTS: Sequence[Callable[[], Experiment]] = (zero_cache, angel, patrickstar, zero, infinity, ten_cache)


def sections(made: Sequence[Experiment]) -> Iterator[str]:
    """The page's text, without its introduction."""
    for experiment in made:
        yield f"\n## {experiment.title}\n\n{experiment.text}\n"
        yield f"![{experiment.title}: {experiment.plot.ylabel}](../images/{experiment.plot.name}.png)\n"
        yield "\n".join(experiment.table)
