"""The loss of logits that are never whole is that of whole ones, and they are indeed never whole."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import zoo
from pairwise import each_once
from torch import nn
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import Gemma2Config, Gemma2ForCausalLM

import pagoda
from pagoda.prepare import linear_cross_entropy
from pagoda.prepare.deferred_logits import DeferredLogits

TOKENS, HIDDEN, ROWS = 60, 48, 700


@pytest.fixture
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks of 16 tokens and 256 rows, so that small losses take many."""
    monkeypatch.setitem(linear_cross_entropy.BLOCK_LOGITS, "cpu", 16 * 256)
    monkeypatch.setattr(linear_cross_entropy, "BLOCK_TOKENS", 16)


class MostLogits(TorchDispatchMode):
    """Notes of how many tokens logits were made at once."""

    def __init__(self, vocabulary: int, hidden: int) -> None:
        super().__init__()
        self.vocabulary = vocabulary
        self.weight = (hidden, vocabulary)  # transposed for the product
        self.tokens = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        made = [leaf for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor) and not leaf.is_meta]
        for leaf in made:
            if leaf.dim() > 1 and leaf.shape[-1] == self.vocabulary and leaf.shape != self.weight:
                self.tokens = max(self.tokens, leaf.numel() // self.vocabulary)
        return result


def head_and_hidden(dtype: torch.dtype, bias: bool = True) -> tuple[nn.Linear, torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    head = nn.Linear(HIDDEN, ROWS, bias=bias, dtype=dtype)
    hidden = torch.randn(TOKENS, HIDDEN).mul(3).to(dtype).requires_grad_()
    target = torch.randint(ROWS, (TOKENS,))
    target[::7] = -100
    return head, hidden, target


Results = tuple[torch.Tensor, ...]


def loss_and_gradients(loss: Callable[..., torch.Tensor], dtype: torch.dtype, bias: bool) -> Results:
    head, hidden, target = head_and_hidden(torch.bfloat16 if dtype is torch.bfloat16 else torch.float32, bias)
    if dtype is torch.float64:
        head, hidden = head.double(), hidden.detach().double().requires_grad_()
    of = loss(head, hidden, target)
    inputs = [hidden, head.weight, *([head.bias] if bias else [])]
    return (of.detach(), *torch.autograd.grad(of.sum() * 3, inputs))


def whole(head: nn.Linear, hidden: torch.Tensor, target: torch.Tensor, **how: Any) -> torch.Tensor:
    logits = head(hidden)
    return functional.cross_entropy(logits if logits.dtype is torch.float64 else logits.float(), target, **how)


def chunked(head: nn.Linear, hidden: torch.Tensor, target: torch.Tensor, **how: Any) -> torch.Tensor:
    smoothing = how.get("label_smoothing", 0.0)
    parts = [linear_cross_entropy.reduce_logits(hidden, head.weight, head.bias, target, label_smoothing=smoothing)]
    return linear_cross_entropy.cross_entropy(parts, target, ROWS, **how)


@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize(
    "how",
    [{}, {"reduction": "sum"}, {"reduction": "none"}, {"label_smoothing": 0.2}, {"ignore_index": 3}],
    ids=lambda how: next(iter(how), "mean"),
)
def test_is_the_loss_of_whole_logits(how: dict[str, Any]) -> None:
    if how.get("ignore_index") == 3:
        head, hidden, target = head_and_hidden(torch.float32)
        target = target.where(target >= 0, 3)
        torch.testing.assert_close(chunked(head, hidden, target, **how), whole(head, hidden, target, **how))
        return
    mine = loss_and_gradients(lambda *args: chunked(*args, **how), torch.float32, bias=True)
    torchs = loss_and_gradients(lambda *args: whole(*args, **how), torch.float32, bias=True)
    for value, expected in zip(mine, torchs, strict=True):
        torch.testing.assert_close(value, expected, rtol=2e-5, atol=2e-5 * expected.abs().max().item())


@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize("bias", [False, True])
def test_is_no_less_accurate_in_bf16_than_whole_logits(bias: bool) -> None:
    exact = loss_and_gradients(whole, torch.float64, bias=bias)
    exact = tuple(value.float() for value in exact)
    bf16 = head_and_hidden(torch.bfloat16, bias)
    assert bf16[1].dtype is torch.bfloat16

    def errors(loss: Callable[..., torch.Tensor]) -> list[float]:
        results = loss_and_gradients(loss, torch.bfloat16, bias)
        return [float((r.float() - e).norm() / e.norm()) for r, e in zip(results, exact, strict=True)]

    for mine, torchs in zip(errors(chunked), errors(whole), strict=True):
        assert mine <= 1.25 * torchs + 1e-6


def test_refuses_a_target_that_is_no_row() -> None:
    head, hidden, target = head_and_hidden(torch.float32)
    target[3] = ROWS
    with pytest.raises(RuntimeError, match="not in"):
        chunked(head, hidden, target)


def gemma2() -> nn.Module:
    """Soft cap between the output layer and the loss."""
    return Gemma2ForCausalLM(Gemma2Config(**zoo.SIZES, num_hidden_layers=2, head_dim=16, final_logit_softcapping=2.0))


MODELS = {"llama": zoo.llama, "qwen3": zoo.qwen3, "t5": zoo.t5, "gemma2": gemma2}


def built(name: str) -> nn.Module:
    torch.manual_seed(0)
    return MODELS[name]().eval()  # no dropout


def inputs() -> dict[str, torch.Tensor]:
    batch = zoo.batch("llama", torch.Generator().manual_seed(3))
    labels = batch["labels"].clone()
    labels[:, :5] = -100
    return {**batch, "labels": labels}


@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize("name", MODELS)
def test_a_models_loss_and_gradients_stay_though_logits_are_never_whole(name: str) -> None:
    """Of a mean, and of a sum over so many items."""
    kind, config = type(built(name)), built(name).config
    config.vocab_size = 200  # no other layer's width
    more = {"num_items_in_batch": torch.tensor(40)} if name in ("llama", "gemma2") else {}
    most, losses, grads = [], [], []
    for late in (False, True):
        torch.manual_seed(0)
        model = kind(config).eval()  # no dropout
        names = model.state_dict().keys()
        model = pagoda.chunked_loss(model) if late else model
        with MostLogits(200, 64) as seen:
            output = model(**inputs(), **more)
            output.loss.backward()
        assert (type(output.logits) is DeferredLogits) == late
        assert model.state_dict().keys() == names
        most.append(seen.tokens)
        losses.append(output.loss.detach())
        grads.append({name: param.grad for name, param in model.named_parameters()})
    assert most == [inputs()["labels"].numel(), linear_cross_entropy.BLOCK_TOKENS]
    torch.testing.assert_close(*losses)
    assert grads[0].keys() == grads[1].keys()
    for key, grad in grads[0].items():
        torch.testing.assert_close(grads[1][key], grad, rtol=1e-4, atol=1e-6)


@pytest.mark.usefixtures("small_blocks")
def test_a_loss_of_ones_own_never_holds_whole_logits() -> None:
    rows = 200
    embedding, head = nn.Embedding(rows, HIDDEN), nn.Linear(HIDDEN, rows)

    class Model(nn.Sequential):
        def get_output_embeddings(self) -> nn.Module:
            return head

    model = Model(embedding, head)
    ids = torch.randint(rows, (4, 65))
    most, losses, grads = [], [], []
    for late in (False, True):
        model = pagoda.chunked_loss(model) if late else model
        model.zero_grad()
        with MostLogits(rows, HIDDEN) as seen:
            logits = model(ids)[..., :-1, :].float() / 2
            loss = functional.cross_entropy(logits.reshape(-1, rows), ids[:, 1:].reshape(-1))
            loss.backward()
        most.append(seen.tokens)
        losses.append(loss.detach())
        grads.append(embedding.weight.grad)
    assert most == [4 * 65, linear_cross_entropy.BLOCK_TOKENS]
    torch.testing.assert_close(*losses)
    torch.testing.assert_close(*grads)


def test_logits_that_are_read_are_those_of_the_layer() -> None:
    plain, late = built("gemma2"), pagoda.chunked_loss(built("gemma2"))
    batch = inputs()
    expected, output = plain(**batch), late(**batch)
    assert torch.equal(output.logits.argmax(-1), expected.logits.argmax(-1))
    assert torch.equal(output.logits[:, -1], expected.logits[:, -1])
    assert torch.equal(late(**batch).logits[:, 3:5].float(), expected.logits[:, 3:5].float())
    first = late(**batch).logits
    first[:, 0] = 0  # in place, and seen
    assert torch.equal(first[:, 0], torch.zeros_like(first[:, 0]))
    second = late(**batch).logits
    second.square().mean().backward()
    expected.logits.square().mean().backward()
    torch.testing.assert_close(late.model.embed_tokens.weight.grad, plain.model.embed_tokens.weight.grad)


def test_refuses_to_make_logits_from_weights_that_have_changed() -> None:
    model = pagoda.chunked_loss(built("llama"))
    output = model(**inputs())
    output.loss.backward()
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    with pytest.raises(pagoda.UsageError, match="after an optimizer"):
        output.logits.sum()


def test_refuses_a_gradient_that_would_be_lost() -> None:
    class Loss(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, logits: torch.Tensor) -> torch.Tensor:
            return logits.sum()

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
            return grad.expand(2, zoo.LENGTH, zoo.VOCABULARY)

    output = pagoda.chunked_loss(built("llama"))(**inputs())
    with pytest.raises(pagoda.UsageError, match="never computed"):
        Loss.apply(output.logits).backward()


def test_refuses_a_model_without_a_linear_output_layer() -> None:
    with pytest.raises(pagoda.ConfigError, match="no output layer"):
        pagoda.chunked_loss(zoo.ConvNet())


@pytest.mark.usefixtures("small_blocks")
@each_once(name=["llama", "qwen3"], late_first=[True, False])
def test_placement_does_not_change_a_bit(name: str, late_first: bool, tmp_path: Path) -> None:
    """Tied and untied output layers whose weights are in memory during their forward only."""

    def train(memory: pagoda.Memory) -> zoo.Outcome:
        recipe = zoo.Recipe(name, checkpointing=True, steps=2, layers=6)
        model = recipe.build()
        if late_first:
            pagoda.chunked_loss(model)

        def loop(model: nn.Module, optimizer: Any, outcome: zoo.Outcome) -> None:
            pagoda.chunked_loss(model)
            zoo.usual_loop(recipe)(model, optimizer, outcome)

        return zoo.run(model, memory, loop, max_grad_norm=recipe.clip)

    outcome = train(zoo.squeeze(zoo.Recipe(name, layers=6).build(), zoo.ARENA_ALL_ON_SSD, tmp_path))
    assert {"weight", "exp_avg"} <= outcome.plan.bytes["ssd"].keys() - outcome.plan.bytes["host"].keys()
    assert min(step[lane] for step in outcome.moved for lane in ("h2d", "ssd_read")) > 0
    outcome.assert_same_bits(train(zoo.RESIDENT))


def test_a_custom_loss_outside_a_wrapped_model_leases_the_output_layer() -> None:
    model, optimizer = pagoda.wrap(
        pagoda.chunked_loss(built("llama")), pagoda.AdamW(), memory=zoo.RESIDENT, precision="bf16"
    )
    ids = inputs()["input_ids"]
    logits = model(input_ids=ids).logits
    functional.cross_entropy(logits.float().flatten(0, 1), ids.flatten()).backward()
    optimizer.step()
    with pytest.raises(pagoda.UsageError, match="after an optimizer"):
        logits.sum()
    optimizer.close()
