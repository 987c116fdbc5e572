"""Runs training scripts of diffusers on tiny models, as they are and in pages, and compares them.

    git clone https://github.com/huggingface/diffusers
    pip install pagoda-train[accelerate] diffusers peft torchvision
    python tests/nightly/diffusers_scripts.py diffusers/examples

In pages, two lines of a script change: the import of `Accelerator`, and its `paging=`. Each script trains four steps of
two micro-batches with clipping, and resumes from the checkpoint of step 2. The losses that it prints must be equal, and
the weights that it writes within 1e-5: Pagoda's AdamW differs from torch's in the last bits.
"""

import argparse
import json
import os
import re
import string
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from safetensors.torch import load_file

DREAM = ["--instance_data_dir", "images", "--instance_prompt", "dog", "--lr_scheduler", "constant", "--rank", "4"]
TEXT = ["--train_data_dir", "captioned"]
SCRIPTS: dict[str, tuple[str, Sequence[str]]] = {
    "dreambooth/train_dreambooth_sd3.py": ("sd3", DREAM[:-2]),
    "dreambooth/train_dreambooth_lora_sd3.py": ("sd3", DREAM),
    "dreambooth/train_dreambooth_flux.py": ("flux", [*DREAM[:-2], "--guidance_scale", "1"]),
    "dreambooth/train_dreambooth_lora_flux.py": ("flux", DREAM),
    "text_to_image/train_text_to_image.py": ("sd", [*TEXT, "--use_ema"]),
    "text_to_image/train_text_to_image_lora.py": ("sd", TEXT),
}
"""Script -> the pipeline that it trains, and its flags."""
FLAGS = "--resolution 32 --train_batch_size 2 --gradient_accumulation_steps 2 --learning_rate 1e-3 --seed 0"
FLAGS += " --checkpointing_steps 2 --max_grad_norm 0.5 --max_train_steps 4"
PAGING = 'Accelerator(paging=Paging(memory=pagoda.Memory(host="4MiB", ssd="pages")), '
IMPORTS = (
    "import pagoda\nfrom pagoda.integrations import Paging\nfrom pagoda.integrations.accelerate import Accelerator"
)
TOLERANCE = 1e-5


def write_pipelines(folder: Path) -> None:
    """Pipelines of SD3, Flux and Stable Diffusion with random weights, and pictures."""
    import diffusers as d
    import transformers as t

    torch.manual_seed(0)
    letters = [*range(33, 127), *range(161, 173), *range(174, 256), *range(256, 324)]  # CLIP's names of the 256 bytes
    pieces = [chr(c) + end for end in ("", "</w>") for c in letters]
    vocabulary = {piece: i for i, piece in enumerate([*pieces, "<|startoftext|>", "<|endoftext|>"])}
    clip = t.CLIPTokenizer(vocab=vocabulary, merges=[], model_max_length=77)
    scores = {"<pad>": 0.0, "</s>": 0.0, "<unk>": 0.0, "▁": -2.0} | dict.fromkeys(string.printable[:94], -3.0)
    t5 = t.T5TokenizerFast(vocab=[*scores.items()], extra_ids=0)
    ids = {name: getattr(clip, name) for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
    small = {"hidden_size": 32, "intermediate_size": 37, "num_attention_heads": 4, "num_hidden_layers": 2}
    of_clip = t.CLIPTextConfig(**ids, **small, vocab_size=len(clip), projection_dim=32)
    of_t5 = t.T5Config(vocab_size=len(t5), d_model=32, d_kv=8, d_ff=37, num_layers=2, num_heads=4)

    def vae(channels: int, **settings: object) -> d.AutoencoderKL:
        norms = {"block_out_channels": (4,), "norm_num_groups": 1, "layers_per_block": 1}
        return d.AutoencoderKL(sample_size=32, latent_channels=channels, **norms, **settings)

    flow = {"use_quant_conv": False, "use_post_quant_conv": False, "shift_factor": 0.06, "scaling_factor": 1.5}
    d.StableDiffusion3Pipeline(
        scheduler=d.FlowMatchEulerDiscreteScheduler(),
        text_encoder=t.CLIPTextModelWithProjection(of_clip),
        text_encoder_2=t.CLIPTextModelWithProjection(of_clip),
        text_encoder_3=t.T5EncoderModel(of_t5),
        tokenizer=clip,
        tokenizer_2=clip,
        tokenizer_3=t5,
        vae=vae(4, **flow),
        transformer=d.SD3Transformer2DModel(
            sample_size=32, patch_size=1, in_channels=4, out_channels=4, num_layers=2, attention_head_dim=8,
            num_attention_heads=4, caption_projection_dim=32, joint_attention_dim=32, pooled_projection_dim=64,
        ),
    ).save_pretrained(folder / "sd3")  # fmt: skip
    d.FluxPipeline(
        scheduler=d.FlowMatchEulerDiscreteScheduler(),
        text_encoder=t.CLIPTextModel(of_clip),
        text_encoder_2=t.T5EncoderModel(of_t5),
        tokenizer=clip,
        tokenizer_2=t5,
        vae=vae(1, **flow),
        transformer=d.FluxTransformer2DModel(
            patch_size=1, in_channels=4, num_layers=2, num_single_layers=2, attention_head_dim=16,
            num_attention_heads=2, joint_attention_dim=32, pooled_projection_dim=32, axes_dims_rope=[4, 4, 8],
            guidance_embeds=True,
        ),
    ).save_pretrained(folder / "flux")  # fmt: skip
    d.StableDiffusionPipeline(
        scheduler=d.DDPMScheduler(),
        text_encoder=t.CLIPTextModel(of_clip),
        tokenizer=clip,
        vae=vae(4),
        unet=d.UNet2DConditionModel(
            sample_size=32, in_channels=4, out_channels=4, block_out_channels=(8, 16), norm_num_groups=4,
            layers_per_block=1, down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"),
            up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"), cross_attention_dim=32, attention_head_dim=4,
        ),
        safety_checker=None,
        feature_extractor=None,
    ).save_pretrained(folder / "sd")  # fmt: skip
    random = np.random.default_rng(0)
    pictures = [Image.fromarray(random.integers(0, 256, (64, 64, 3), dtype=np.uint8)) for _ in range(6)]
    for name in ("images", "captioned"):
        (folder / name).mkdir()
        for i, picture in enumerate(pictures):
            picture.save(folder / name / f"{i}.png")
    lines = [json.dumps({"file_name": f"{i}.png", "text": "a dog"}) for i in range(len(pictures))]
    (folder / "captioned" / "metadata.jsonl").write_text("\n".join(lines))


def in_pages(script: str) -> str:
    """The script with two other lines."""
    line = re.compile(r"^from accelerate import (.*)$", re.MULTILINE)
    names = re.split(r", *", line.findall(script)[0])
    kept = ", ".join(name for name in names if name != "Accelerator")
    script = line.sub((f"from accelerate import {kept}\n" if kept else "") + IMPORTS, script, count=1)
    return re.sub(r"(?<== )Accelerator\(", PAGING, script, count=1)


def losses(script: Path, folder: Path, flags: Sequence[str], precision: str) -> list[str]:
    """The losses that a script prints."""
    launch = [
        sys.executable,
        "-m",
        "accelerate.commands.launch",
        "--num_processes",
        "1",
        "--num_machines",
        "1",
        "--cpu",
    ]
    command = [*launch, "--mixed_precision", precision, "--dynamo_backend", "no", str(script), *flags]
    environment = {**os.environ, "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)}\n{done.stderr[-4000:]}")
    shown = re.findall(r"loss=([\d.e-]+)", done.stderr)
    return [loss for i, loss in enumerate(shown) if not i or loss != shown[i - 1]]


def farthest(one: Path, other: Path) -> float:
    """The largest difference between trained weights, whose files are beside each other at the end of a script."""
    most = 0.0
    files = [*one.glob("*.safetensors"), *one.glob("transformer/*.safetensors"), *one.glob("unet/*.safetensors")]
    assert files, one
    for file in files:
        mine, others = load_file(file), load_file(other / file.relative_to(one))
        assert mine.keys() == others.keys()
        most = max([most, *(float((mine[name].float() - others[name].float()).abs().max()) for name in mine)])
    return most


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("examples", type=Path, help="the directory examples of a checkout of diffusers")
    parser.add_argument("--precision", choices=["no", "bf16"], default="no", help="bf16 compares losses to 2%% only")
    args = parser.parse_args()
    differ = False
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "pages").mkdir()
        write_pipelines(folder)
        for script, (pipeline, own) in SCRIPTS.items():
            text = (args.examples / script).read_text()
            printed, outs = [], []
            for kind, code in (("stock", text), ("paged", in_pages(text))):
                (folder / f"{kind}.py").write_text(code)
                outs.append(folder / f"{Path(script).stem}-{kind}")
                flags = [*FLAGS.split(), *own, "--pretrained_model_name_or_path", pipeline]
                flags += ["--output_dir", str(outs[-1])]
                first = losses(folder / f"{kind}.py", folder, flags, args.precision)
                resumed = [*flags, "--resume_from_checkpoint", "checkpoint-2"]
                printed.append((first, losses(folder / f"{kind}.py", folder, resumed, args.precision)))
            apart = farthest(*outs)
            if args.precision == "no":
                same = printed[0] == printed[1] and apart < TOLERANCE
            else:
                pairs = [zip(map(float, a), map(float, b), strict=False) for a, b in zip(*printed, strict=True)]
                same = all(abs(a - b) <= 0.02 * a for pair in pairs for a, b in pair)
            differ |= not same
            print(
                f"{'same' if same else 'DIFFERENT'}  {script}  weights within {apart:.1e}  losses {printed[1]}",
                flush=True,
            )
            if not same:
                print(f"  stock: {printed[0]}")
    sys.exit(differ)


if __name__ == "__main__":
    main()
