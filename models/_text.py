"""Models of text, from `transformers`, with random weights."""

from __future__ import annotations

from typing import Any

import attrs
import torch
import transformers
from torch import nn

from ._entry import LAYERS, LENGTH, VOCABULARY, WIDTH, Batch, Entry, tokens

# The names that most configurations share; a configuration maps them to its own.
SMALL: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": WIDTH,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "use_cache": False,  # a cache of keys and values is for generation, and fills memory in training
    "attn_implementation": "eager",
}
FEED_FORWARD = {"intermediate_size": 2 * WIDTH, "max_position_embeddings": 64}
GROUPED = {**FEED_FORWARD, "num_key_value_heads": 2}
NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}


def causal(name: str, model: str, *, double: bool = True, **options: Any) -> Entry:
    """A model that predicts the next token, and computes its loss itself."""

    def make() -> nn.Module:
        kind = getattr(transformers, model)
        return kind(kind.config_class(**{**SMALL, **options}))

    def batch(size: int) -> Batch:
        ids = tokens(size)
        return Batch(kwargs={"input_ids": ids, "labels": ids})

    return Entry(name, make, batch, double=double)


def masked(name: str, model: str, length: int = LENGTH, **options: Any) -> Entry:
    """A model that fills in masked tokens, with padding at some samples' ends."""

    def make() -> nn.Module:
        kind = getattr(transformers, model)
        return kind(kind.config_class(**{**SMALL, **FEED_FORWARD, **NO_DROPOUT, "pad_token_id": 0, **options}))

    def batch(size: int) -> Batch:
        ids = tokens(size, length)
        mask = torch.ones_like(ids)
        mask[::3, -2:] = 0
        labels = ids.masked_fill(torch.rand(ids.shape) < 0.5, -100)
        return Batch(kwargs={"input_ids": ids, "attention_mask": mask, "labels": labels})

    return Entry(name, make, batch)


def with_a_global_token(size: int) -> Batch:
    """The first token attends to all, and all to it."""
    batch = LONGFORMER.batch(size)
    attends = torch.zeros_like(batch.kwargs["input_ids"])
    attends[:, 0] = 1
    return Batch(kwargs={**batch.kwargs, "global_attention_mask": attends})


LONGFORMER = masked("Longformer", "LongformerForMaskedLM", length=16, attention_window=4, pad_token_id=1)


def t5() -> nn.Module:
    config = transformers.T5Config(
        vocab_size=VOCABULARY,
        d_model=WIDTH,
        d_kv=8,
        d_ff=2 * WIDTH,
        num_layers=4,
        num_heads=4,
        dropout_rate=0.0,
        decoder_start_token_id=0,
        use_cache=False,
    )
    return transformers.T5ForConditionalGeneration(config)


def to_text(size: int) -> Batch:
    ids, labels = tokens(size), tokens(size, LENGTH - 4)
    before = torch.cat([torch.zeros_like(labels[:, :1]), labels[:, :-1]], dim=1)
    mask = torch.ones_like(ids)
    return Batch(kwargs={"input_ids": ids, "attention_mask": mask, "decoder_input_ids": before, "labels": labels})


def albert() -> nn.Module:
    """Eight groups of weights, each used for two layers in turn."""
    config = transformers.AlbertConfig(
        vocab_size=VOCABULARY,
        embedding_size=16,
        hidden_size=WIDTH,
        num_hidden_layers=2 * LAYERS,
        num_hidden_groups=LAYERS,
        num_attention_heads=4,
        intermediate_size=2 * WIDTH,
        max_position_embeddings=64,
        attn_implementation="eager",
        classifier_dropout_prob=0.0,
        **NO_DROPOUT,
    )
    return transformers.AlbertForMaskedLM(config)


TEXT = (
    causal("Llama", "LlamaForCausalLM", **GROUPED),
    causal("Qwen3", "Qwen3ForCausalLM", **GROUPED, head_dim=8),
    causal("Mistral", "MistralForCausalLM", **GROUPED, sliding_window=5),
    # Its experts' grouped product has no float64.
    causal("Mixtral", "MixtralForCausalLM", double=False, **GROUPED, num_local_experts=4),
    # transformers takes the router's scores out of the blocks by hooks, which blocks of other stages do not call.
    attrs.evolve(
        causal(
            "Mixtral with a loss of its router",
            "MixtralForCausalLM",
            double=False,
            **GROUPED,
            num_local_experts=4,
            output_router_logits=True,
        ),
        refused=dict.fromkeys((2, 4, 8), "makes but does not return"),
    ),
    causal("Gemma", "GemmaForCausalLM", **GROUPED, head_dim=8),
    causal("Gemma 2", "Gemma2ForCausalLM", **GROUPED, head_dim=8, sliding_window=5),
    causal("Phi", "PhiForCausalLM", **FEED_FORWARD, resid_pdrop=0.0, embd_pdrop=0.0),
    causal("GPT-2", "GPT2LMHeadModel", n_positions=64, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0),
    causal(
        "OPT", "OPTForCausalLM", ffn_dim=2 * WIDTH, max_position_embeddings=64, dropout=0.0, word_embed_proj_dim=WIDTH
    ),
    causal("Bloom", "BloomForCausalLM"),
    causal("Falcon", "FalconForCausalLM"),
    causal("GPT-NeoX", "GPTNeoXForCausalLM", **FEED_FORWARD),
    causal("StableLM", "StableLmForCausalLM", **GROUPED),
    causal("Mamba", "MambaForCausalLM", state_size=4, time_step_rank=4),
    masked("BERT", "BertForMaskedLM"),
    Entry("ALBERT", albert, masked("", "AlbertForMaskedLM").batch),
    masked("DeBERTa", "DebertaV2ForMaskedLM", relative_attention=True, pos_att_type=["p2c", "c2p"], position_buckets=8),
    Entry("Longformer", LONGFORMER.make, with_a_global_token),
    Entry("T5", t5, to_text),
)
