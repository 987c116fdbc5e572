"""TRL's SFT with images: a tiny LLaVA, and conversations, every other pair without an image."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import torch
import transformers
import trl
from PIL import Image

import pagoda
from integrations.test_trl import PAGED, text, tokenizer
from integrations.tiny_text import arguments, logged, memory
from pagoda.integrations import Paging

IMAGE, SIZE, PATCH = "<image>", 32, 8
TEMPLATE = (
    "{% for message in messages %}{% for part in message['content'] %}"
    "{% if part['type'] == 'image' %}<image> {% else %}{{ part['text'] }} {% endif %}"
    "{% endfor %}{% endfor %}"
)
DIMENSIONS: dict[str, Any] = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 2}


def processor() -> transformers.LlavaProcessor:
    words = tokenizer()
    words.add_special_tokens({"additional_special_tokens": [IMAGE]})
    return transformers.LlavaProcessor(
        image_processor=transformers.CLIPImageProcessor(
            size={"shortest_edge": SIZE}, crop_size={"height": SIZE, "width": SIZE}
        ),
        tokenizer=words,
        patch_size=PATCH,
        vision_feature_select_strategy="default",
        num_additional_image_tokens=1,
        chat_template=TEMPLATE,
    )


def llava(trains_tower: bool) -> Any:
    torch.manual_seed(0)
    words = processor().tokenizer
    tower = transformers.CLIPVisionConfig(**DIMENSIONS, num_hidden_layers=3, image_size=SIZE, patch_size=PATCH)
    language = transformers.LlamaConfig(
        **DIMENSIONS, vocab_size=len(words), num_hidden_layers=2, pad_token_id=0, eos_token_id=1
    )
    config = transformers.LlavaConfig(
        vision_config=tower.to_dict(),
        text_config=language.to_dict(),
        image_token_index=words.convert_tokens_to_ids(IMAGE),
    )
    model = transformers.LlavaForConditionalGeneration(config)
    model.model.vision_tower.requires_grad_(trains_tower)
    return model


def conversations() -> Any:
    generator, rows = np.random.default_rng(0), []
    for index in range(16):
        pixels = generator.integers(0, 255, (SIZE, SIZE, 3), dtype=np.uint8)
        shown = [Image.fromarray(pixels)] if index % 4 < 2 else []
        asked = [{"type": "image", "text": None} for _ in shown] + [{"type": "text", "text": text(index, 7)}]
        said = [{"type": "text", "text": text(index, 3)}]
        messages = [{"role": "user", "content": asked}, {"role": "assistant", "content": said}]
        rows.append({"images": shown, "messages": messages})
    return datasets.Dataset.from_list(rows)


def losses(kind: Any, out: Path, passes: int, **given: Any) -> Any:
    settings = {"optim": "sgd", "learning_rate": 0.1, "max_steps": 4, "max_length": None, "bf16": False}
    settings |= {"train_sampling_strategy": "sequential", "ddp_find_unused_parameters": True}
    settings |= {"dataset_kwargs": {"skip_prepare_dataset": True}, "gradient_accumulation_steps": passes}
    args = arguments(out, trl.SFTConfig, **settings)
    model = llava(trains_tower=passes > 1)
    trainer = kind(model=model, args=args, train_dataset=conversations(), processing_class=processor(), **given)
    trainer.train()
    return trainer


def with_images(out: Path, host: str, stage: Any = None, passes: int = 1) -> dict[str, Any]:
    """The losses of TRL's own trainer and of the paged one, and the bytes of weights of the latter by tier. With a
    `stage`, on several ranks, whose steps differ. With several `passes` of a step, the tower is trained."""
    stock = losses(trl.SFTTrainer, out / "stock", passes)
    pages = Paging(memory=memory(out / "ssd", host))
    if stage is not None:
        pages = replace(pages, mesh=pagoda.open_mesh(stage=stage), backward_passes=None)
    paged = losses(PAGED["SFT"], out / "paged", passes, paging=pages)
    weights = {tier: lines.get("weight", 0) for tier, lines in pagoda.plan_of(paged.model).bytes.items()}
    paged.optimizer.close()
    return {"stock": logged(stock, "loss"), "paged": logged(paged, "loss"), "weights": weights}
