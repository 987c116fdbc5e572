"""Experts divided over ranks: the run of one rank on the whole batch, within rounding, and the same checkpoints."""

import json
from dataclasses import replace
from itertools import combinations
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoModelForSeq2SeqLM
from zoo import assert_equal

from pagoda.checkpoint.reader import SavedCheckpoint
from pagoda.config.memory import Memory
from pagoda.train import TrainConfig
from pagoda.train.metrics import read_metrics
from pagoda.train.run_dir import RunDir
from tests.tiny import tiny_run, write_mixture

from .ranks import RankServer
from .tiny_runs import started

STEPS = 3
TOKENS = "tokens of experts"
VERBS = ("fetch", "gather", "reduce", "offload", TOKENS)
"""What lanes call their work."""
HOST = "1500KiB"
"""RAM of a rank, which does not hold its part of the state."""
RELATIVE = 2e-4
"""Figures of fp32 training are this close: the same sums in another order, through three updates."""


def config_of(model: str, out: Path, count: int = 2, on_ssd: bool = False) -> TrainConfig:
    (out / "ssd").mkdir(parents=True)
    memory = Memory(host="1GiB", device="cpu:1MiB", unit_limit="64KiB", page_size="4KiB")
    if on_ssd:
        memory = replace(memory, host=HOST, ssd=out / "ssd")
    return tiny_run(
        out,
        model=write_mixture(model, out / "model", layers=count),
        max_steps=STEPS,
        per_device_train_batch_size=4,
        precision="fp32",
        memory=memory,
        save_steps=STEPS,
        trace=out / "trace.json",
        lr_scheduler_type="constant",
    )


def trained(ranks: RankServer, count: int, config: TrainConfig) -> dict[str, list[float]]:
    """What a run says of its steps."""
    out = config.output_dir.parent
    status = started(ranks, count, out, config)
    assert status == [0] * count, "\n".join(path.read_text() for path in out.glob("error-*.txt"))
    lines = list(read_metrics(config.output_dir / "metrics.jsonl"))
    return {figure: [line[figure] for line in lines] for figure in ("loss", "aux_loss", "grad_norm")}


def read(directory: Path, state: str = "weight") -> dict[str, torch.Tensor]:
    with SavedCheckpoint(directory) as checkpoint:
        return {name: checkpoint.tensors[state][name].whole().reshape(-1) for name in checkpoint.specs(state)}


def executed(config: TrainConfig) -> set[str]:
    """What lanes did in a step that was traced, updates apart, which run into the next step."""
    events = json.loads(config.trace.read_text())["traceEvents"]
    names = {event["name"] for event in events if event["ph"] == "X" and event.get("cat") != "compute"}
    return {verb for verb in VERBS if any(name.startswith(verb) for name in names)}


@pytest.mark.parametrize(
    ("model", "count", "expert_parallel", "replicas", "on_ssd"),
    [
        ("mixtral-15m", 2, 2, 1, False),
        pytest.param("mixtral-15m", 2, 1, 1, True, marks=pytest.mark.slow),
        pytest.param("qwen3-moe-15m", 4, 2, 1, False, marks=pytest.mark.slow),
        pytest.param("mixtral-15m", 4, 2, 2, True, marks=pytest.mark.slow),
    ],
)
def test_ranks_that_divide_experts_train_as_one_does(
    model: str, count: int, expert_parallel: int, replicas: int, on_ssd: bool, ranks: RankServer, tmp_path: Path
) -> None:
    """One that adds up as many micro-batches: the balance loss is that of a micro-batch."""
    alone = replace(
        config_of(model, tmp_path / "alone", count),
        per_device_train_batch_size=4 // count,
        gradient_accumulation_steps=count,
    )
    divided = config_of(model, tmp_path / "divided", count, on_ssd)
    device = "cpu:800KiB" if on_ssd is (expert_parallel == count) else "cpu:1400KiB"  # less than a rank's weights
    memory = replace(divided.memory, device=device)
    divided = replace(
        divided,
        per_device_train_batch_size=4 // count,
        expert_parallel=expert_parallel,
        replicas=replicas,
        memory=memory,
    )
    expected, figures = trained(ranks, 1, alone), trained(ranks, count, divided)
    for name, values in figures.items():
        assert values == pytest.approx(expected[name], rel=RELATIVE if name != "grad_norm" else 5 * RELATIVE), name
    mine, others = (read(RunDir(config.output_dir).latest().state) for config in (divided, alone))
    assert mine.keys() == others.keys()  # each expert once, by its own name
    assert any(".experts." in name for name in mine)
    for name, weight in mine.items():
        assert (weight - others[name]).norm() <= 1e-3 * others[name].norm() + 1e-5, name
    moved = [line["bytes_moved"]["ssd_read"] for line in read_metrics(divided.output_dir / "metrics.jsonl")]
    assert all(moved[1:]) == on_ssd
    done = executed(divided)
    assert (TOKENS in done) == (expert_parallel > 1)
    assert done >= {"fetch", "gather", "reduce", "offload"}
    alone_again = {"expert_parallel": 1, "replicas": 1, "gradient_accumulation_steps": 1}
    resumed = replace(divided, max_steps=STEPS + 1, resume_from_checkpoint="last", trace=None, **alone_again)
    goes_on = trained(ranks, 1, resumed)["loss"]
    assert len(goes_on) == STEPS + 1


@pytest.mark.slow
def test_ranks_that_divide_the_experts_of_a_switch_transformer_train_as_one_does(
    ranks: RankServer, tmp_path: Path
) -> None:
    arguments = {"name": write_mixture("t5-moe-15m", tmp_path / "model"), "source": str(tmp_path / "drawn")}
    (alone,) = ranks.run("train_experts", 1, tmp_path / "alone", expert_parallel=1, **arguments)
    for divided in ranks.run("train_experts", 2, tmp_path / "divided", expert_parallel=2, **arguments):
        assert divided.keys() == alone.keys()
        for name, weight in divided.items():
            assert (weight - alone[name]).norm() <= 1e-3 * alone[name].norm() + 1e-5, name


def test_checkpoint_of_one_rank_divided_over_two_has_the_same_bits(ranks: RankServer, tmp_path: Path) -> None:
    alone = replace(config_of("mixtral-15m", tmp_path / "alone"), max_steps=1, save_steps=1, trace=None)
    trained(ranks, 1, alone)
    source = RunDir(alone.output_dir).latest().state
    arguments = {"model": alone.model, "source": str(source), "expert_parallel": 2}
    ranks.run("resave_experts", 2, tmp_path / "divided", **arguments)
    for state in ("weight", "exp_avg", "exp_avg_sq"):
        assert_equal(read(source, state), read(tmp_path / "divided" / "again", state))
    saved, resaved = (json.loads((d / "manifest.json").read_text()) for d in (source, tmp_path / "divided" / "again"))
    assert saved["steps"] == resaved["steps"]
    drawn = read(tmp_path / "divided" / "drawn")  # no rank has another's experts
    first = [values for name, values in drawn.items() if ".experts." in name and values.std() > 0]
    assert all(not torch.equal(one, other) for one, other in combinations(first, 2) if one.shape == other.shape)


def test_each_rank_reads_and_writes_the_gradients_of_its_experts(ranks: RankServer, tmp_path: Path) -> None:
    model = write_mixture("mixtral-15m", tmp_path / "model", layers=1)
    of_each = ranks.run("gradients_of_experts", 2, tmp_path / "divided", model=model, expert_parallel=2)
    shared, _ = ranks.run("gradients_of_experts", 2, tmp_path / "shared", model=model, expert_parallel=1)
    divided = {name: grad for found in of_each for name, grad in found.items()}
    assert sum(map(len, of_each)) == len(divided) == len(shared)  # no rank has another's experts
    for name, grad in shared.items():
        torch.testing.assert_close(divided[name], grad, rtol=1e-3, atol=1e-6)
        assert name.endswith("as it was") or grad.abs().max() == pytest.approx(1e-3)


@pytest.mark.parametrize("model", ["mixtral-15m", pytest.param("t5-moe-15m", marks=pytest.mark.slow)])
def test_full_states_of_divided_experts_hold_all_of_them(model: str, ranks: RankServer, tmp_path: Path) -> None:
    name = write_mixture(model, tmp_path / "model")
    first, second = ranks.run("pass_on_full_states", 2, tmp_path / "divided", name=name, expert_parallel=2)
    dcp = str(tmp_path / "divided" / "dcp")
    (alone,) = ranks.run("load_full_states", 1, tmp_path / "alone", name=name, source=dcp)
    full = first["full"]
    assert second["full"] == {}
    assert_equal(alone["full"], full)
    assert first["everywhere"] == second["everywhere"] == sorted(full)
    assert {*first["own"]} != {*second["own"]}
    for result in (first, second):
        for name, weight in result["own"].items():
            assert torch.equal(weight, in_full(full, name)), name
            assert torch.equal(weight, result["loaded"][name]), name
        assert_equal(result["saved"], result["restored"])
    auto = AutoModelForCausalLM if model == "mixtral-15m" else AutoModelForSeq2SeqLM
    exported = auto.from_pretrained(tmp_path / "divided" / "exported").state_dict()
    assert all(torch.equal(exported[name], weight) for name, weight in full.items())
    moments = {**first["saved"]["optim"]["state"], **second["saved"]["optim"]["state"]}
    assert_equal(moments, alone["restored"]["optim"]["state"])


def in_full(full: dict[str, torch.Tensor], name: str) -> torch.Tensor:
    """A rank's parameter in the full state dict: by its name, or the experts of a tile in their stack."""
    row, tiles, rest = name.rpartition(".tiles.")
    if not tiles:
        return full[name]
    expert, _, param = rest.partition(".")
    return full[f"{row}.{param}"][int(expert) :][:1]


@pytest.mark.parametrize("trained", [True, False], ids=["tokens have gradients", "what makes them is frozen"])
def test_tokens_go_to_their_experts_and_results_and_gradients_come_back(
    trained: bool, ranks: RankServer, tmp_path: Path
) -> None:
    factors = torch.tensor([2.0, 2.0, 2.0, 3.0])[:, None]
    results = ranks.run("send_tokens", 2, tmp_path, trained=trained)
    assert [result["by_rank"] for result in results] == [[[0, 0]] * 2, [[3, 1]] * 2]
    for result in results:
        assert torch.equal(result["results"], result["tokens"] * factors)
        if trained:
            assert torch.equal(result["grad"], factors * torch.tensor([1.0, 10.0]))


@pytest.mark.parametrize(
    ("count", "divided"),
    [
        (2, {"expert_parallel": 2, "tensor": 1}),
        pytest.param(4, {"expert_parallel": 2, "tensor": 2}, marks=pytest.mark.slow),
    ],
)
def test_ranks_that_run_blocks_together_choose_alike_what_they_recompute(
    count: int, divided: dict[str, int], ranks: RankServer, tmp_path: Path
) -> None:
    """Where one has less room than the others, and their batches differ: as many blocks as this one has to."""
    shared = {"name": write_mixture("mixtral-15m", tmp_path / "model", layers=3), **divided}
    wide = [None] * count
    kept = ranks.run("choose_together", count, tmp_path / "keep", activations="keep", room=wide, **shared)
    narrow = max(result["kept"] for result in kept) * 2 // 3
    room = [None] * (count - 1) + [f"{narrow}"]
    results = ranks.run("choose_together", count, tmp_path / "auto", activations="auto", room=room, **shared)
    for before, after in zip(kept, results, strict=True):
        for of in "losses", "norms", "parts":
            assert_equal(after[of], before[of])
        assert after["policies"] == results[0]["policies"]
        assert {*after["policies"]} == {"keep", "recompute"}
        assert after["most_kept"] <= narrow
        assert after["kept"] <= 1.05 * after["most_kept"]  # experts have other numbers of tokens in each step


@pytest.mark.parametrize(
    ("model", "complaint"),
    [("mixtral-15m", "does not divide the 8 experts"), ("gpt-1x64", "no experts to divide")],
)
def test_what_cannot_be_divided_is_refused(model: str, complaint: str, ranks: RankServer, tmp_path: Path) -> None:
    for said in ranks.run("wrap_indivisible_experts", 3, tmp_path, name=model):
        assert complaint in said
