"""Experts are paged like anything else: what no token needs is not fetched, and no bit changes."""

from collections.abc import Callable, Iterator
from functools import cache, partial
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import transformers
import zoo
from pairwise import each_once
from peft import LoraConfig, get_peft_model
from runtime.conftest import Wrap
from runtime.loops import assert_trained_alike, in_memory, learn
from torch import nn

import pagoda
from pagoda.checkpoint.export import export
from pagoda.config.training import ActivationMode
from pagoda.prepare.experts import ExpertStack, RoutedExperts, SwitchRouter

STEPS = 3
WHOLE = pagoda.Tiles(tile_limit=1 << 40)
"""Leaves stacks of experts whole."""
SIZES: dict[str, Any] = {**zoo.SIZES, "num_hidden_layers": 2, "head_dim": 16}


def mixtral(**others: Any) -> nn.Module:
    sizes = {"num_local_experts": 4, "output_router_logits": True, **SIZES}
    return transformers.MixtralForCausalLM(transformers.MixtralConfig(**sizes | others))


def qwen3_moe(**others: Any) -> nn.Module:
    sizes = {"num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 48, **SIZES}
    return transformers.Qwen3MoeForCausalLM(transformers.Qwen3MoeConfig(**sizes | others))


def gpt_oss() -> nn.Module:
    sizes = SIZES | {"hidden_size": 256, "num_local_experts": 8, "num_experts_per_tok": 2, "intermediate_size": 128}
    return transformers.GptOssForCausalLM(transformers.GptOssConfig(attn_implementation="eager", **sizes))


def deepseek_v3() -> nn.Module:
    sizes = SIZES | {"num_key_value_heads": 4, "head_dim": None, "moe_intermediate_size": 32}
    heads = {"q_lora_rank": 32, "kv_lora_rank": 16, "qk_rope_head_dim": 16, "qk_nope_head_dim": 16, "v_head_dim": 16}
    experts = {"n_routed_experts": 8, "num_experts_per_tok": 4, "n_group": 2, "topk_group": 1}
    return transformers.DeepseekV3ForCausalLM(
        transformers.DeepseekV3Config(first_k_dense_replace=1, **sizes, **heads, **experts)
    )


def qwen3_next() -> nn.Module:
    """A layer of linear attention and one of full attention."""
    experts = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
    shared = {"shared_expert_intermediate_size": 32}
    heads = {f"linear_{which}_head_dim": 16 for which in ("key", "value")}
    heads |= {"linear_num_key_heads": 2, "linear_num_value_heads": 4}
    kinds = ["linear_attention", "full_attention"]
    return transformers.Qwen3NextForCausalLM(
        transformers.Qwen3NextConfig(layer_types=kinds, **SIZES, **experts, **shared, **heads)
    )


def switch(**others: Any) -> nn.Module:
    sizes = {"d_model": 64, "d_kv": 16, "d_ff": 96, "num_heads": 4, "num_layers": 2, "num_decoder_layers": 2}
    sparse = {"num_sparse_encoder_layers": 1, "num_sparse_decoder_layers": 1, "num_experts": 8, "expert_capacity": 2}
    config = transformers.SwitchTransformersConfig(
        vocab_size=zoo.VOCABULARY, decoder_start_token_id=0, use_cache=False, **sizes | sparse | others
    )
    return transformers.SwitchTransformersForConditionalGeneration(config)


_BUILDERS: tuple[Callable[[], nn.Module], ...] = (mixtral, qwen3_moe, gpt_oss, deepseek_v3, qwen3_next, switch)
BUILDERS = {build.__name__.replace("_", "-"): build for build in _BUILDERS}
EXPERTS = {"mixtral": 8, "qwen3-moe": 16, "gpt-oss": 16, "deepseek-v3": 8, "qwen3-next": 16, "switch": 16}
"""How many each model has."""
NEWER = tuple(map(int, transformers.__version__.split(".")[:2])) > (5, 17)
ONE_EXPERT = {"mixtral": 3 * 64 * 96, "qwen3-moe": 3 * 64 * 48}
"""Elements of one."""


@pytest.fixture(scope="module", autouse=True)
def stable_order() -> Iterator[None]:
    """transformers sorts tokens by expert in no fixed order, which is that of the sums in the gradients of weights."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "sort", partial(torch.sort, stable=True))
        yield


def built(name: str) -> Any:
    torch.manual_seed(0)
    return BUILDERS[name]().train()


def tokens(shape: tuple[int, int], seed: int = 1) -> torch.Tensor:
    return torch.randint(zoo.VOCABULARY, shape, generator=torch.Generator().manual_seed(seed))


def loss_of(model: nn.Module, ids: torch.Tensor) -> torch.Tensor:
    """With the losses of routing, which Switch Transformers of transformers 5.17 cannot compute."""
    routing = {"output_router_logits": True} if hasattr(model, "router_z_loss_coef") and NEWER else {}
    loss: torch.Tensor = model(input_ids=ids, labels=ids, **routing).loss
    return loss


def few_tokens(model: nn.Module, optimizer: Any, outcome: zoo.Outcome) -> None:
    """Two short sequences a step: most steps leave some experts out, and never the same ones."""
    generator = torch.Generator().manual_seed(1)
    for _ in range(STEPS):
        ids = torch.randint(zoo.VOCABULARY, (2, 5), generator=generator)
        loss = loss_of(model, ids)
        learn(loss, outcome)
        zoo.take_step(optimizer, outcome)


@cache
def resident(name: str, clip: float | None) -> zoo.Outcome:
    return zoo.run(built(name), zoo.RESIDENT, few_tokens, max_grad_norm=clip)


@each_once(name=[*BUILDERS], placement=zoo.PLACEMENTS, activations=["keep", "keep", "recompute"])
def test_placement_does_not_change_a_bit(
    name: str, placement: str, activations: ActivationMode, tmp_path: Path
) -> None:
    clip = 0.5 if placement in (zoo.ALL_ON_SSD, zoo.ARENA) else None
    announced = None if clip else 1
    memory = zoo.squeeze(
        built(name), placement, tmp_path, clipping=clip is not None, announced=announced, activations=activations
    )
    settings = {"gradient_accumulation_steps": announced, "activations": activations}
    outcome = zoo.run(built(name), memory, few_tokens, max_grad_norm=clip, **settings)
    assert ("exp_avg" in outcome.plan.bytes.get("ssd", {})) == (placement != zoo.ARENA)
    outcome.assert_same_bits(resident(name, clip))


def units_of_experts(model: nn.Module) -> int:
    return sum(".tiles." in unit.name for unit in pagoda.plan_of(model).units)


def adapted(name: str, **settings: Any) -> Any:
    """The model with adapters of all experts, whose initial values change outputs."""
    both = [name for name in ("experts.gate_up_proj", "experts.down_proj") if "target_modules" not in settings]
    lora = LoraConfig(r=2, **{"target_modules": ["o_proj"], "target_parameters": both or None, **settings})
    model = get_peft_model(built(name), lora)
    with torch.no_grad():
        for key, param in model.named_parameters():
            if "lora_B" in key:
                param.normal_(std=0.02)
    return model.train()


SLOW = [pytest.param(name, marks=pytest.mark.slow) for name in ("qwen3-moe", "deepseek-v3")]


@pytest.mark.parametrize("name", ["mixtral", "gpt-oss", "qwen3-next", *SLOW])
def test_adapters_of_experts_have_the_bits_of_peft_with_every_expert_a_unit(name: str, tmp_path: Path) -> None:
    plain, expected = adapted(name), []
    optimizer = torch.optim.SGD([param for param in plain.parameters() if param.requires_grad], lr=0.1)
    for step in range(STEPS):
        expected.append(loss_of(plain, tokens((2, 5), step)))
        expected[-1].backward()
        optimizer.step()
        optimizer.zero_grad()
    rule, model = pagoda.Optim(torch.optim.SGD, lr=0.1), adapted(name)
    with pytest.raises(pagoda.BudgetError) as refused:
        pagoda.wrap(
            model, rule, memory=pagoda.Memory(host=zoo.PAGE, ssd=tmp_path, page_size=zoo.PAGE), precision="fp32"
        )
    frozen = sum(param.numel() * 4 for key, param in model.named_parameters() if ".experts." in key)
    assert refused.value.needed_bytes < frozen, "never all experts"
    memory = pagoda.Memory(host=refused.value.needed_bytes, ssd=tmp_path, page_size=zoo.PAGE)
    paged, handle = pagoda.wrap(model, rule, memory=memory, precision="fp32", activations="recompute")
    assert units_of_experts(paged) == EXPERTS[name]
    for step in range(STEPS):
        loss = loss_of(paged, tokens((2, 5), step))
        loss.backward()
        assert torch.equal(loss, expected[step])
        handle.step()
        handle.zero_grad()
    with torch.no_grad(), paged.disable_adapter(), plain.disable_adapter():
        assert torch.equal(loss_of(paged, tokens((2, 5))), loss_of(plain, tokens((2, 5))))
    zoo.assert_equal(paged.state_dict(), plain.state_dict())
    export(paged, tmp_path / "merged", merge=True)
    handle.close()
    merged = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "merged").train()
    torch.testing.assert_close(loss_of(merged, tokens((2, 5))), loss_of(plain, tokens((2, 5))))


@pytest.mark.parametrize("merge", [False, True])
def test_the_bias_of_routing_which_no_gradient_changes_is_kept_in_fp32(merge: bool, tmp_path: Path) -> None:
    """DeepSeek's training adds to it after each step, so that experts get equal shares."""

    def wrapped() -> Any:
        model = adapted("deepseek-v3") if merge else built("deepseek-v3")
        return pagoda.wrap(model, pagoda.SGD(lr=0.1), memory=pagoda.Memory(host="64MiB"), precision="bf16")

    def bias(model: nn.Module) -> torch.Tensor:
        return next(buffer for name, buffer in model.named_buffers() if name.endswith("e_score_correction_bias"))

    model, optimizer = wrapped()
    for step in range(2):
        loss_of(model, tokens((2, 5), step)).backward()
        optimizer.step()
        optimizer.zero_grad()
        bias(model).add_(torch.linspace(-1e-3, 1e-3, 8))
    expected = bias(model).clone()
    assert not torch.equal(expected, expected.bfloat16().float())
    optimizer.save_checkpoint(tmp_path / "checkpoint")
    export(model, tmp_path / "out", merge=merge)
    optimizer.close()
    model, optimizer = wrapped()
    optimizer.load_checkpoint(tmp_path / "checkpoint")
    assert torch.equal(bias(model), expected)
    optimizer.close()
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.bfloat16)
    for again in (loaded, pagoda.load(tmp_path / "out"), pagoda.load(tmp_path / "checkpoint")):
        assert torch.equal(bias(again), expected)


def test_the_code_of_the_page_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = (Path(__file__).parents[2] / "docs" / "moe.md").read_text()
    code = page.partition("## LoRA adapters of experts")[2].partition("```python\n")[2].partition("```")[0]
    built("mixtral").save_pretrained(tmp_path / "base")
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {"pagoda": pagoda, "peft": peft}
    exec(code, names)
    loss_of(names["model"], tokens((2, 5))).backward()
    names["optimizer"].step()
    names["optimizer"].close()


def test_all_linear_adapts_experts_and_routers_as_peft_does() -> None:
    plain = adapted("mixtral", target_modules="all-linear", task_type="CAUSAL_LM")
    model = adapted("mixtral", target_modules="all-linear", task_type="CAUSAL_LM")
    assert any("mlp.gate.lora_A" in key for key, _ in model.named_parameters())
    paged, handle = pagoda.wrap(model, pagoda.SGD(lr=0.1), memory=pagoda.Memory(host="64MiB"), precision="fp32")
    assert torch.equal(loss_of(paged, tokens((2, 5))), loss_of(plain, tokens((2, 5))))
    assert units_of_experts(paged) == EXPERTS["mixtral"]
    handle.close()


@pytest.mark.parametrize("activations", ["keep", "recompute"])
def test_weights_with_what_adapters_add_to_them_are_computed_again_and_not_kept(activations: ActivationMode) -> None:
    model, memory = adapted("mixtral"), pagoda.Memory(host="64MiB")
    paged, handle = pagoda.wrap(model, pagoda.SGD(lr=0.1), memory=memory, precision="fp32", activations=activations)
    loss_of(paged, tokens((2, 5))).backward()
    handle.step()
    assert handle.stats.activation_bytes.kept < 4 * EXPERTS["mixtral"] // 2 * ONE_EXPERT["mixtral"]
    handle.close()


@pytest.mark.parametrize("name", BUILDERS)
def test_wrapped_training_is_plain_training_with_every_expert_a_unit(name: str) -> None:
    model = built(name)
    for router in [module for module in model.modules() if type(module).__name__ == "SwitchTransformersTop1Router"]:
        router.classifier = SwitchRouter.of(router.classifier)  # theirs casts its own weight to fp32, for good
    wrapped, by_torch = resident(name, None), in_memory(model, few_tokens, is_split=True)
    if name == "switch":  # an idle expert has no state
        assert_trained_alike(wrapped, by_torch)
    assert wrapped.losses == by_torch.losses
    zoo.assert_equal(wrapped.weights, by_torch.weights)
    steps = {state["step"] for state in by_torch.optimizer["state"].values()}
    assert (len(steps) > 1) == (name == "switch")  # of a stack, what no token chose has zero gradients
    assert sum(".experts." in unit.module for unit in wrapped.plan.units) == EXPERTS[name]


@each_once(name=["mixtral", "gpt-oss"], implementation=["eager", "batched_mm"], precision=["fp32", "bf16"])
def test_other_kernels_give_the_same_within_rounding(name: str, implementation: str, precision: str) -> None:
    """They add up the results for a token in other orders."""
    outcomes = []
    for tiles in (WHOLE, None):
        model = built(name)
        model.set_experts_implementation(implementation)
        outcomes.append(zoo.run(model, zoo.RESIDENT, few_tokens, lr=1e-4, precision=precision, tiles=tiles))
    whole, cut = outcomes
    rounding = 2e-5 if precision == "fp32" else 4e-2
    assert cut.losses == pytest.approx(whole.losses, rel=rounding)
    assert cut.norms == pytest.approx(whole.norms, rel=rounding)


# --- units ------------------------------------------------------------------------------------------------


@pytest.fixture
def wrap(wrap: Wrap) -> Wrap:
    return partial(wrap, memory=pagoda.Memory(host="64MiB", page_size=zoo.PAGE))


def rows_of(model: nn.Module) -> list[Any]:
    return [module for module in model.modules() if isinstance(module, RoutedExperts)]


def test_a_tile_limit_makes_tiles_of_as_many_experts_as_fit(wrap: Wrap) -> None:
    one = 2 * ONE_EXPERT["qwen3-moe"]
    for limit, expected in ((one // 4, [1] * 8), (one, [1] * 8), (3 * one, [3, 3, 2]), (8 * one, [])):
        model, _ = wrap(built("qwen3-moe"), tiles=pagoda.Tiles(tile_limit=limit))
        assert [count for row in rows_of(model)[:1] for _, count in row.pieces()] == expected


def test_a_stack_stays_whole_under_a_rule_that_takes_parameters_whole_or_with_hooks_or_compiled(wrap: Wrap) -> None:
    hooked, compiled = built("mixtral"), built("mixtral")
    hooked.model.layers[0].mlp.experts.register_forward_hook(lambda *_: None)
    compiled.model.layers[1].compile()
    for model, rule, cut in ((built("mixtral"), pagoda.Muon(lr=1e-2), []), (hooked, None, [1]), (compiled, None, [0])):
        wrap(model, rule=rule)
        assert [i for i, layer in enumerate(model.model.layers) if isinstance(layer.mlp.experts, ExpertStack)] == cut


def test_names_and_shapes_are_those_of_transformers(wrap: Wrap, tmp_path: Path) -> None:
    """Of state dicts, and checkpoints that resume without tiles."""
    kept, cut = wrap(built("mixtral"), tiles=WHOLE), wrap(built("mixtral"))
    assert {*built("mixtral").state_dict()} == {*cut[0].state_dict()}
    zoo.assert_equal(kept[0].state_dict(), cut[0].state_dict())
    few_tokens(*cut, zoo.Outcome())
    cut[1].save_checkpoint(tmp_path / "cut")
    kept[1].load_checkpoint(tmp_path / "cut")
    zoo.assert_equal(kept[0].state_dict(), cut[0].state_dict())
    cut[0].load_state_dict({key: value / 2 for key, value in kept[0].state_dict().items()})
    down = "model.layers.1.mlp.experts.down_proj"
    assert torch.equal(cut[0].state_dict()[down], kept[0].state_dict()[down] / 2)
    assert pagoda.ModelState(cut[0]).state_dict()[down].shape == kept[0].state_dict()[down].shape


@pytest.mark.parametrize("name", ["qwen3-moe", pytest.param("gpt-oss", marks=pytest.mark.slow), "switch"])
def test_what_was_trained_is_exported_and_loaded_by_transformers(name: str, wrap: Wrap, tmp_path: Path) -> None:
    model, optimizer = wrap(built(name), precision="fp32")
    few_tokens(model, optimizer, zoo.Outcome())
    ids = tokens((2, 5), 3)
    inputs = {"input_ids": ids} | ({"decoder_input_ids": ids} if name == "switch" else {})
    with torch.no_grad():
        expected, trained = model.eval()(**inputs).logits, model.state_dict()
    model.save_pretrained(tmp_path / "saved")
    optimizer.save_checkpoint(tmp_path / "checkpoint")
    export(tmp_path / "checkpoint", tmp_path / "exported", dtype="fp32")
    for directory in ("saved", "exported"):
        loaded = type(built(name)).from_pretrained(tmp_path / directory, dtype=torch.float32)
        zoo.assert_equal(trained, {key: loaded.state_dict()[key] for key in trained})
        with torch.no_grad():  # where weights lie in memory may decide how they are multiplied
            torch.testing.assert_close(loaded.eval()(**inputs).logits, expected)
    zoo.assert_equal(wrap(pagoda.load(tmp_path / "exported"), precision="fp32")[0].state_dict(), trained)


# --- what is fetched --------------------------------------------------------------------------------------


def ran(model: nn.Module) -> set[str]:
    """Names of the experts that have run since: a set that fills."""
    found: set[str] = set()
    names = {module: name for name, module in model.named_modules()}
    for row in rows_of(model):
        for expert, _ in row.pieces():
            expert.register_forward_hook(lambda *_, name=names[expert]: found.add(name))
    return found


def fetched_experts(optimizer: Any) -> set[str]:
    spans = (span.name for span in optimizer.timeline.spans if span.lane in ("h2d", "ssd_read"))
    return {label.partition(" ")[2] for label in spans if label.startswith("fetch ") and ".experts." in label}


@each_once(name=["qwen3-moe", "switch"], placement=[zoo.ARENA, zoo.ALL_ON_SSD], activations=["keep", "recompute"])
def test_only_used_experts_are_fetched(name: str, placement: str, activations: str, wrap: Wrap, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = (
        qwen3_moe(num_experts=16, num_experts_per_tok=1, moe_intermediate_size=256)
        if name == "qwen3-moe"
        else switch(num_experts=16)
    )
    memory = zoo.squeeze(model.train(), placement, tmp_path, activations=activations)
    model, optimizer = wrap(model, memory=memory, activations=activations)
    names, seen = ran(model), []
    for step in range(4):  # then the plan may count on experts that every step has used
        optimizer.trace_next_step()
        names.clear()
        ids = tokens((1, 4), step)
        model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
        assert fetched_experts(optimizer) == names
        assert 0 < len(names) <= 2 * 4
        seen.append(frozenset(names))
    assert len(set(seen)) > 1


@pytest.mark.usefixtures("lanes_keep_up")
@pytest.mark.parametrize("name", ["qwen3-moe", "switch"])
def test_routing_that_varies_makes_no_new_plans_and_no_faults(name: str, wrap: Wrap) -> None:
    torch.manual_seed(0)
    model = qwen3_moe(num_experts_per_tok=1) if name == "qwen3-moe" else switch()
    memory = pagoda.Memory(device="cpu:16MiB", host="64MiB", page_size=zoo.PAGE)
    model, optimizer = wrap(model.train(), memory=memory)
    replanned, faults = [], []
    for step in range(10):
        ids = tokens((2, 5), step)
        model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
        replanned.append(optimizer.stats.replanned)
        faults.append(optimizer.stats.faults)
    assert sum(replanned[1:]) <= 2  # after 4 and 8 steps it is decided which experts a plan counts on
    assert faults[1:] == [0] * 9  # what chosen experts need is known before they are used


@pytest.mark.usefixtures("lanes_keep_up")
def test_experts_that_every_step_uses_are_fetched_ahead(wrap: Wrap, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = mixtral(num_local_experts=2, num_experts_per_tok=2).train()
    model, optimizer = wrap(model, memory=zoo.squeeze(model, zoo.ARENA, tmp_path))
    experts = pagoda.plan_of(model).layout.expert_units
    assert len(experts) == 4

    def planned() -> frozenset[int]:
        return experts & {access.unit for access in pagoda.plan_of(model).trace.accesses}

    assert not planned()
    ids = tokens((2, 16))
    for _ in range(8):
        model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
    assert planned() == experts
    assert not optimizer.stats.replanned
    assert optimizer.stats.faults == 0
