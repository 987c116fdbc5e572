"""The built-in mixtures of experts: their shape, their arithmetic, what they do with tokens."""

from dataclasses import replace

import pytest
import torch
from torch.nn import functional
from transformers import GPT2Config, GPT2LMHeadModel, T5Config, T5ForConditionalGeneration

from pagoda.construction.construct import describe
from pagoda.errors import ConfigError
from pagoda.forecast.describe import module_spec
from pagoda.models import MIXTURE_SHAPES, build_model, parameter_count
from pagoda.models.mixture import Experts, Mixture
from pagoda.models.mixture_shapes import RoutingConfig, mixture_shape
from pagoda.models.moe import build_mixture
from pagoda.models.papers import PAPER_SHAPES, PaperShape

GPT = replace(MIXTURE_SHAPES["gpt-moe-15m"], layers=2, hidden=32, heads=4, ffn=64, vocab=96, seq_len=32)
T5 = replace(MIXTURE_SHAPES["t5-moe-15m"], layers=2, decoder_layers=2, hidden=32, heads=4, ffn=64, vocab=96)
SMALL = pytest.mark.parametrize("shape", [GPT, T5], ids=["gpt", "t5"])
DENSE = {"experts": 1, "top_k": 1}
"""One expert sees every token with gate one: the model is its dense relative."""


def ids_of(length: int = 16, sequences: int = 2, seed: int = 1) -> torch.Tensor:
    return torch.randint(96, (sequences, length), generator=torch.Generator().manual_seed(seed))


def built(shape: PaperShape, config: RoutingConfig | None = None, *, checkpointing: bool = False) -> torch.nn.Module:
    torch.manual_seed(0)
    return build_mixture(shape, config, gradient_checkpointing=checkpointing)


@pytest.mark.parametrize("name", MIXTURE_SHAPES)
def test_a_shape_has_the_size_its_name_promises(name: str) -> None:
    digits, unit = name.rpartition("-")[2][:-1], name[-1]
    nominal = float(digits) * {"m": 1e6, "b": 1e9}[unit]
    assert MIXTURE_SHAPES[name].nominal == nominal
    assert parameter_count(name) == pytest.approx(nominal, rel=0.05)


@pytest.mark.parametrize("shape", [*MIXTURE_SHAPES.values(), replace(PAPER_SHAPES["t5-moe-1.2t"], experts=24)])
def test_what_is_built_is_what_is_planned(shape: PaperShape) -> None:
    with torch.device("meta"):
        model = build_mixture(shape)
    assert describe(model) == module_spec(shape)


def test_a_papers_shape_with_experts_can_be_built_and_others_cannot() -> None:
    assert mixture_shape("t5-moe-1.2t") is PAPER_SHAPES["t5-moe-1.2t"]
    assert mixture_shape("gpt-13b") is None
    assert mixture_shape("llama-15m") is None


def test_with_one_expert_a_gpt_is_gpt2() -> None:
    model = built(replace(GPT, **DENSE), RoutingConfig(balance_coefficient=0.0, capacity_factor=1.0))
    config = GPT2Config(vocab_size=96, n_positions=32, n_embd=32, n_layer=2, n_head=4, n_inner=64, use_cache=False)
    config.resid_pdrop = config.embd_pdrop = config.attn_pdrop = 0.0
    theirs = GPT2LMHeadModel(config).train()
    renamed = {
        "embedding.token": "wte", "embedding.position": "wpe", "blocks": "h", "attention.norm": "ln_1",
        "attention.qkv": "attn.c_attn", "attention.out": "attn.c_proj", "mlp.norm": "ln_2",
        "mlp.experts.0.up": "mlp.c_fc", "mlp.experts.0.down": "mlp.c_proj",
    }  # fmt: skip
    states = {}
    for name, value in model.state_dict().items():
        if "router" in name or name.startswith("head"):
            continue
        matrix = "h" if ".qkv.weight" in name or ".out.w" in name or ".up.w" in name or ".down.w" in name else ""
        for mine, other in renamed.items():
            name = name.replace(mine, other)
        name = name.replace("norm", "ln_f") if name.startswith("norm") else name
        states[f"transformer.{name}"] = value.T if matrix else value
    theirs.load_state_dict(states, strict=False)
    ids = ids_of()
    mine, other = model(input_ids=ids, labels=ids), theirs(input_ids=ids, labels=ids)
    torch.testing.assert_close(mine.logits, other.logits, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(mine.loss, other.loss, rtol=1e-5, atol=1e-6)


def test_with_one_expert_a_t5_is_t5() -> None:
    model = built(replace(T5, **DENSE), RoutingConfig(balance_coefficient=0.0, capacity_factor=1.0))
    config = T5Config(
        vocab_size=96, d_model=32, d_kv=8, d_ff=64, num_layers=2, num_heads=4, decoder_start_token_id=0,
        dropout_rate=0.0, use_cache=False, tie_word_embeddings=True,
    )  # fmt: skip
    theirs = T5ForConditionalGeneration(config).train()
    mine = dict(model.state_dict())
    states = {"shared.weight": mine["embedding.token.weight"]}
    for stack in ("encoder", "decoder"):
        states[f"{stack}.block.0.layer.0.SelfAttention.relative_attention_bias.weight"] = mine[
            f"{stack}.relative.weight"
        ]
        states[f"{stack}.final_layer_norm.weight"] = mine[f"{stack}.norm.weight"]
        for block in range(2):
            parts = [("attention", "SelfAttention"), *([("cross", "EncDecAttention")] if stack == "decoder" else [])]
            for layer, (name, other) in enumerate(parts):
                into = f"{stack}.block.{block}.layer.{layer}"
                states[f"{into}.layer_norm.weight"] = mine[f"{stack}.{block}.{name}.norm.weight"]
                for part, letter in zip(mine[f"{stack}.{block}.{name}.qkv.weight"].chunk(3), "qkv", strict=True):
                    states[f"{into}.{other}.{letter}.weight"] = part
                states[f"{into}.{other}.o.weight"] = mine[f"{stack}.{block}.{name}.out.weight"]
            into = f"{stack}.block.{block}.layer.{len(parts)}"
            states[f"{into}.layer_norm.weight"] = mine[f"{stack}.{block}.mlp.norm.weight"]
            states[f"{into}.DenseReluDense.wi.weight"] = mine[f"{stack}.{block}.mlp.experts.0.up.weight"]
            states[f"{into}.DenseReluDense.wo.weight"] = mine[f"{stack}.{block}.mlp.experts.0.down.weight"]
    theirs.load_state_dict(states, strict=False)
    ids, labels = ids_of(20), ids_of(12, seed=2)
    ours, other = model(input_ids=ids, labels=labels), theirs(input_ids=ids, labels=labels)
    torch.testing.assert_close(ours.logits, other.logits, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(ours.loss, other.loss, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("top_k", [1, 2])
@SMALL
def test_a_mixture_adds_up_what_each_tokens_experts_say(shape: PaperShape, top_k: int) -> None:
    torch.manual_seed(0)
    mixture = Mixture(shape, RoutingConfig(top_k=top_k)).eval()
    hidden = torch.randn(2, 6, 32)
    result, _, dropped = mixture(hidden)
    x = mixture.norm(hidden)
    for b in range(2):
        for s in range(6):
            likely, chosen = mixture.router(x[b, s]).softmax(-1).topk(top_k)
            gates = likely / likely.sum() if top_k > 1 else likely
            experts = [mixture.experts[str(int(expert))] for expert in chosen]
            said = sum(gate * expert(x[b, s][None])[0] for gate, expert in zip(gates, experts, strict=True))
            torch.testing.assert_close(result[b, s], hidden[b, s] + said, rtol=1e-4, atol=1e-5)
    assert dropped == 0


def test_what_no_expert_has_room_for_passes_unchanged() -> None:
    torch.manual_seed(0)
    mixture = Mixture(GPT, RoutingConfig(top_k=1, capacity_factor=0.5)).train()
    torch.nn.init.zeros_(mixture.router.weight)  # every token chooses the first expert, which takes one
    hidden = torch.randn(2, 16, 32)
    result, _, dropped = mixture(hidden)
    changed = (result != hidden).any(-1)
    assert changed.tolist() == [[True] + [False] * 15] * 2
    assert dropped.item() == pytest.approx(15 / 16)


@SMALL
def test_the_balance_loss_is_part_of_the_loss_for_every_block(shape: PaperShape) -> None:
    ids = ids_of()
    plain = built(shape, RoutingConfig(balance_coefficient=0.0))(input_ids=ids, labels=ids)
    balanced = built(shape, RoutingConfig(balance_coefficient=0.25))(input_ids=ids, labels=ids)
    blocks = shape.layers + shape.decoder_layers
    assert balanced.aux_loss.item() == plain.aux_loss.item() > 0.9
    assert (balanced.loss - plain.loss).item() == pytest.approx(0.25 * blocks * plain.aux_loss.item(), rel=1e-4)


@SMALL
def test_checkpointing_changes_neither_loss_nor_gradients(shape: PaperShape) -> None:
    ids, grads = ids_of(), []
    for checkpointing in (False, True):
        model = built(shape, checkpointing=checkpointing)
        model(input_ids=ids, labels=ids).loss.backward()
        grads.append({name: param.grad for name, param in model.named_parameters() if param.grad is not None})
    assert grads[0].keys() == grads[1].keys()
    for name, grad in grads[0].items():
        assert torch.equal(grad, grads[1][name]), name


def test_in_evaluation_no_token_of_a_gpt_sees_those_that_follow() -> None:
    model = built(GPT).eval()
    ids = ids_of(16)
    shorter = model(input_ids=ids[:, :9]).logits
    torch.testing.assert_close(model(input_ids=ids).logits[:, :9], shorter, rtol=1e-4, atol=1e-5)


def test_a_t5_reads_before_each_label_those_before_it() -> None:
    model = built(T5).eval()
    ids, labels = ids_of(10), ids_of(8, seed=2)
    output = model(input_ids=ids, labels=labels)
    changed = labels.clone()
    changed[:, 5] = (changed[:, 5] + 1) % 96
    other = model(input_ids=ids, labels=changed)
    torch.testing.assert_close(output.logits[:, :6], other.logits[:, :6], rtol=1e-4, atol=1e-5)
    assert not torch.allclose(output.logits[:, 6:], other.logits[:, 6:])
    assert output.loss.item() == pytest.approx(
        functional.cross_entropy(output.logits.flatten(0, 1), labels.flatten()).item()
        + 0.01 * 4 * output.aux_loss.item(),
        rel=1e-4,
    )


@pytest.mark.parametrize("top_k", [1, 2])
@SMALL
def test_it_learns(shape: PaperShape, top_k: int) -> None:
    model, ids = built(shape, RoutingConfig(top_k=top_k)), ids_of()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for _ in range(30):
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < losses[0] / 2


def test_only_experts_with_tokens_run() -> None:
    experts = Experts((number, torch.nn.Linear(4, 4)) for number in range(3))
    ran, announced = [], []
    for name, expert in experts.items():
        expert.register_forward_hook(lambda *_, name=name: ran.append(name))
    experts.coming = lambda chosen: announced.extend(chosen)
    result = experts(torch.randn(5, 4), [2, 0, 3])
    assert result.shape == (5, 4)
    assert ran == ["0", "2"]
    assert announced == [experts["0"], experts["2"]]


@pytest.mark.parametrize(
    ("ask", "complaint"),
    [
        ({"seq_len": 1025}, "1024 positions"),
        ({"seq_len": 64, "layers": 3}, "number of layers"),
        ({"seq_len": 64, "routing": RoutingConfig(top_k=9)}, "has 8 experts"),
    ],
)
def test_what_a_mixture_cannot_be_built_with_is_refused(ask: dict[str, object], complaint: str) -> None:
    with torch.device("meta"), pytest.raises(ConfigError, match=complaint):
        build_model("gpt-moe-15m", **ask)  # type: ignore[arg-type]


def test_routing_of_a_model_without_experts_is_refused() -> None:
    with pytest.raises(ConfigError, match="gpt-moe-15m"):
        build_model("gpt2", seq_len=16, routing=RoutingConfig(top_k=1))
