"""TRL's trainers in pages: SFT with its own loss, DPO with a reference model in pages too, GRPO with generation, and
adapters of peft in each."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
import transformers
from transformers import PreTrainedTokenizerFast

trl = pytest.importorskip("trl")
datasets = pytest.importorskip("datasets")

import pagoda  # noqa: E402
from integrations.tiny_text import arguments, logged, memory, model  # noqa: E402
from pagoda.checkpoint.state import is_paged  # noqa: E402
from pagoda.integrations import Paging  # noqa: E402
from pagoda.integrations.transformers import STATE, PagedTrainerMixin  # noqa: E402

WORDS = [f"word{number}" for number in range(60)]


STOCK = {kind: getattr(trl, f"{kind}Trainer") for kind in ("SFT", "DPO", "GRPO")}
PAGED = {kind: type(f"Paged{kind}Trainer", (PagedTrainerMixin, trainer), {}) for kind, trainer in STOCK.items()}
GENERATING = {"num_generations": 2, "max_completion_length": 8, "num_iterations": 2, "per_device_train_batch_size": 4}


def tokenizer() -> PreTrainedTokenizerFast:
    from tokenizers import Tokenizer, models, pre_tokenizers

    vocabulary = {word: number for number, word in enumerate(["<pad>", "<eos>", "<unk>", *WORDS])}
    made = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=made, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>")


def text(first: int, step: int) -> str:
    return " ".join(WORDS[(first + step * at) % len(WORDS)] for at in range(8))


TEXTS = [text(first, 7) for first in range(20)]
DATA = {
    "SFT": {"text": TEXTS},
    "DPO": {
        "prompt": TEXTS,
        "chosen": [f" {said}" for said in TEXTS],
        "rejected": [f" {text(first, 3)}" for first in range(20)],
    },
    "GRPO": {"prompt": TEXTS},
}


def llama() -> Any:
    return model(eos_token_id=1, pad_token_id=0, bos_token_id=1)


@pytest.fixture
def paging(tmp_path: Path) -> Paging:
    return Paging(memory=memory(tmp_path / "ssd"), reference=memory(tmp_path / "reference", "84KiB", "8KiB"))


def reward(completions: list[str], **_: Any) -> list[float]:
    """Depends on each word that was generated."""
    return [float(sum(map(ord, completion)) % 7) for completion in completions]


def trained(kind: str, out: Path, resume: bool = False, paging: Paging | None = None, **given: Any) -> Any:
    settings = {"bf16": False, "optim": "sgd", "learning_rate": 0.1, "max_steps": 4}
    settings |= GENERATING if kind == "GRPO" else {}
    settings |= given.pop("settings", {})
    trainer, pages = STOCK[kind], {}
    if paging is not None:
        trainer, pages = PAGED[kind], {"paging": paging}
        settings |= {"save_strategy": "steps", "save_steps": 2}
    args, data = arguments(out, getattr(trl, f"{kind}Config"), **settings), datasets.Dataset.from_dict(DATA[kind])
    made = trainer(args=args, train_dataset=data, processing_class=tokenizer(), **pages, **given)
    made.train(resume_from_checkpoint=str(out / "checkpoint-2") if resume else None)
    return made


def adapter(**given: Any) -> Any:
    peft = pytest.importorskip("peft")
    return peft.LoraConfig(
        r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM", init_lora_weights="gaussian", **given
    )


def saved_llama(directory: Path) -> str:
    """For GRPO, which loads its reference model from where the model was."""
    llama().save_pretrained(directory)
    return str(directory)


def four_bit_llama(directory: Path) -> Any:
    """As QLoRA has it: its linear layers in 4 bits of bitsandbytes, which transformers loads."""
    pytest.importorskip("bitsandbytes")
    config = transformers.BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_compute_dtype=torch.bfloat16)
    saved = saved_llama(directory)
    return transformers.LlamaForCausalLM.from_pretrained(saved, quantization_config=config, dtype=torch.bfloat16)


CASES: dict[str, Callable[[Path], dict[str, Any]]] = {
    "SFT": lambda _: {"model": llama()},
    "SFT, LoRA": lambda _: {"model": llama(), "peft_config": adapter()},
    "SFT, DoRA": lambda _: {"model": llama(), "peft_config": adapter(use_dora=True)},
    "DPO": lambda _: {"model": llama(), "ref_model": llama()},
    "DPO, LoRA": lambda _: {"model": llama(), "peft_config": adapter()},
    "GRPO": lambda _: {"model": llama(), "reward_funcs": reward},
    "GRPO, reference": lambda at: {"model": saved_llama(at), "reward_funcs": reward, "settings": {"beta": 0.1}},
    "GRPO, LoRA": lambda _: {"model": llama(), "reward_funcs": reward, "peft_config": adapter()},
}


DAILY = ("SFT, LoRA", "DPO")


@pytest.mark.parametrize("case", [pytest.param(c, marks=() if c in DAILY else pytest.mark.slow) for c in CASES])
def test_losses_have_the_bits_of_trls_own_trainer(case: str, paging: Paging, tmp_path: Path) -> None:
    kind, given = case.partition(",")[0], CASES[case]
    where = tmp_path / "model"
    figures = "loss", "mean_token_accuracy", "reward", "kl"
    expected = trained(kind, tmp_path / "stock", **given(where))
    paged = trained(kind, tmp_path / "paged", paging=paging, **given(where))
    assert logged(paged, *figures) == logged(expected, *figures)
    assert paged.optimizer.stats.peak_bytes["host"] <= 300 << 10
    if case in ("DPO", "GRPO, reference"):
        assert pagoda.plan_of(paged.ref_model).bytes["ssd"]["weight"], "the reference model is on an SSD"
    paged.optimizer.close()
    again = replace(paging, reference=memory(tmp_path / "another reference", "84KiB", "8KiB"))
    resumed = trained(kind, tmp_path / "paged", resume=True, paging=again, **given(where))
    assert logged(resumed, *figures) == logged(expected, *figures)
    if "RA" in case:  # peft loads the adapter
        names = {path.name for path in (tmp_path / "paged" / "checkpoint-4").iterdir()}
        assert {"adapter_model.safetensors", "adapter_config.json", STATE} <= names
        assert "model.safetensors" not in names
        ids = torch.arange(8)[None]
        resumed.save_model(str(tmp_path / "saved"))
        loaded = pytest.importorskip("peft").PeftModel.from_pretrained(llama(), tmp_path / "saved")
        with torch.no_grad():
            assert torch.equal(loaded(input_ids=ids).logits, resumed.model(input_ids=ids).logits)
    resumed.optimizer.close()


class ResidentGRPO(PAGED["GRPO"]):  # type: ignore[misc]
    """As in docs/integrations.md."""

    def _generate(self, prompts: list[Any]) -> Any:
        with pagoda.resident(self.model):
            return super()._generate(prompts)


@pytest.mark.slow
@pytest.mark.parametrize("case", ["GRPO, LoRA", "GRPO, reference"])
def test_a_policy_that_is_resident_while_it_generates_learns_the_same(
    case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(PAGED, "GRPO", ResidentGRPO)
    given, figures = CASES[case], ("loss", "reward", "kl")
    expected = trained("GRPO", tmp_path / "stock", **given(tmp_path / "model"))
    small = memory(tmp_path / "reference", "84KiB", "8KiB")
    pages = Paging(memory=pagoda.Memory(host="4MiB", page_size=4096), reference=small)
    paged = trained("GRPO", tmp_path / "paged", paging=pages, **given(tmp_path / "model"))
    assert logged(paged, *figures) == logged(expected, *figures)
    paged.optimizer.close()


class Server:
    """A vLLM server as TRL's client shows it. It generates from the weights that it was sent."""

    servers: ClassVar[list["Server"]] = []
    keeps: ClassVar[bool] = False
    """Whether it keeps tensors until all have come, as a message of many does. Without pages, adapters are then taken
    out of them again."""

    def __init__(self, **_where: Any) -> None:
        self.model, self.updates = llama(), 0
        self.random = torch.Generator().manual_seed(0)
        self.servers.append(self)

    def init_communicator(self, device: Any) -> None: ...

    def reset_prefix_cache(self) -> None: ...

    def get_server_info(self) -> dict[str, Any]:
        return {"model_config": {"logprobs_mode": "processed_logprobs"}}

    def update_named_params(self, metadata: list[Any], named_params: Any) -> None:
        sent = [(name, of if self.keeps else of.clone()) for name, of in named_params]
        assert [(name, str(of.dtype).removeprefix("torch."), [*of.shape]) for name, of in sent] == metadata
        self.model.load_state_dict(dict(sent))
        self.updates += 1

    @torch.no_grad()
    def generate(self, prompts: list[list[int]], n: int, max_tokens: int, **_settings: Any) -> dict[str, Any]:
        found: dict[str, Any] = {"prompt_ids": prompts, "completion_ids": [], "logprobs": [], "logprob_token_ids": []}
        for prompt in [prompt for prompt in prompts for _ in range(n)]:
            ids, scores = [*prompt], []
            for _ in range(max_tokens):
                logs = self.model(input_ids=torch.tensor([ids])).logits[0, -1].log_softmax(-1)
                ids.append(int(torch.multinomial(logs.exp(), 1, generator=self.random)))
                scores.append(float(logs[ids[-1]]))
            written = ids[len(prompt) :]
            found["completion_ids"].append(written)
            found["logprobs"].append([[score] for score in scores])
            found["logprob_token_ids"].append([[token] for token in written])
        return found


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> list[Server]:
    from trl.generation import vllm_generation

    monkeypatch.setattr(vllm_generation, "is_vllm_available", lambda: True)
    monkeypatch.setattr(vllm_generation, "VLLMClient", Server)
    monkeypatch.setattr(Server, "servers", [])
    return Server.servers


@pytest.mark.parametrize("case", ["GRPO", pytest.param("GRPO, LoRA", marks=pytest.mark.slow)])
def test_a_server_generates_from_weights_that_are_streamed_to_it(
    case: str, server: list[Server], paging: Paging, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without pages, TRL merges adapters into the base and takes them out again, which rounds it."""
    monkeypatch.setattr(Server, "keeps", False)
    figures, settings = ("loss", "reward"), {"use_vllm": True, "vllm_mode": "server"}
    expected = trained("GRPO", tmp_path / "stock", **CASES[case](tmp_path), settings=settings)
    monkeypatch.setattr(Server, "keeps", True)
    paged = trained("GRPO", tmp_path / "paged", paging=paging, **CASES[case](tmp_path), settings=settings)
    rounding = {} if case == "GRPO" else {"rel": 1e-4, "abs": 1e-6}  # some losses are 0 but for rounding
    for found, wanted in zip(logged(paged, *figures), logged(expected, *figures), strict=True):
        assert found == (pytest.approx(wanted, **rounding) if rounding else wanted)
    assert paged.optimizer.stats.peak_bytes["host"] <= 300 << 10
    first, second = server
    assert first.updates == second.updates == 2
    assert not torch.equal(second.model.lm_head.weight, llama().lm_head.weight) or case != "GRPO"
    paged.optimizer.close()


def test_adapters_that_cannot_be_merged_while_they_are_sent_are_refused(
    server: list[Server], paging: Paging, tmp_path: Path
) -> None:
    given = {"model": llama(), "reward_funcs": reward, "peft_config": adapter(use_dora=True)}
    with pytest.raises(pagoda.ConfigError, match="only a single LoRA without variants such as DoRA"):
        trained("GRPO", tmp_path, paging=paging, **given, settings={"use_vllm": True, "vllm_mode": "server"})


@pytest.mark.parametrize("setting", ["use_vllm", "sync_ref_model"])
def test_what_would_copy_all_weights_is_refused(setting: str, paging: Paging, tmp_path: Path) -> None:
    settings = arguments(tmp_path, trl.GRPOConfig, **GENERATING)
    setattr(settings, setting, True)
    settings.vllm_mode = "colocate"
    with pytest.raises(pagoda.ConfigError, match="vllm_mode='colocate'" if setting == "use_vllm" else setting):
        PAGED["GRPO"].check_arguments(settings)


@pytest.mark.slow
def test_adapters_train_over_a_base_in_4_bits(paging: Paging, tmp_path: Path) -> None:
    """TRL makes them bf16, so without Pagoda they have no master in fp32: the losses are not the same to the bit."""
    given = {"model": four_bit_llama(tmp_path / "model"), "peft_config": adapter()}
    expected = trained("SFT", tmp_path / "stock", **given)
    given = {"model": four_bit_llama(tmp_path / "model"), "peft_config": adapter()}
    paged = trained("SFT", tmp_path / "paged", paging=paging, **given)
    assert logged(paged, "loss") == pytest.approx(logged(expected, "loss"), rel=1e-3)
    packed = [param for param in paged.model.parameters() if param.dtype is torch.uint8]
    assert packed
    assert all(map(is_paged, packed))
    paged.optimizer.close()
