"""Pagoda side by side with what one would use instead: the same model, tokens, arithmetic and machine, in one run.

    python benchmarks/peers.py --ssd DIR --out benchmarks/results/peers.json --docs docs/benchmarks.md

Every system trains in a process of its own, with its authors' recommended settings. What has to be installed is
installed from pinned versions in virtual environments below --cache, never in the environment that runs this. A system
that cannot run is a row with its error.

speed    seconds of a step against plain PyTorch with checkpointing, for each number of tokens; most resident memory;
         bytes written to the SSD; time to the end of the first step; time to save and load a checkpoint. A few systems
         (--together) are in memory at a time, plain PyTorch always. They take turns in blocks of steps, each drained
         before the next one begins
largest  most parameters that train three steps in so much RAM (--limits), by bisection of the number of layers, with
         a time limit for each turn (--turn-s); models of more than --most-parameters are not tried, until it is raised

`--part speed`, `--part largest` or `--part docs` does one of them. Figures that --out has from the same settings are
kept and not measured again, so a run that was stopped goes on; --again measures the systems that it is given again.
Another --precision, --micro-batches or --lora-rank adds tables to --out, and changes none that it has.
Two ranks are in benchmarks/two_ranks.py.
"""

import argparse
import json
import os
import signal
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

from rich.console import Console

import pagoda
from marks import write_between_marks
from pagoda.calibrate.meter import cpu_name
from pagoda.memory.sizes import parse_bytes
from pagoda.process import restart_spinning_briefly
from peer_suite.environments import InstallError
from peer_suite.process import Peer, Task, cgroups_are_to_be_had
from peer_suite.report import draw, tables
from peer_suite.systems import PLAIN, SYSTEMS
from script import write
from training import Workload
from turns import ROOT, TurnFailed, ratio_of

Figures = dict[str, Any]
STEPS = {128: 12, 512: 8, 2048: 4}
"""Tokens of a step -> steps of a turn; other numbers of tokens get one. The last step's update has no forward pass to
hide under, so a turn of few steps is slower than a long run."""
CLOSE_ENOUGH = 1.15
"""Largest models: the least number of layers that was too much over the most that was not."""
NOT_TRIED = "more were not tried"
PROCESS_BYTES = 600 << 20
"""What a process takes before it has a model."""


class Group:
    """Systems that are in memory together, and the figures of each; one that fails leaves the group."""

    def __init__(self, names: Sequence[str], start: Callable[[str], Peer], held: ExitStack) -> None:
        self.figures: dict[str, Figures] = {}
        self.peers: dict[str, Peer] = {}
        for name in names:
            self.figures[name] = {"label": SYSTEMS[name].label, "settings": SYSTEMS[name].settings}
            try:
                self.peers[name] = held.enter_context(closing(start(name)))
            except InstallError as error:
                self.drop(name, error)
            else:
                if self.turn(name, "start") is not None:
                    self.figures[name]["start_s"] = time.perf_counter() - self.peers[name].started

    def turn(self, name: str, turn: str) -> float | None:
        """Seconds of a turn, or None if the system has failed in it."""
        try:
            return self.peers[name].turn(turn)
        except TurnFailed as failure:
            self.drop(name, failure)
            return None

    def drop(self, name: str, error: BaseException) -> None:
        """Leaves a system out from here."""
        if name == PLAIN:
            raise SystemExit(f"{PLAIN}, with which all are compared: {error}")
        self.peers.pop(name, None)
        self.figures[name]["error"] = str(error)
        print(f"{name}: {error}", file=sys.stderr)

    def train(self, tokens: int, steps: int, rounds: int) -> None:
        """Rounds of turns of so many steps, after one that is not counted; each round another system begins."""
        for peer in self.peers.values():
            peer.forget_peak()
        seconds: dict[str, list[float]] = {name: [] for name in self.peers}
        written = dict.fromkeys(self.peers, 0)
        for number in range(rounds + 1):
            names = [*self.peers]
            first = number % len(names)
            for name in names[first:] + names[:first]:
                before = self.peers[name].written_bytes()
                if (elapsed := self.turn(name, str(tokens))) is not None and number:
                    seconds[name].append(elapsed / steps)
                    written[name] += self.peers[name].written_bytes() - before
            print(f"{tokens} tokens, round {number} of {rounds}", file=sys.stderr)
        for name, peer in self.peers.items():
            self.figures[name].setdefault("tokens", {})[str(tokens)] = {
                "step_s": seconds[name],
                "ratio": ratio_of(seconds[name], seconds[PLAIN]),
                "peak_bytes": peer.peak_bytes(),
                "written_bytes": written[name] / (steps * rounds),
            }

    def save_and_load(self) -> None:
        """A checkpoint of each system, one after the other."""
        for name in [*self.peers]:
            peer = self.peers[name]
            for turn in ("save", "load"):
                peer.forget_peak()
                before = peer.peak_bytes()
                if (elapsed := self.turn(name, turn)) is None:
                    break
                self.figures[name] |= {f"{turn}_s": elapsed, f"{turn}_bytes": peer.peak_bytes() - before}

    def take_losses(self) -> None:
        """The losses of every system that is left."""
        for name, peer in self.peers.items():
            self.figures[name]["losses"] = peer.losses()


def speed(arguments: argparse.Namespace, kept: dict[str, Figures], keep: Callable[[], None]) -> None:
    """Measures the systems that `kept` lacks, group by group; each group's figures are kept when it has ended."""
    task = Task(
        arguments.model,
        {tokens: STEPS.get(tokens, 1) for tokens in arguments.tokens},
        clip=arguments.clip,
        micro_batches=arguments.micro_batches,
        precision=arguments.precision,
        lora_rank=arguments.lora_rank,
    )
    wanted = [name for name in arguments.systems if arguments.again or name not in kept]
    others = [name for name in wanted if name != PLAIN]
    size = max(1, arguments.together - 1)
    groups = [others[at : at + size] for at in range(0, len(others), size)] or ([[]] if wanted else [])
    for names in groups:
        print(f"together: {', '.join((PLAIN, *names))}", file=sys.stderr)
        with ExitStack() as held:
            group = Group(
                (PLAIN, *names),
                lambda name: Peer(name, task, arguments.cache, arguments.ssd, None, arguments.turn_s),
                held,
            )
            for tokens, steps in sorted(task.tokens.items()):
                group.train(tokens, steps, arguments.rounds)
            group.save_and_load()
            group.take_losses()
        kept |= {name: figures for name, figures in group.figures.items() if name != PLAIN or name not in kept}
        keep()


def largest(arguments: argparse.Namespace, kept: dict[str, Figures], keep: Callable[[], None]) -> None:
    """The largest model of each system that `kept` lacks, for each limit; kept when it has been found."""
    of_one, of_two = (parameters_of(arguments.model, layers) for layers in (1, 2))
    of_layer = of_two - of_one
    most = max(1, int(arguments.most_parameters - of_one) // of_layer + 1)
    at_least = dict.fromkeys(arguments.systems, 0)
    for limit in sorted(arguments.limits, key=parse_bytes):
        of_limit = kept.setdefault(limit, {})
        for name in arguments.systems:
            if name in of_limit and not arguments.again:
                at_least[name] = max(at_least[name], of_limit[name]["layers"])
                if of_limit[name]["stopped_by"] != NOT_TRIED or at_least[name] >= most:
                    continue
            first = int(parse_bytes(limit) - PROCESS_BYTES) // int(SYSTEMS[name].ram_bytes * of_layer)

            def fails(layers: int, name: str = name, limit: str = limit) -> str | None:
                return failure_of(name, arguments, parse_bytes(limit), layers)

            layers, reason = most_layers(fails, first, at_least[name], most)
            at_least[name] = layers
            figures: Figures = {"label": SYSTEMS[name].label, "stopped_by": reason, "layers": layers}
            figures["parameters"] = of_one + (layers - 1) * of_layer if layers else 0
            of_limit[name] = figures
            print(f"{limit}: {name}: {figures['parameters'] / 1e6:,.0f} M parameters; {reason}", file=sys.stderr)
            keep()


def parameters_of(model: str, layers: int) -> int:
    """Of a model with so many layers."""
    with pagoda.deferred_init():
        return sum(p.numel() for p in Workload(model, 1, 128, layers=layers).build().parameters())


def most_layers(failure: Callable[[int], str | None], first: int, fits: int, most: int) -> tuple[int, str]:
    """(most layers that train, why not more). `failure` tries some, and says why they do not train.

    So many as `fits` are known to; `first` are tried first. Doubles or halves them until it knows both sides, then
    bisects.
    """
    too_many, reason = most + 1, NOT_TRIED
    layers = min(max(1, first, fits + 1), most)
    while fits < most and too_many > max(fits + 1, fits * CLOSE_ENOUGH):
        if (failed := failure(layers)) is None:
            fits = layers
        else:
            too_many, reason = layers, failed
        doubled, halved = 2 * fits, layers // 2
        between = round((fits * too_many) ** 0.5)
        layers = doubled if too_many > most else between if fits else halved
        layers = min(max(layers, fits + 1), too_many - 1)
    return fits, reason


def failure_of(name: str, arguments: argparse.Namespace, limit: int, layers: int) -> str | None:
    """Why so many layers do not train three steps in so much RAM; None if they do."""
    tokens = min(arguments.tokens)
    task = Task(arguments.model, {tokens: 2}, clip=arguments.clip, layers=layers, precision=arguments.precision)
    try:
        with closing(Peer(name, task, arguments.cache, arguments.ssd, limit, arguments.turn_s)) as peer:
            peer.turn("start")
            peer.turn(str(tokens))
    except (InstallError, TurnFailed) as failure:
        return str(failure)
    return None


def figures_of(result: Figures, part: str, settings: Figures) -> Figures:
    """The figures that a part has from earlier runs with the same settings; those of others go."""
    if result.get(part, {}).get("settings") != settings:
        result[part] = {"settings": settings, "load_average": 0.0, "figures": {}}
    result[part]["load_average"] = max(result[part]["load_average"], os.getloadavg()[0])
    figures: Figures = result[part]["figures"]
    return figures


def variant_of(arguments: argparse.Namespace) -> str:
    """What is trained, in words: each variant has figures of its own in --out."""
    words = [arguments.precision]
    if arguments.micro_batches > 1:
        words.append(f"{arguments.micro_batches} micro-batches a step")
    if arguments.lora_rank is not None:
        words.append(f"LoRA of rank {arguments.lora_rank}")
    return ", ".join(words)


def parsed() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ssd", type=Path, required=True, help="a directory on the SSD")
    parser.add_argument("--model", default="llama-110m")
    parser.add_argument("--systems", nargs="+", default=[*SYSTEMS], choices=[*SYSTEMS])
    parser.add_argument("--tokens", type=int, nargs="+", default=[*STEPS], help="of a step; largest takes the fewest")
    parser.add_argument("--micro-batches", type=int, default=1, help="of a step, each of --tokens; largest has one")
    parser.add_argument("--precision", choices=("bf16", "fp32"), default="bf16", help="of weights and compute")
    parser.add_argument("--lora-rank", type=int, help="of adapters over frozen weights; largest trains all weights")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--together", type=int, default=5, help="processes that are in memory at a time")
    parser.add_argument("--clip", type=float, default=1.0)
    parser.add_argument("--limits", nargs="+", default=["3GiB", "6GiB", "12GiB"])
    parser.add_argument("--most-parameters", type=float, default=5e9, help="of the largest models that are tried")
    parser.add_argument("--turn-s", type=float, default=300.0, help="most seconds of a turn")
    parser.add_argument("--part", choices=("all", "speed", "largest", "docs"), default="all")
    parser.add_argument("--again", action="store_true")
    parser.add_argument("--cache", type=Path, default=ROOT / "build" / "peers", help="for the virtual environments")
    parser.add_argument("--docs", type=Path, help="where to write the tables; the plots go beside it")
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    if arguments.rounds < 2:
        parser.error(f"--rounds is {arguments.rounds}: it must be at least 2, as quartiles are given")
    return arguments


def main() -> None:
    """Measures what is wanted, and writes it."""
    restart_spinning_briefly()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended by SIGTERM"))  # processes end and files go
    arguments = parsed()
    result: Figures = json.loads(arguments.out.read_text()) if arguments.out.exists() else {}

    def keep() -> None:
        write(arguments.out, result)

    shared: Figures = {"machine": f"{cpu_name()}, {os.cpu_count()} cores", "model": arguments.model}
    shared |= {"clip": arguments.clip, "precision": arguments.precision}
    if arguments.part in ("all", "speed"):
        settings = shared | {"tokens": arguments.tokens, "rounds": arguments.rounds, "together": arguments.together}
        settings |= {"micro_batches": arguments.micro_batches, "lora_rank": arguments.lora_rank}
        speed(arguments, figures_of(result.setdefault("speed", {}), variant_of(arguments), settings), keep)
    if arguments.part in ("all", "largest"):
        by = "a cgroup" if cgroups_are_to_be_had() else "the parent, which ends a process whose resident memory is more"
        settings = shared | {"tokens": min(arguments.tokens), "turn_s": arguments.turn_s, "limited_by": by}
        largest(arguments, figures_of(result, "largest", settings), keep)
    Console().print(tables(result), soft_wrap=True, highlight=False, markup=False)
    if arguments.docs is not None:
        write_between_marks(arguments.docs, "peers.py", tables(result))
        draw(result, arguments.docs.parent)


if __name__ == "__main__":
    main()
