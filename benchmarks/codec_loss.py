"""The loss with compressed moments against exact ones, over several seeds.

A Llama of 14 million parameters learns the bytes of the built-in text, or the last layers of a model in a GGUF file are
fine-tuned on a text. With one seed, all codecs have the same initial weights and batches. A run's figure is the loss on
rows that it never trained on. Every run is written to `--out` as soon as it has ended, and runs in the file are not
repeated.

    python benchmarks/codec_loss.py --out benchmarks/results/codecs.json --plot docs/codecs.png
    python benchmarks/codec_loss.py --gguf SmolLM2-135M-Instruct.Q4_1.gguf --text lines.txt --steps 300 --seq-len 16 \
        --lr 2e-5 --out benchmarks/results/codecs.json

`--label` names the codec of another version of the package, run with the same script:

    PYTHONPATH=OTHER python benchmarks/codec_loss.py --codecs 8bit --label "8bit, map" \
        --out benchmarks/results/codecs.json
"""

import json
import math
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
import tyro
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

from pagoda.config.run import Moments
from pagoda.optim import AdamW, flat
from script import begin, machine, write
from text import WINDOW, batch_of, batches_of_text, smoothed

HELD_OUT = 2048
"""Tokens on which a run's figure is the mean loss."""
TUNED = 10
"""Layers of the model in a file that are trained."""
Row = Callable[[int], torch.Tensor]
"""Number of a row, in the order of a seed -> its tokens, shape [tokens]."""


@dataclass(frozen=True)
class Settings:
    """What the runs of one model have in common."""

    model: str
    steps: int
    seq_len: int
    lr: float


@dataclass
class Run:
    """One model, codec and seed."""

    settings: Settings
    codec: str
    seed: int
    held_out: float
    """Mean loss on `HELD_OUT` tokens after the last step."""
    curve: list[float]
    """Mean loss of each `WINDOW` steps."""
    step_s: float


def of_bytes(seq_len: int, seed: int) -> tuple[Any, Row]:
    """A new model, and rows of the built-in text."""
    sizes = {"hidden_size": 384, "intermediate_size": 1024, "num_hidden_layers": 8, "num_attention_heads": 6}
    torch.manual_seed(seed)
    model = LlamaForCausalLM(LlamaConfig(vocab_size=256, tie_word_embeddings=True, **sizes))
    batches = batches_of_text(seq_len, 1, seed)
    return model, lambda index: batch_of(batches, index)["input_ids"][0]


def of_gguf(gguf: Path, text: Path, seq_len: int, seed: int) -> tuple[Any, Row]:
    """The model of a file, of which the last `TUNED` layers are trained, and rows of a text."""
    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    model = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32)
    model.requires_grad_(False)
    model.model.layers[-TUNED:].requires_grad_(True)
    tokens = torch.tensor(tokenizer(text.read_text()[:2_000_000])["input_ids"])
    rows = tokens[: len(tokens) // seq_len * seq_len].view(-1, seq_len)
    order = torch.randperm(len(rows), generator=torch.Generator().manual_seed(seed))
    return model, lambda index: rows[order[index]]


def trained(model: Any, row: Row, codec: Moments, label: str, seed: int, settings: Settings) -> Run:
    """Train with the defaults of AdamW, a warm-up and a cosine, one row a step, on the update kernels alone. Everything
    but the moments is in fp32."""
    model.config.use_cache = False
    model.train()
    rule = AdamW(lr=settings.lr, moments=codec, seed=seed)
    params = {name: param for name, param in model.named_parameters() if param.requires_grad}
    gradients = torch.zeros(sum(param.numel() for param in params.values()))
    states, start = {}, 0
    for name, param in params.items():
        n = param.numel()
        param.grad = gradients[start : start + n].view(param.shape)
        own = {spec.name: torch.zeros(spec.elements(n), dtype=spec.dtype) for spec in rule.own_states()}
        states[name], start = {"weight": param.data.view(-1), **own}, start + n
    losses, begun, steps = [], time.perf_counter(), settings.steps
    for step in range(steps):
        ids = row(step)[None]
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        losses.append(loss.item())
        clip = min(1.0, 1.0 / gradients.norm().item())
        rate = min(1.0, 20 * (step + 1) / steps) * (0.55 + 0.45 * math.cos(math.pi * step / steps))
        scalars = replace(rule, lr=settings.lr * rate).scalars(step + 1, clip)
        for name, param in params.items():
            flat.update(rule, states[name], param.grad.view(-1), scalars, rule.noise(name, step + 1))
        gradients.zero_()
    step_s = (time.perf_counter() - begun) / steps
    model.eval()
    with torch.no_grad():
        rows = torch.stack([row(steps + index) for index in range(HELD_OUT // settings.seq_len)])
        held_out = statistics.fmean(model(input_ids=ids, labels=ids).loss.item() for ids in rows.chunk(8))
    curve = [round(loss, 4) for loss in smoothed(losses)[WINDOW - 1 :: WINDOW]]
    return Run(settings, label, seed, round(held_out, 5), curve, round(step_s, 2))


def figures(runs: list[Run]) -> Iterator[dict[str, object]]:
    """For each model and codec: the loss of each seed, and its difference from fp32 and bf16 with this seed."""
    keys = dict.fromkeys((run.settings.model, run.codec) for run in runs)
    for model, codec in keys:
        losses = {run.seed: run.held_out for run in runs if (run.settings.model, run.codec) == (model, codec)}
        figure: dict[str, object] = {"model": model, "codec": codec, "seeds": len(losses)}
        figure["mean"] = round(statistics.fmean(losses.values()), 4)
        figure["each"] = [round(losses[seed], 4) for seed in sorted(losses)]
        for exact in ("fp32", "bf16"):
            theirs = {run.seed: run.held_out for run in runs if (run.settings.model, run.codec) == (model, exact)}
            if codec != exact and (shared := sorted(losses.keys() & theirs.keys())):
                figure[f"minus {exact}"] = [round(losses[seed] - theirs[seed], 4) for seed in shared]
        yield figure


def draw(runs: list[Run], path: Path) -> None:
    """The curves of each model's first seed."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 3.5), dpi=100, layout="constrained")
    models = list(dict.fromkeys(run.settings.model for run in runs))
    for axes, model in zip(figure.subplots(1, len(models), squeeze=False)[0], models, strict=True):
        for run in (run for run in runs if run.settings.model == model and run.seed == 0):
            steps = range(WINDOW, run.settings.steps + 1, WINDOW)
            axes.plot(steps, run.curve, label=run.codec, linewidth=0.8)
        axes.set(title=model, xlabel="step", ylabel=f"loss, mean of {WINDOW} steps")
        axes.legend()
    figure.savefig(path)


def main(
    gguf: Path | None = None,
    text: Path | None = None,
    codecs: tuple[Moments, ...] = ("8bit", "bf16", "fp32"),
    label: str | None = None,
    seeds: tuple[int, ...] = (0, 1, 2),
    steps: int = 2000,
    seq_len: int = 32,
    lr: float = 1e-3,
    threads: int = 1,
    out: Path | None = None,
    plot: Path | None = None,
) -> None:
    """Train with each codec and seed. `plot` is a PNG with the curves, which needs the extra `plot`."""
    begin()
    torch.set_num_threads(threads)
    settings = Settings("llama, 14M" if gguf is None else gguf.stem, steps, seq_len, lr)
    for seed in seeds:
        for codec in codecs:
            name = label or codec
            if any((run.settings, run.codec, run.seed) == (settings, name, seed) for run in kept(out)):
                continue
            model, row = of_bytes(seq_len, seed) if gguf is None else of_gguf(gguf, text or gguf, seq_len, seed)
            run = trained(model, row, codec, name, seed, settings)
            print(f"{settings.model}, {name}, seed {seed}: {run.held_out:.4f}, {run.step_s:.2f} s a step", flush=True)
            # Other processes may have added runs to the file in the meantime.
            runs = [*kept(out), run]
            found = list(figures(runs))
            write(out, {**machine(), "held_out_tokens": HELD_OUT, "figures": found, "runs": [asdict(r) for r in runs]})
    runs = kept(out)
    print(*figures(runs), sep="\n")
    if plot is not None:
        draw(runs, plot)


def kept(out: Path | None) -> list[Run]:
    """The runs in a file."""
    if out is None or not out.exists():
        return []
    return [Run(**{**run, "settings": Settings(**run["settings"])}) for run in json.loads(out.read_text())["runs"]]


if __name__ == "__main__":
    tyro.cli(main)
