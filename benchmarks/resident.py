"""Tokens per second of `generate`: plain PyTorch in RAM, from pages, and from pages inside `pagoda.resident`.

Rounds take turns, on two copies of the same weights, and the ratios are medians over rounds. Both compute on the CPU,
in fp32. The pages' weights live in RAM or on SSD, and are copied to an arena that holds all of them, as GPU memory
would.

    python benchmarks/resident.py --ssd DIR --out benchmarks/results/resident.json
"""

import time
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import script


@dataclass
class Settings:
    """How much is generated."""

    ssd: Path
    hidden: int = 512
    layers: int = 8
    tokens: int = 32
    rounds: int = 9
    out: Path | None = None


def build(settings: Settings) -> Any:
    import torch
    from transformers import AutoModelForCausalLM, LlamaConfig

    torch.manual_seed(0)
    size = settings.hidden
    return AutoModelForCausalLM.from_config(
        LlamaConfig(vocab_size=2048, hidden_size=size, intermediate_size=3 * size, num_hidden_layers=settings.layers)
    )


def rate(model: Any, tokens: int) -> tuple[float, Any]:
    """Tokens per second, and the tokens."""
    import torch

    ids = torch.arange(16)[None]
    start = time.perf_counter()
    out = model.generate(
        input_ids=ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=tokens,
        min_new_tokens=tokens,
        do_sample=False,
        pad_token_id=0,
    )
    return tokens / (time.perf_counter() - start), out


def measure(settings: Settings, home: str) -> dict[str, Any]:
    import torch

    import pagoda

    plain = build(settings)
    weights = sum(param.nbytes for param in plain.parameters())
    host = weights // 2 if home == "ssd" else 8 * weights
    memory = pagoda.Memory(device=f"cpu:{weights + (16 << 20)}", host=host, ssd=str(settings.ssd), page_size=1 << 20)
    model, optimizer = pagoda.wrap(build(settings), pagoda.AdamW(), memory=memory, precision="fp32")
    rounds = []
    with optimizer:
        for _ in range(settings.rounds + 1):
            in_ram, expected = rate(plain, settings.tokens)
            outside, found = rate(model, settings.tokens)
            with pagoda.resident(model):
                inside, same = rate(model, settings.tokens)
            assert torch.equal(expected, found)
            assert torch.equal(expected, same)
            rounds.append((in_ram, outside, inside))
    rounds = rounds[1:]
    return {
        "weights_in": home,
        "plain_tokens_per_s": median(in_ram for in_ram, _, _ in rounds),
        "inside_over_plain": median(inside / in_ram for in_ram, _, inside in rounds),
        "inside_over_outside": median(inside / outside for _, outside, inside in rounds),
    }


def main(settings: Settings) -> None:
    figures = [measure(settings, home) for home in ("ram", "ssd")]
    for of in figures:
        print(of)
    script.write(settings.out, {**script.machine(), "figures": figures})


if __name__ == "__main__":
    import tyro

    script.begin()
    main(tyro.cli(Settings))
