"""Every architecture of transformers at a size that trains in milliseconds, made from its own default configuration."""

import inspect
from typing import Any

import torch
import transformers
from torch import nn
from torch.utils._pytree import tree_leaves
from transformers.models.auto import modeling_auto

MAPPINGS = (
    "CAUSAL_LM",
    "MASKED_LM",
    "SEQ_TO_SEQ_CAUSAL_LM",
    "IMAGE_CLASSIFICATION",
    "AUDIO_CLASSIFICATION",
    "CTC",
    "SPEECH_SEQ_2_SEQ",
    "IMAGE_TEXT_TO_TEXT",
    "MULTIMODAL_LM",
)
VOCABULARY, LENGTH, IMAGE, PATCH = 96, 12, 32, 8
_LAYERS = 2
_NAMES: dict[int, str] = {
    1: "first_k_dense_replace n_group n_groups num_codebooks num_random_blocks topk_group",
    2: """
        decoder_layers decoder_num_hidden_layers depth encoder_layers encoder_num_hidden_layers max_window_layers
        moe_k moe_topk n_layer n_layers n_mamba_heads num_conv_pos_embedding_groups num_decoder_layers
        num_encoder_layers num_experts_per_tok num_experts_per_token num_hidden_layers num_layers
    """,
    4: """
        attention_heads attention_window block_size decoder_attention_heads decoder_num_attention_heads
        encoder_attention_heads encoder_num_attention_heads linear_num_key_heads linear_num_value_heads
        moe_num_experts n_head n_heads n_routed_experts num_attention_heads num_experts num_heads
        num_key_value_heads num_kv_heads num_local_experts
    """,
    8: """
        attention_chunk_size attention_head_size chunk_size context_size d_head d_kv head_dim kv_channels
        linear_key_head_dim linear_value_head_dim mamba_chunk_size mamba_d_head mamba_d_state mamba_head_dim
        mamba_headdim mamba_n_heads mamba_num_heads num_codevectors_per_group num_latents patch_size
        qk_nope_head_dim qk_rope_head_dim rotary_dim sliding_window ssm_state_size state_size v_head_dim
    """,
    16: "kv_lora_rank num_conv_pos_embeddings num_mel_bins q_lora_rank",
    32: """
        classifier_proj_size codevector_dim cross_attention_hidden_size d_latents d_model decoder_dim
        decoder_hidden_size dim emb_dim embed_dim embedding_dim embedding_size encoder_hidden_size hidden_dim
        hidden_size hidden_size_per_layer_input image_size lru_width mamba_d_ssm max_source_positions n_embd
        out_hidden_size output_dim position_embedding_size proj_codevector_dim projection_dim projector_hidden_size
        vision_hidden_size vision_output_dim
    """,
    64: """
        d_ff d_inner decoder_ffn_dim dense_intermediate_size encoder_ffn_dim expert_ffn_hidden_size ffn_dim
        ffn_hidden_size intermediate_size intermediate_size_mlp max_position_embeddings max_seq_len
        max_target_positions mlp_dim moe_intermediate_size moe_shared_expert_intermediate_size n_ctx n_positions
        shared_expert_intermediate_size shared_intermediate_size
    """,
    96: "vocab_size vocab_size_per_layer_input",
}
"""Size -> what configurations call it. Only what is larger by default is changed."""
_SIZES = {name: size for size, names in _NAMES.items() for name in names.split()}
_LISTS: dict[str, Any] = {
    "depths": [1, 1, 1, 1],
    "hidden_sizes": [8, 16, 24, 32],
    "embed_dims": [8, 16, 24, 32],
    "neck_hidden_sizes": [8, 8, 16, 16, 24, 24, 32],
}
"""Only where the default has as many."""
_PER_LAYER = ("layers_block_type", "layer_types", "mlp_layer_types", "attention_types_by_layer")
"""Derived by most configurations; given here, cut to the layers that there are."""
_SECTIONS = {
    "glm4v_moe_text": [0, 1, 1],
    **{
        f"{name}_text": [1, 1, 2]
        for name in ("glm46v", "glm4v", "glm_ocr", "paddleocr_vl", "qwen2_5_omni", "qwen2_5_vl", "qwen2_vl")
    },
}
"""Text models whose code has sections of the rotary embedding for a head of their default size."""
_NO_HEAD = ("hunyuan_v1_dense", "hunyuan_v1_moe", "ministral", "hunyuan_vl_text")
"""Models whose configuration has no size of a head."""
CHANGES: dict[str, dict[str, Any]] = {
    "GPTNeoForCausalLM": {"attention_types": [[["global", "local"], 1]]},
    "DeepseekV2ForCausalLM": {"num_experts_per_tok": 2, "topk_method": "greedy"},
    "ReformerModelWithLMHead": {"is_decoder": True, "axial_pos_embds": False},
    "ReformerForMaskedLM": {"is_decoder": False, "axial_pos_embds": False},
    "XmodForMaskedLM": {"default_language": "en_XX"},
    "EsmForMaskedLM": {"vocab_size": VOCABULARY, "pad_token_id": 1, "mask_token_id": 2},
    "BitForImageClassification": {"num_groups": 2},
    "MobileViTV2ForImageClassification": {"image_size": 64},
    "PvtForImageClassification": {"num_attention_heads": [1, 2, 2, 2]},
    "Swinv2ForImageClassification": {"num_heads": [2, 2, 2, 2], "embed_dim": 16},
    "PvtV2ForImageClassification": {"num_attention_heads": [1, 2, 2, 2]},
    "XmodForCausalLM": {"default_language": "en_XX"},
    "Mamba2ForCausalLM": {"num_heads": 8, "head_dim": 8},
    "BailingHybridForCausalLM": {"num_key_value_heads": 4},
    "NemotronForCausalLM": {"num_key_value_heads": 2},
    "EfficientNetForImageClassification": {"hidden_dim": 2560},
    "Lfm2MoeForCausalLM": {"layer_types": ["conv", "full_attention"]},
    "Dots1ForCausalLM": {"n_routed_experts": 4, "num_experts_per_tok": 2, "n_shared_experts": 1},
    "MiMoV2FlashForCausalLM": {"n_routed_experts": 4, "num_experts_per_tok": 2},
    "DonutSwinForImageClassification": {"num_heads": [2, 2, 2, 2], "embed_dim": 16, "window_size": 2, "image_size": 64},
    "SwinForImageClassification": {"num_heads": [2, 2, 2, 2], "embed_dim": 16, "window_size": 2, "image_size": 64},
    "Wav2Vec2BertForCTC": {"vocab_size": VOCABULARY},
    "Wav2Vec2ConformerForCTC": {"vocab_size": VOCABULARY},
    "MoonshineForConditionalGeneration": {"pad_token_id": 0},
}
"""What else differs from the default configuration of some classes."""


def classes() -> list[str]:
    """Names of the classes, each once, in order."""
    found: dict[str, None] = {}
    for mapping in MAPPINGS:
        for names in getattr(modeling_auto, f"MODEL_FOR_{mapping}_MAPPING_NAMES").values():
            found.update(dict.fromkeys(names if isinstance(names, tuple | list) else [names]))
    return list(found)


def _overrides(config: Any) -> dict[str, Any]:
    changed: dict[str, Any] = {}
    for name, value in vars(config).items():
        if isinstance(value, transformers.PreTrainedConfig):
            changed[name] = type(value)(**_overrides(value))
        elif name in _SIZES and isinstance(value, int | list) and not isinstance(value, bool):
            if isinstance(value, list):
                layers = getattr(config, "num_hidden_layers", None) == len(value)
                changed[name] = [_SIZES[name]] * (_LAYERS if layers else len(value))
            elif value > _SIZES[name]:
                changed[name] = _SIZES[name]
        elif name == "rope_parameters" and config.model_type in _SECTIONS:
            changed[name] = {**value, "mrope_section": _SECTIONS[config.model_type]}
        elif name == "head_dim" and value is None and config.model_type in _NO_HEAD:
            changed[name] = _SIZES[name]
        elif name == "rope_parameters" and isinstance(value, dict) and "partial_rotary_factor" in str(value):
            changed[name] = {**value, "partial_rotary_factor": 0.5} if "partial_rotary_factor" in value else value
        elif name in _LISTS and isinstance(value, list | tuple):
            changed[name] = _LISTS[name][: len(value)]
        elif isinstance(value, dict) and value.get("rope_theta", 1) is None:
            changed[name] = {**value, "rope_theta": 10000.0}
        elif name in _PER_LAYER and isinstance(value, list | tuple):
            changed[name] = [*value[: _LAYERS - 1], value[-1]]
        elif isinstance(value, dict) and "mrope_section" in value:
            changed[name] = {**value, "mrope_section": [1, 1, 2]}
        elif name.endswith("_token_id") and isinstance(value, int) and value >= VOCABULARY:
            changed[name] = VOCABULARY - 1 - len(name) % 7
        elif name.endswith(("dropout", "dropout_rate", "dropout_prob", "_drop", "pdrop")) and value:
            changed[name] = 0.0
    return changed


def tiny_config(kind: Any) -> Any:
    """The default configuration of a class, made small. Raises what the class raises where that does not fit."""
    base = kind.config_class()
    changed = _overrides(base) | CHANGES.get(kind.__name__, {})
    config = kind.config_class(**changed)
    if getattr(config, "is_decoder", None) is False and "ForCausalLM" in kind.__name__:
        config.is_decoder = True
    for each in (
        config,
        *(value for value in vars(config).values() if isinstance(value, transformers.PreTrainedConfig)),
    ):
        each.use_cache = False
    return config


def tiny_model(name: str) -> nn.Module:
    """A model of a class, the same each time."""
    kind = getattr(transformers, name)
    torch.manual_seed(0)
    return kind._from_config(tiny_config(kind), dtype=torch.float32).train()  # type: ignore[no-any-return]


FRAMES_FIRST = {
    "ASTForAudioClassification": (16, 1024),
    "Wav2Vec2BertForSequenceClassification": (160, 40),
    "Wav2Vec2BertForCTC": (160, 40),
    "LasrForCTC": (16, 80),
    "ParakeetForCTC": (16, 160),
    "CanaryForConditionalGeneration": (16, 160),
    "Speech2TextForConditionalGeneration": (80, 64),
}
"""Classes that take sounds as frames of features -> features, frames."""
NO_LABELS = (
    "MusicgenForCausalLM",
    "MusicgenMelodyForCausalLM",
    "GitForCausalLM",
    "PerceiverForMaskedLM",
    "ImageGPTForImageClassification",
)
"""Classes whose labels have another shape than their tokens."""


def inputs(model: Any) -> dict[str, Any]:
    """What a forward takes: tokens, an image, a sound, or features of one."""
    names, config = inspect.signature(model.forward).parameters, model.config
    generator = torch.Generator().manual_seed(1)
    whole = config.get_text_config() if hasattr(config, "get_text_config") else config
    vocabulary = min(VOCABULARY, getattr(whole, "vocab_size", None) or VOCABULARY)
    ids = torch.randint(10, min(vocabulary, 80), (2, LENGTH), generator=generator)
    if type(model).__name__ in FRAMES_FIRST:
        bins, frames = FRAMES_FIRST[type(model).__name__]
        given = {model.main_input_name: torch.randn(2, frames, bins, generator=generator)}
        return given | ({"labels": ids} if "decoder_input_ids" in names else {})
    if "input_features" in names and model.main_input_name == "input_features":
        bins = getattr(config, "num_mel_bins", None) or getattr(config, "input_feat_per_channel", 80)
        frames = 2 * getattr(config, "max_source_positions", 32)
        given = {"input_features": torch.randn(2, bins, frames, generator=generator)}
        return given | ({"labels": ids} if "decoder_input_ids" in names else {})
    if "input_values" in names and model.main_input_name == "input_values":
        given = {"input_values": torch.randn(2, 6000, generator=generator)}
        return given | ({"labels": ids} if "decoder_input_ids" in names else {})
    if model.main_input_name == "pixel_values" and "input_ids" not in names:
        channels = getattr(config, "num_channels", 3)
        size = getattr(config, "image_size", IMAGE)
        height, width = size if isinstance(size, list | tuple) else (size, size)
        return {"pixel_values": torch.randn(2, channels, height, width, generator=generator)}
    given = {"input_ids": ids}
    if "decoder_input_ids" in names and getattr(config, "is_encoder_decoder", False):
        given["decoder_input_ids"] = ids
    elif "labels" in names and type(model).__name__ not in NO_LABELS:
        given["labels"] = ids
    return given


def loss_of(model: Any, given: dict[str, Any]) -> torch.Tensor:
    """The model's own loss, or a number that depends on all of its outputs."""
    out = model(**given)
    if getattr(out, "loss", None) is not None:
        loss: torch.Tensor = out.loss.mean()
        return loss
    tensors = [t for t in tree_leaves(dict(out)) if isinstance(t, torch.Tensor) and t.is_floating_point()]
    return torch.stack([t.float().square().mean() for t in tensors if t.requires_grad]).sum()
