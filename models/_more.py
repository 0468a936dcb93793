"""More models from `transformers`, which the grid runs in one way only."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import transformers
from torch import nn

from ._entry import LAYERS, VOCABULARY, WIDTH, Batch, Entry, tokens
from ._sight import ENCODER, images
from ._text import FEED_FORWARD, GROUPED, NO_DROPOUT, SMALL, causal, masked

ROUTED: dict[str, Any] = {
    **GROUPED,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": WIDTH,
    "shared_expert_intermediate_size": WIDTH,
}
NO_DROPOUT_IN_GPT = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
NO_DROPOUT_IN_BART = {"dropout": 0.0, "attention_dropout": 0.0, "activation_dropout": 0.0}


def build(model: str, **options: Any) -> Callable[[], nn.Module]:
    """The model, with these options for its configuration."""
    kind = getattr(transformers, model)
    return lambda: kind(kind.config_class(**options))


def to_text(name: str, model: str, **options: Any) -> Entry:
    """An encoder and a decoder."""
    sides = {
        f"{side}_{what}": number
        for side in ("encoder", "decoder")
        for what, number in (
            ("layers", LAYERS // 2),
            ("attention_heads", 4),
            ("ffn_dim", 2 * WIDTH),
            ("layerdrop", 0.0),
        )
    }
    common = {
        "vocab_size": VOCABULARY,
        "d_model": WIDTH,
        "max_position_embeddings": 64,
        "pad_token_id": 1,
        "use_cache": False,
        "attn_implementation": "eager",
    }
    make = build(model, **{**sides, **common, **NO_DROPOUT_IN_BART, **options})
    return Entry(name, make, lambda size: Batch(kwargs={"input_ids": tokens(size), "labels": tokens(size, 8)}))


def says_kind(name: str, model: str, **options: Any) -> Entry:
    """A text's class."""
    given = {**SMALL, **FEED_FORWARD, **NO_DROPOUT, "num_labels": 3, "pad_token_id": 0, **options}

    def batch(size: int) -> Batch:
        return Batch(kwargs={"input_ids": tokens(size), "labels": torch.randint(3, (size,))})

    return Entry(name, build(model, **given), batch)


def sees(name: str, model: str, side: int = 32, **options: Any) -> Entry:
    """An image's class."""

    def batch(size: int) -> Batch:
        return Batch(kwargs={"pixel_values": images(size, side), "labels": torch.randint(5, (size,))})

    return Entry(name, build(model, num_labels=5, **options), batch)


def hears(name: str, model: str) -> Entry:
    """A sound's class."""
    silent = ("hidden", "attention", "activation", "feat_proj", "final")
    make = build(
        model,
        **{**ENCODER, "vocab_size": 20, "pad_token_id": 0, "num_labels": 4, "classifier_proj_size": 16},
        **{f"{what}_dropout": 0.0 for what in silent},
        mask_time_prob=0.0,
        layerdrop=0.0,
        conv_dim=(16, 16),
        conv_stride=(5, 4),
        conv_kernel=(10, 4),
        num_conv_pos_embeddings=8,
        num_conv_pos_embedding_groups=4,
    )

    def batch(size: int) -> Batch:
        return Batch(kwargs={"input_values": torch.randn(size, 400), "labels": torch.randint(4, (size,))})

    return Entry(name, make, batch)


def siglip() -> Entry:
    half = {**ENCODER, "num_hidden_layers": LAYERS // 2}
    make = build(
        "SiglipModel",
        text_config={**half, "vocab_size": VOCABULARY, "max_position_embeddings": 16},
        vision_config={**half, "image_size": 32, "patch_size": 8},
        attn_implementation="eager",
    )

    def batch(size: int) -> Batch:
        return Batch(kwargs={"input_ids": tokens(size), "pixel_values": images(size)})

    return Entry("SigLIP", make, batch, loss_fn=lambda output: output.logits_per_text.sigmoid().square().sum())


def patchtst() -> Entry:
    """Predicts time series, with a distribution of its own as the loss."""
    off = ("dropout", "attention_dropout", "ff_dropout", "head_dropout", "positional_dropout", "path_dropout")
    make = build(
        "PatchTSTForPrediction",
        **dict.fromkeys(off, 0.0),
        num_input_channels=3,
        context_length=24,
        prediction_length=6,
        patch_length=4,
        patch_stride=4,
        d_model=WIDTH,
        num_hidden_layers=LAYERS,
        num_attention_heads=4,
        ffn_dim=2 * WIDTH,
        loss="mse",
        distribution_output="student_t",
    )

    def batch(size: int) -> Batch:
        return Batch(kwargs={"past_values": torch.randn(size, 24, 3), "future_values": torch.randn(size, 6, 3)})

    return Entry("PatchTST", make, batch)


def routed(name: str, model: str, **options: Any) -> Entry:
    """With experts, whose grouped product has no float64."""
    return causal(name, model, double=False, **{**ROUTED, **options})


PYRAMID: dict[str, Any] = {"hidden_sizes": [8, 16, 32, 64], "depths": [1, 1, 2, 2]}
DEEP_PYRAMID = {**PYRAMID, "depths": [2, 2, 2, 2], "drop_path_rate": 0.0}
PATCHES = {**ENCODER, **NO_DROPOUT, "image_size": 32, "patch_size": 8}

MORE = (
    causal("Phi-3", "Phi3ForCausalLM", **GROUPED, resid_pdrop=0.0, embd_pdrop=0.0, pad_token_id=0),
    causal("Cohere", "CohereForCausalLM", **GROUPED),
    causal("Granite", "GraniteForCausalLM", **GROUPED),
    causal("OLMo 2", "Olmo2ForCausalLM", **GROUPED),
    causal("SmolLM3", "SmolLM3ForCausalLM", **GROUPED, pad_token_id=0),
    causal("Gemma 3", "Gemma3ForCausalLM", **GROUPED, head_dim=8, sliding_window=5),
    causal("Nemotron", "NemotronForCausalLM", **GROUPED),
    causal("GLM", "GlmForCausalLM", **GROUPED, head_dim=8, pad_token_id=0),
    causal("LFM2", "Lfm2ForCausalLM", **GROUPED),
    causal("GPT-J", "GPTJForCausalLM", n_positions=64, rotary_dim=4, **NO_DROPOUT_IN_GPT),
    causal(
        "GPT-Neo",
        "GPTNeoForCausalLM",
        num_layers=LAYERS,
        attention_types=[[["global", "local"], LAYERS // 2]],
        num_heads=4,
        resid_dropout=0.0,
        embed_dropout=0.0,
        attention_dropout=0.0,
        max_position_embeddings=64,
        window_size=5,
    ),
    causal(
        "CTRL", "CTRLLMHeadModel", n_embd=WIDTH, n_layer=LAYERS, n_head=4, dff=64, n_positions=64, **NO_DROPOUT_IN_GPT
    ),
    causal("RWKV", "RwkvForCausalLM", attention_hidden_size=WIDTH, context_length=64),
    causal("Mamba 2", "Mamba2ForCausalLM", state_size=8, num_heads=8, head_dim=8, n_groups=1, chunk_size=4),
    causal(
        "RecurrentGemma", "RecurrentGemmaForCausalLM", **GROUPED, lru_width=WIDTH, attention_window_size=5, head_dim=8
    ),
    causal("MPT", "MptForCausalLM", d_model=WIDTH, n_heads=4, n_layers=LAYERS, max_seq_len=64),
    routed("Qwen2 MoE", "Qwen2MoeForCausalLM", num_experts=4),
    routed("Qwen3 MoE", "Qwen3MoeForCausalLM", num_experts=4, head_dim=8, norm_topk_prob=True),
    routed(
        "DeepSeek-V3",
        "DeepseekV3ForCausalLM",
        num_key_value_heads=4,
        n_routed_experts=4,
        n_group=1,
        topk_group=1,
        first_k_dense_replace=2,
        q_lora_rank=16,
        kv_lora_rank=16,
        qk_rope_head_dim=8,
        qk_nope_head_dim=8,
        v_head_dim=8,
    ),
    routed("gpt-oss", "GptOssForCausalLM", head_dim=8, num_local_experts=4, sliding_window=5),
    routed(
        "Jamba",
        "JambaForCausalLM",
        num_experts=2,
        attn_layer_period=4,
        attn_layer_offset=1,
        mamba_d_state=4,
        mamba_dt_rank=4,
    ),
    says_kind("Llama (classes)", "LlamaForSequenceClassification", num_key_value_heads=2),
    says_kind("GPT-2 (classes)", "GPT2ForSequenceClassification", **NO_DROPOUT_IN_GPT),
    says_kind("BERT (classes)", "BertForSequenceClassification"),
    masked("RoBERTa", "RobertaForMaskedLM"),
    masked("ELECTRA", "ElectraForMaskedLM", embedding_size=16),
    masked(
        "DistilBERT",
        "DistilBertForMaskedLM",
        dim=WIDTH,
        n_layers=LAYERS,
        n_heads=4,
        hidden_dim=64,
        dropout=0.0,
        attention_dropout=0.0,
    ),
    masked("MobileBERT", "MobileBertForMaskedLM", embedding_size=16, intra_bottleneck_size=16, true_hidden_size=16),
    masked("SqueezeBERT", "SqueezeBertForMaskedLM", embedding_size=WIDTH),
    masked("FNet", "FNetForMaskedLM"),
    masked("ModernBERT", "ModernBertForMaskedLM", global_attn_every_n_layers=3, local_attention=6),
    masked("BigBird", "BigBirdForMaskedLM", attention_type="original_full"),
    masked("ConvBERT", "ConvBertForMaskedLM", embedding_size=WIDTH, head_ratio=2),
    masked("Nyströmformer", "NystromformerForMaskedLM", num_landmarks=12, segment_means_seq_len=12),
    masked("XLM", "XLMWithLMHeadModel", emb_dim=WIDTH, n_layers=LAYERS, n_heads=4, dropout=0.0, attention_dropout=0.0),
    masked("ESM", "EsmForMaskedLM", mask_token_id=2),
    to_text("BART", "BartForConditionalGeneration"),
    to_text("Pegasus", "PegasusForConditionalGeneration"),
    to_text("Marian", "MarianMTModel", decoder_start_token_id=0),
    to_text("mBART", "MBartForConditionalGeneration"),
    to_text("Blenderbot", "BlenderbotForConditionalGeneration"),
    to_text("M2M100", "M2M100ForConditionalGeneration"),
    to_text(
        "LED",
        "LEDForConditionalGeneration",
        attention_window=4,
        max_encoder_position_embeddings=64,
        max_decoder_position_embeddings=64,
    ),
    sees("DeiT", "DeiTForImageClassification", **PATCHES),
    sees("BEiT", "BeitForImageClassification", **PATCHES, drop_path_rate=0.0),
    sees("DINOv2", "Dinov2ForImageClassification", **ENCODER, image_size=32, patch_size=8),
    sees("ConvNeXt", "ConvNextForImageClassification", **DEEP_PYRAMID),
    sees("ConvNeXt V2", "ConvNextV2ForImageClassification", **DEEP_PYRAMID),
    sees("PoolFormer", "PoolFormerForImageClassification", **PYRAMID, drop_path_rate=0.0),
    sees("RegNet", "RegNetForImageClassification", **PYRAMID, embedding_size=8, groups_width=8),
    sees(
        "SegFormer",
        "SegformerForImageClassification",
        **DEEP_PYRAMID,
        **NO_DROPOUT,
        num_attention_heads=[1, 1, 2, 2],
        classifier_dropout_prob=0.0,
    ),
    sees(
        "Swin",
        "SwinForImageClassification",
        image_size=32,
        patch_size=2,
        embed_dim=16,
        depths=[2, 2, 2],
        num_heads=[2, 4, 8],
        window_size=4,
        drop_path_rate=0.0,
    ),
    sees(
        "MobileNetV2",
        "MobileNetV2ForImageClassification",
        image_size=32,
        depth_multiplier=0.35,
        classifier_dropout_prob=0.0,
    ),
    sees(
        "LeViT",
        "LevitForImageClassification",
        side=64,
        image_size=64,
        hidden_sizes=[16, 32, 48],
        num_attention_heads=[2, 2, 2],
        depths=[1, 1, 1],
        key_dim=[8, 8, 8],
    ),
    hears("HuBERT", "HubertForSequenceClassification"),
    hears("WavLM", "WavLMForSequenceClassification"),
    hears("UniSpeech", "UniSpeechForSequenceClassification"),
    siglip(),
    patchtst(),
)
