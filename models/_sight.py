"""Models of images and sound, from `transformers`, with random weights."""

from __future__ import annotations

from typing import Any

import torch
import transformers
from torch import Tensor, nn

from ._entry import LAYERS, VOCABULARY, WIDTH, Batch, Entry, tokens

ENCODER: dict[str, Any] = {
    "hidden_size": WIDTH,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "intermediate_size": 2 * WIDTH,
    "attn_implementation": "eager",
}


def images(size: int, side: int = 32) -> Tensor:
    return torch.randn(size, 3, side, side)


def classes(size: int, side: int = 32) -> Batch:
    return Batch(kwargs={"pixel_values": images(size, side), "labels": torch.randint(5, (size,))})


def vit() -> nn.Module:
    config = transformers.ViTConfig(**ENCODER, image_size=32, patch_size=8, num_labels=5)
    return transformers.ViTForImageClassification(config)


def resnet() -> nn.Module:
    config = transformers.ResNetConfig(
        embedding_size=8, hidden_sizes=[16, 16, 32, 32], depths=[2, 2, 2, 2], layer_type="basic", num_labels=5
    )
    return transformers.ResNetForImageClassification(config)


def clip() -> nn.Module:
    text = {
        **ENCODER,
        "num_hidden_layers": 4,
        "vocab_size": VOCABULARY,
        "max_position_embeddings": 16,
        "eos_token_id": 2,
    }
    vision = {**ENCODER, "num_hidden_layers": 4, "image_size": 32, "patch_size": 8}
    config = transformers.CLIPConfig(text_config=text, vision_config=vision, projection_dim=16)
    config._attn_implementation = "eager"
    return transformers.CLIPModel(config)


def captioned(size: int) -> Batch:
    ids = tokens(size)
    ids[:, -1] = 2  # ends the text
    return Batch(kwargs={"input_ids": ids, "pixel_values": images(size)})


def contrast(output: Any, target: Tensor | None = None) -> Tensor:
    """Each image shall be nearest to its own text."""
    scores = output["logits_per_image"]
    own = torch.arange(len(scores), device=scores.device)
    return nn.functional.cross_entropy(scores, own) + nn.functional.cross_entropy(scores.T, own)


def whisper() -> nn.Module:
    config = transformers.WhisperConfig(
        vocab_size=VOCABULARY,
        num_mel_bins=8,
        d_model=WIDTH,
        encoder_layers=4,
        decoder_layers=4,
        encoder_attention_heads=4,
        decoder_attention_heads=4,
        encoder_ffn_dim=2 * WIDTH,
        decoder_ffn_dim=2 * WIDTH,
        max_source_positions=16,
        max_target_positions=16,
        dropout=0.0,
        use_cache=False,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        decoder_start_token_id=1,
        attn_implementation="eager",
    )
    return transformers.WhisperForConditionalGeneration(config)


def spoken(size: int) -> Batch:
    labels = tokens(size, 8)
    before = torch.cat([torch.ones_like(labels[:, :1]), labels[:, :-1]], dim=1)
    return Batch(kwargs={"input_features": torch.randn(size, 8, 32), "decoder_input_ids": before, "labels": labels})


def wav2vec2() -> nn.Module:
    config = transformers.Wav2Vec2Config(
        **ENCODER,
        vocab_size=VOCABULARY,
        conv_dim=[16, 16],
        conv_stride=[4, 4],
        conv_kernel=[8, 4],
        num_conv_pos_embeddings=4,
        num_conv_pos_embedding_groups=2,
        num_feat_extract_layers=2,
        hidden_dropout=0.0,
        activation_dropout=0.0,
        attention_dropout=0.0,
        feat_proj_dropout=0.0,
        final_dropout=0.0,
        layerdrop=0.0,
        apply_spec_augment=False,  # masks are drawn by NumPy, anew at each call
        pad_token_id=0,
    )
    return transformers.Wav2Vec2ForCTC(config)


def heard(size: int) -> Batch:
    labels = tokens(size, 24)  # as many as frames, most of them empty
    labels[:, 6:] = -100
    return Batch(kwargs={"input_values": torch.randn(size, 400), "labels": labels})


def detr() -> nn.Module:
    backbone = transformers.ResNetConfig(
        embedding_size=8, hidden_sizes=[8, 16], depths=[1, 1], layer_type="basic", out_features=["stage2"]
    )
    config = transformers.DetrConfig(
        use_timm_backbone=False,
        use_pretrained_backbone=False,
        backbone=None,
        backbone_config=backbone,
        d_model=WIDTH,
        encoder_layers=4,
        decoder_layers=4,
        encoder_attention_heads=4,
        decoder_attention_heads=4,
        encoder_ffn_dim=2 * WIDTH,
        decoder_ffn_dim=2 * WIDTH,
        num_queries=5,
        num_labels=5,
        dropout=0.0,
        attn_implementation="eager",
    )
    return transformers.DetrForObjectDetection(config)


def scenes(size: int) -> Batch:
    return Batch(kwargs={"pixel_values": images(size)}, target=torch.rand(size, 5, 4))


def boxes(output: Any, target: Tensor) -> Tensor:
    """Boxes in the order of the queries, so that no matching (which needs SciPy) is asked for."""
    return (output["pred_boxes"] - target).abs().mean() + output["logits"].logsumexp(-1).mean()


SIGHT = (
    Entry("ViT", vit, classes),
    Entry("ResNet", resnet, classes),
    Entry("CLIP", clip, captioned, contrast),
    Entry("DETR", detr, scenes, boxes),
    Entry("Whisper", whisper, spoken),
    Entry("Wav2Vec2", wav2vec2, heard),
)
