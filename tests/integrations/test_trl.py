"""TRL's trainers in pages: SFT with its own loss, DPO with a reference model that is in pages too, adapters of peft."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedTokenizerFast

trl = pytest.importorskip("trl")
datasets = pytest.importorskip("datasets")

import pagoda  # noqa: E402
from integrations.tiny_text import arguments, logged, model  # noqa: E402
from pagoda.integrations import Paging  # noqa: E402
from pagoda.integrations.transformers import STATE, PagedTrainerMixin  # noqa: E402

WORDS = [f"word{number}" for number in range(60)]


class PagedSFTTrainer(PagedTrainerMixin, trl.SFTTrainer):  # type: ignore[misc, name-defined]
    pass


class PagedDPOTrainer(PagedTrainerMixin, trl.DPOTrainer):  # type: ignore[misc, name-defined]
    pass


PAGED = {trl.SFTTrainer: PagedSFTTrainer, trl.DPOTrainer: PagedDPOTrainer}
CONFIGS = {trl.SFTTrainer: trl.SFTConfig, trl.DPOTrainer: trl.DPOConfig}


def tokenizer() -> PreTrainedTokenizerFast:
    from tokenizers import Tokenizer, models, pre_tokenizers

    vocabulary = {word: number for number, word in enumerate(["<pad>", "<eos>", "<unk>", *WORDS])}
    made = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=made, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>")


def text(first: int, step: int) -> str:
    return " ".join(WORDS[(first + step * at) % len(WORDS)] for at in range(8))


DATA = {
    trl.SFTTrainer: datasets.Dataset.from_dict({"text": [text(first, 7) for first in range(20)]}),
    trl.DPOTrainer: datasets.Dataset.from_dict(
        {
            "prompt": [text(first, 7) for first in range(20)],
            "chosen": [f" {text(first, 7)}" for first in range(20)],
            "rejected": [f" {text(first, 3)}" for first in range(20)],
        }
    ),
}


def memory(directory: Path, host: str = "300KiB", unit_limit: str = "32KiB") -> pagoda.Memory:
    directory.mkdir()
    return pagoda.Memory(host=host, ssd=f"{directory}:64MiB", page_size=4096, unit_limit=unit_limit)


def llama() -> Any:
    return model(eos_token_id=1, pad_token_id=0, bos_token_id=1)


@pytest.fixture
def paging(tmp_path: Path) -> Paging:
    return Paging(memory=memory(tmp_path / "ssd"), reference=memory(tmp_path / "reference", "84KiB", "8KiB"))


def trained(kind: type, out: Path, resume: bool = False, paging: Paging | None = None, **given: Any) -> Any:
    settings = {"bf16": False, "optim": "sgd", "learning_rate": 0.1, "max_steps": 4}
    saving = {"save_strategy": "steps", "save_steps": 2} if paging is not None else {}
    pages = {"paging": paging} if paging is not None else {}
    args = arguments(out, CONFIGS[kind], **settings, **saving)
    made = (PAGED[kind] if paging is not None else kind)(
        args=args, train_dataset=DATA[kind], processing_class=tokenizer(), **pages, **given
    )
    made.train(resume_from_checkpoint=str(out / "checkpoint-2") if resume else None)
    return made


def adapter() -> Any:
    peft = pytest.importorskip("peft")
    return peft.LoraConfig(
        r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM", init_lora_weights="gaussian"
    )


CASES: dict[str, Any] = {
    "SFT": (trl.SFTTrainer, lambda: {"model": llama()}),
    "SFT, LoRA": (trl.SFTTrainer, lambda: {"model": llama(), "peft_config": adapter()}),
    "DPO": (trl.DPOTrainer, lambda: {"model": llama(), "ref_model": llama()}),
    "DPO, LoRA": (trl.DPOTrainer, lambda: {"model": llama(), "peft_config": adapter()}),
}


@pytest.mark.parametrize("case", CASES)
def test_losses_have_the_bits_of_trls_own_trainer(case: str, paging: Paging, tmp_path: Path) -> None:
    kind, given = CASES[case]
    expected = trained(kind, tmp_path / "stock", **given())
    paged = trained(kind, tmp_path / "paged", paging=paging, **given())
    assert logged(paged, "loss", "mean_token_accuracy") == logged(expected, "loss", "mean_token_accuracy")
    if case == "DPO":
        assert pagoda.plan_of(paged.ref_model).bytes["ssd"]["weight"], "the reference model is on an SSD"
    paged.optimizer.close()
    again = replace(paging, reference=memory(tmp_path / "another reference", "84KiB", "8KiB"))
    resumed = trained(kind, tmp_path / "paged", resume=True, paging=again, **given())
    assert logged(resumed, "loss") == logged(expected, "loss")
    resumed.optimizer.close()
    if "LoRA" in case:
        names = {path.name for path in (tmp_path / "paged" / "checkpoint-4").iterdir()}
        assert {"adapter_model.safetensors", "adapter_config.json", STATE} <= names
        assert "model.safetensors" not in names


def test_an_adapter_is_what_peft_loads(paging: Paging, tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    paged = trained(trl.SFTTrainer, tmp_path / "paged", paging=paging, model=llama(), peft_config=adapter())
    ids = torch.arange(8)[None]
    with torch.no_grad():
        expected = paged.model(input_ids=ids).logits
    paged.save_model(str(tmp_path / "saved"))
    loaded = peft.PeftModel.from_pretrained(llama(), tmp_path / "saved")
    with torch.no_grad():
        assert torch.equal(loaded(input_ids=ids).logits, expected)
    paged.optimizer.close()
