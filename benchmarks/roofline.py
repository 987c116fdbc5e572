"""How close a step comes to what the hardware allows, and where the rest of it goes.

    python benchmarks/roofline.py --ssd DIR --out benchmarks/results/roofline.json --docs docs/internals/roofline.md

For each home of the state and each number of tokens, rounds take turns: raw kernels, plain PyTorch, and two steps of
Pagoda, of which the second is recorded. A bound is the work of the step over the rate of a raw kernel in the same
round:

compute  FLOPs of the step, recomputation included, over the rate of bf16 products of the model's linear layers
DRAM     bytes that updates, weights, gradients and the SSD move through RAM, over the rate of a kernel that only reads
         and writes the streams of an update
SSD      bytes of each direction over what raw reads and writes reach at once
link     bytes that lanes copy from one memory to another, over the rate of a plain copy

The limit is the longest of these, or a step of plain PyTorch where that takes longer: operators do more than products.
Transfers of the SSD slow compute, since both use the same RAM and, on a virtual machine, perhaps the same cores. How
much is measured too: plain PyTorch beside raw streams of as many bytes.
What a step takes above plain PyTorch is where its record has it: stalls, by the lane that compute waited for, and how
much longer forward, backward and `step()` take. Beside that are what hashing and Python take on one core, and how long
updates ran while neither compute nor the SSD did.
"""

import os
import statistics
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from contextlib import closing
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import tyro
from rich.console import Console
from torch import nn

import pagoda
from marks import write_between_marks
from pagoda.calibrate.bookkeeping import measure_bookkeeping
from pagoda.calibrate.cpu import Sweeper, filled, roof_bf16, states_of
from pagoda.calibrate.meter import Effort, Meter, cpu_name
from pagoda.forecast.flops import forward_flops, weightless
from pagoda.memory.arena import Arena
from pagoda.memory.ssd.hashes import hashes_of
from pagoda.plan.buffers import BLOCK_ELEMENTS
from pagoda.plan.lanes import LaneName
from pagoda.plan.units import is_within, layers_of
from pagoda.prepare.construct import describe
from pagoda.simulate.timeline import Timeline
from peer_suite.systems import SYSTEMS
from script import begin, write
from step_time import PAGE, raw_bandwidth, raw_streams
from training import Paged, Plain, Workload

Figures = dict[str, Any]
STATES = ("pagoda-ram", "pagoda-half", "pagoda-moments", "pagoda-ssd")
UPDATE_BYTES = 26
"""Of a parameter, through RAM: an update reads 14 and writes 12."""
OTHER_BYTES = 12
"""Forward, recomputation and backward read a bf16 weight; autograd writes a gradient, and it is copied to its page."""
WARM_UP = 2
"""Steps before the first that is recorded: one is traced, one planned for it."""
HIDDEN = ("pagoda-half",)
"""States that are in the file of results and not on the page."""
DETAILED_TOKENS = 512
"""Tokens of the steps whose seconds the page lists; the file of results has all."""
SMALLEST_LOSS_S = 0.005
STEP = "step"
"""What the record calls compute in `step()`."""
_PRODUCT_S = 0.05


@dataclass(frozen=True)
class Raw:
    """Rates of raw kernels, a second."""

    flops: float
    memory_bytes: float
    ssd_read_bytes: float
    ssd_write_bytes: float
    link_bytes: float
    hashed_bytes: float
    parameters_of_python: float
    """Trainable parameters whose bookkeeping Python does."""


class Work:
    """What a step of a workload does, whatever its state's home."""

    def __init__(self, workload: Workload) -> None:
        with weightless():
            of_modules = forward_flops(workload.build(), workload.batch_size, workload.seq_len)
        with pagoda.deferred_init():
            model = workload.build(workload.checkpointing)
        layers = {layer.name for layer in layers_of(describe(model))}
        again = {name: 4 if is_within(name, layers) else 3 for name in of_modules}
        self.flops = sum(flops * again[name] for name, flops in of_modules.items())
        """Backward does twice what forward does, and the forward of layers once more."""
        self.parameters = sum(p.numel() for p in model.parameters())
        self.tensors = sum(p.requires_grad for p in model.parameters())
        linear = {name: module for name, module in model.named_modules() if isinstance(module, nn.Linear)}
        self.products = Counter(
            (workload.tokens, one.in_features, one.out_features, again.get(name, 3) - 2) for name, one in linear.items()
        )
        """(tokens, inputs, outputs, forwards) -> layers of this kind."""

    def product_rate(self) -> float:
        """FLOPs a second of all products of the step's linear layers, one after another."""
        flops = seconds = 0.0
        for (tokens, inputs, outputs, forwards), count in self.products.items():
            x, grad, weight = (
                torch.randn(shape).bfloat16() for shape in ((tokens, inputs), (tokens, outputs), (outputs, inputs))
            )
            once = _least_s(x.__matmul__, weight.T)
            both = _least_s(grad.__matmul__, weight) + _least_s(grad.T.__matmul__, x)
            seconds += count * (forwards * once + both)
            flops += count * (forwards + 2) * 2.0 * tokens * inputs * outputs
        return flops / seconds

    def raw(self, directory: Path, mib: int, python_s: float) -> Raw:
        """All rates, now; streams of the SSD have so many MiB, those of RAM a sixth. Python takes `python_s` for a
        parameter."""
        params, read_and_written = mib << 13, raw_bandwidth(str(directory), mib / 1024)
        streams = [*states_of("bf16", params), filled(params, torch.bfloat16, 1.0)]
        with closing(Sweeper(params, BLOCK_ELEMENTS, torch.get_num_threads())) as sweeper:
            memory_s = _least_s(sweeper.arrays(roof_bf16, streams))
        source, target = streams[-2:-4:-1]
        page = Arena(PAGE).view(0, PAGE)
        return Raw(
            self.product_rate(),
            UPDATE_BYTES * params / memory_s,
            *read_and_written,
            source.nbytes / _least_s(target.copy_, source),
            PAGE / _least_s(hashes_of, page, PAGE),
            1 / python_s,
        )


def _least_s(work: Callable[..., object], *arguments: object) -> float:
    """The shortest of several runs."""
    work(*arguments)
    seconds: list[float] = []
    end = time.perf_counter() + _PRODUCT_S
    while len(seconds) < 3 or time.perf_counter() < end:
        start = time.perf_counter()
        work(*arguments)
        seconds.append(time.perf_counter() - start)
    return min(seconds)


def bounds_of(work: Work, raw: Raw, moved: Mapping[str, int]) -> dict[str, float]:
    """Seconds that each resource needs for a step that moves so many bytes on each lane."""
    read, written = moved.get("ssd_read", 0), moved.get("ssd_write", 0)
    through_ram = (UPDATE_BYTES + OTHER_BYTES) * work.parameters + read + written
    return {
        "compute": work.flops / raw.flops,
        "DRAM": through_ram / raw.memory_bytes,
        "SSD": max(read / raw.ssd_read_bytes, written / raw.ssd_write_bytes),
        "link": (moved.get("h2d", 0) + moved.get("d2h", 0)) / raw.link_bytes,
    }


def lost_in(step: Timeline, work: Work, raw: Raw, plain_passes_s: float, plain_s: float) -> dict[str, float]:
    """Where the seconds of a step are that plain PyTorch does not take, and what else takes cores meanwhile."""
    compute = [span for span in step.spans if span.lane == LaneName.COMPUTE]
    in_step = sum(span.end_s - span.start_s for span in compute if span.name == STEP)
    passes = sum(span.end_s - span.start_s for span in compute) - in_step
    hashed = step.bytes_moved.get("ssd_read", 0) + step.bytes_moved.get("ssd_write", 0)
    updates = covered(step, ("update",))
    others = covered(step, (LaneName.COMPUTE, "ssd_read", "ssd_write"))
    return {
        **{f"waits for {lane}": seconds for lane, seconds in step.stall_s.items() if seconds > 0},
        "forward and backward, above plain PyTorch": passes - plain_passes_s,
        "step()": in_step,
        "update of plain PyTorch, which Pagoda overlaps": plain_passes_s - plain_s,
        "hashing, on one core": hashed / raw.hashed_bytes,
        "Python, on one core": work.tensors / raw.parameters_of_python,
        "updates while nothing else runs": length_of(updates) - length_of(both(updates, others)),
    }


Spans = list[tuple[float, float]]


def covered(step: Timeline, lanes: Iterable[str]) -> Spans:
    """When one of the lanes worked, inside the step: spans that do not touch, in order."""
    lanes, union = set(lanes), Spans()
    for span in sorted((max(0.0, s.start_s), s.end_s) for s in step.spans if s.lane in lanes):
        if union and span[0] <= union[-1][1]:
            union[-1] = union[-1][0], max(span[1], union[-1][1])
        elif span[1] > span[0]:
            union.append(span)
    return union


def both(one: Spans, other: Spans) -> Spans:
    """When both did."""
    pairs = ((max(a[0], b[0]), min(a[1], b[1])) for a in one for b in other)
    return [pair for pair in pairs if pair[0] < pair[1]]


def length_of(spans: Spans) -> float:
    return sum(end - start for start, end in spans)


def plain_s(plain: Plain, ids: torch.Tensor) -> tuple[float, float]:
    """Seconds of (forward and backward, a step) of plain PyTorch."""
    start = time.perf_counter()
    plain.model(input_ids=ids, labels=ids).loss.backward()
    passes = time.perf_counter() - start
    plain.model.zero_grad()
    start = time.perf_counter()
    plain.step(ids)
    return passes, time.perf_counter() - start


def plain_beside_s(plain: Plain, ids: torch.Tensor, folder: str, moved: Mapping[str, int]) -> float:
    """Seconds until both have ended: a step of plain PyTorch, and raw streams of as many bytes as the SSD moved."""
    with raw_streams(folder, moved.get("ssd_read", 0), moved.get("ssd_write", 0)) as stream:
        start = time.perf_counter()
        beside = threading.Thread(target=stream)
        beside.start()
        plain.step(ids)  # on this thread: on another one, OpenMP would begin a second team
        beside.join()
        return time.perf_counter() - start


def recorded(paged: Paged, ids: torch.Tensor) -> Timeline:
    """A step that finds the updates of the one before under way."""
    paged.step(ids)
    paged.optimizer.trace_next_step()
    paged.step(ids)
    assert paged.optimizer.timeline is not None
    step = paged.optimizer.timeline
    paged.drain()
    return step


def measure(
    state: str, workloads: Mapping[int, Workload], rounds: int, rates: Callable[[Work], Raw], ssd: Path
) -> Figures:
    """Tokens -> figures of a home of the state, each the median over rounds."""
    largest, measured = workloads[max(workloads)], Figures()
    with tempfile.TemporaryDirectory(dir=ssd) as folder:
        plain, paged = Plain(largest), SYSTEMS[state].build(largest, Path(folder))
        assert isinstance(paged, Paged)
        with closing(plain), closing(paged):
            for tokens, workload in workloads.items():
                work, batches = Work(workload), workload.batches()
                for _ in range(WARM_UP):
                    paged.step(next(batches))
                found = [
                    figures_of_round(work, rates(work), plain, paged, next(batches), folder) for _ in range(rounds)
                ]
                measured[str(tokens)] = medians(found)
                limit = measured[str(tokens)]["limit_s"]
                print(f"{state}, {tokens} tokens: {measured[str(tokens)]['step_s'] / limit:.2f} of the limit")
    return measured


def figures_of_round(work: Work, raw: Raw, plain: Plain, paged: Paged, ids: torch.Tensor, folder: str) -> Figures:
    """One round of plain PyTorch and Pagoda, after raw kernels."""
    passes_s, whole_s = plain_s(plain, ids)
    step = recorded(paged, ids)
    beside_s = plain_beside_s(plain, ids, folder, step.bytes_moved)
    bounds = bounds_of(work, raw, step.bytes_moved)
    limit = max(whole_s, *bounds.values())
    return {
        "raw": asdict(raw),
        "bounds_s": bounds,
        "plain_s": whole_s,
        "plain_beside_s": beside_s,
        "limit_s": limit,
        "step_s": step.step_s,
        "of_limit": limit / step.step_s,
        "lost_s": lost_in(step, work, raw, passes_s, whole_s),
    }


def medians(rounds: list[Figures]) -> Figures:
    """Of every number, over rounds; 0 where a round lacks it."""
    keys = dict.fromkeys(key for one in rounds for key in one)
    result: Figures = {}
    for key in keys:
        values = [one.get(key, 0.0) for one in rounds]
        nested = [value for value in values if isinstance(value, dict)]
        result[key] = medians(nested) if nested else statistics.median(values)
    return result


def tables(result: Figures) -> str:
    """The figures as Markdown."""
    lines = [
        f"{result['machine']}, load average {result['load_average']:.1f} before the run. `{result['model']}`, clipping "
        f"at {result['clip']}; medians of {result['rounds']} rounds. Seconds.",
        "",
        "| state | tokens | compute | DRAM | SSD | plain PyTorch | a step | limit / step | plain with SSD / step |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    shown_states = {state: of for state, of in result["figures"].items() if state not in HIDDEN}
    rows = [(state, tokens, one) for state, of in shown_states.items() for tokens, one in of.items()]
    for state, tokens, one in rows:
        candidates = {**one["bounds_s"], "plain": one["plain_s"]}
        longest = max(candidates, key=lambda name: candidates[name])
        shown = {name: seconds for name, seconds in candidates.items() if name != "link" or name == longest}
        cells = [f"**{s:.3f}**" if name == longest else f"{s:.3f}" for name, s in shown.items()]
        step = one["step_s"]
        cells += [f"{step:.3f}", f"{one['of_limit']:.2f}", f"{one['plain_beside_s'] / step:.2f}"]
        lines.append(f"| {label(state)} | {int(tokens):,} | {' | '.join(cells)} |")
    few = [(state, tokens, one) for state, tokens, one in rows if int(tokens) == DETAILED_TOKENS] or rows
    names = dict.fromkeys(name for _, _, one in few for name, s in one["lost_s"].items() if abs(s) >= SMALLEST_LOSS_S)
    lines += ["", "| seconds of a step | " + " | ".join(f"{label(s)}, {int(t):,}" for s, t, _ in few) + " |"]
    lines.append("|---|" + "---|" * len(few))
    for name in names:
        cells = [f"{one['lost_s'].get(name, 0.0):.2f}" for _, _, one in few]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join([*lines, "", "![Bounds of a step, and what it takes](roofline.png)"])


def label(state: str) -> str:
    return SYSTEMS[state].label.removeprefix("Pagoda, ")


def draw(result: Figures, path: Path) -> None:
    """For each number of tokens, a bar for each home: the step, with its stalls on top; and its bounds as marks."""
    from matplotlib.figure import Figure

    figures = result["figures"]
    tokens = [*next(iter(figures.values()))]
    drawing = Figure(figsize=(3.2 * len(tokens), 4.2), dpi=100, layout="constrained")
    for index, (axes, count) in enumerate(zip(drawing.subplots(1, len(tokens), squeeze=False)[0], tokens, strict=True)):
        for place, of in enumerate(figures.values()):
            one, first = of[count], not (index or place)
            stalls = sum(s for name, s in one["lost_s"].items() if name.startswith("waits for"))
            axes.bar(place, one["step_s"] - stalls, color="0.8", label="Pagoda" if first else None)
            axes.bar(
                place, stalls, bottom=one["step_s"] - stalls, color="0.6", label="compute waits" if first else None
            )
            marks = {**one["bounds_s"], "plain PyTorch": one["plain_s"], "plain beside the SSD": one["plain_beside_s"]}
            for number, (name, seconds) in enumerate(marks.items()):
                axes.plot(
                    place,
                    seconds,
                    "_",
                    markersize=24,
                    markeredgewidth=2,
                    color=f"C{number}",
                    label=name if first else None,
                )
        axes.set(title=f"{int(count):,} tokens", xticks=range(len(figures)))
        axes.set_xticklabels([label(state).replace(" ", "\n") for state in figures], fontsize="x-small")
        if not index:
            axes.set_ylabel("seconds of a step")
    drawing.legend(loc="outside lower center", ncols=4, fontsize="small")
    drawing.savefig(path)


def main(
    ssd: Path,
    model: str = "llama-110m",
    tokens: tuple[int, ...] = (128, 512, 2048),
    states: tuple[str, ...] = STATES,
    rounds: int = 5,
    clip: float = 1.0,
    layers: int | None = None,
    raw_mib: int = 1536,
    out: Path | None = None,
    docs: Path | None = None,
) -> None:
    """Measure and write; `raw_mib` is what the SSD's raw streams move, `layers` replaces the model's number."""
    begin()
    workloads = {count: Workload(model, 1, count, clip=clip, layers=layers) for count in sorted(tokens)}
    result: Figures = {
        "machine": f"{cpu_name()}, {os.cpu_count()} cores",
        "load_average": os.getloadavg()[0],
        "model": model,
        "clip": clip,
        "rounds": rounds,
    }
    python_s = measure_bookkeeping(Meter("this machine", Effort(figure_s=0.1), lambda _: None)).value

    def rates(work: Work) -> Raw:
        return work.raw(ssd, raw_mib, python_s)

    result["figures"] = {state: measure(state, workloads, rounds, rates, ssd) for state in states}
    text = tables(result)
    Console().print(text, soft_wrap=True, highlight=False, markup=False)
    write(out, result)
    if docs is not None:
        write_between_marks(docs, "roofline.py", text)
        draw(result, docs.with_suffix(".png"))


if __name__ == "__main__":
    tyro.cli(main)
