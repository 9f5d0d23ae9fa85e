"""Keys of a published config.json beside the fields of `ModelConfig`, and what they may say.

What is listed as ignored was seen in a published file and does not change what is computed. The
text model may be nested in a multimodal config (Kimi K2.5); its vision tower is not run.
"""

from collections.abc import Mapping
from typing import Any

from graphs.contract.rope_config import ConfigError, as_object, one_of, words

IGNORED = {
    # who wrote it, with what, how it was trained
    *("architectures", "auto_map", "model_type", "torch_dtype", "dtype", "transformers_version"),
    *("_name_or_path", "_attn_implementation_autoset", "aux_loss_alpha", "seq_aux", "ep_size"),
    *("initializer_range", "pretraining_tp", "attention_dropout", "use_cache"),
    # follow from others, or are read elsewhere
    *("head_dim", "qk_head_dim", "num_key_value_heads", "rope_theta", "rope_scaling"),
    *("rope_parameters", "quantization_config", "pad_token_id", "sep_token_id"),
    # how transformers would generate: the runtime has its own options and generation_config.json
    *("do_sample", "temperature", "top_k", "top_p", "typical_p", "num_beams", "num_beam_groups"),
    *("num_return_sequences", "diversity_penalty", "early_stopping", "length_penalty"),
    *("repetition_penalty", "no_repeat_ngram_size", "encoder_no_repeat_ngram_size", "max_length"),
    *("min_length", "bad_words_ids", "begin_suppress_tokens", "suppress_tokens", "output_scores"),
    *("exponential_decay_length_penalty", "forced_bos_token_id", "forced_eos_token_id"),
    *("decoder_start_token_id", "remove_invalid_values", "return_dict_in_generate"),
    # what transformers returns, and tasks other than this one
    *("return_dict", "output_attentions", "output_hidden_states", "output_router_logits"),
    *("torchscript", "tf_legacy_loss", "id2label", "label2id", "problem_type", "finetuning_task"),
    *("task_specific_params", "tokenizer_class", "prefix"),
}

# Keys with one supported value: field -> values accepted; the first stands where it is absent.
FIXED: dict[str, tuple[Any, ...]] = {
    "hidden_act": ("silu",),
    "attention_bias": (False,),
    "mlp_bias": (False,),
    "tie_word_embeddings": (False,),
    "rope_interleave": (True,),
    "moe_layer_freq": (1,),
    "add_cross_attention": (False,),
    "cross_attention_hidden_size": (None,),
    "chunk_size_feed_forward": (0,),
    "is_decoder": (False,),
    "is_encoder_decoder": (False,),
    "pruned_heads": ({},),
    "tie_encoder_decoder": (False,),
    "use_bfloat16": (False,),
}

# Keys of a multimodal config beside `text_config`.
_OUTER = {
    *("text_config", "vision_config", "model_type", "architectures", "auto_map", "dtype"),
    *("torch_dtype", "transformers_version", "_name_or_path", "pad_token_id", "ignore_index"),
    *("media_placeholder_token_id", "use_unified_vision_chunk", "video_placeholder"),
}
_SHARED = ("quantization_config", "tie_word_embeddings", "bos_token_id", "eos_token_id")
_OUTER_TYPES = ("kimi_k25",)  # Kimi K2.5 and its successors


def check_keys(raw: Mapping[str, Any], fields: set[str]) -> None:
    """Raises ConfigError at a key that is neither one of `fields` nor listed here."""
    if unknown := sorted(set(raw) - fields - IGNORED - set(FIXED)):
        raise ConfigError(
            f"{unknown[0]}: {raw[unknown[0]]!r} is not a known key; if it does not change "
            "inference, add it to the ignored keys in graphs/contract/config_keys.py"
        )
    for field, accepted in FIXED.items():
        value = raw.get(field, accepted[0])
        if not one_of(value, accepted):
            raise ConfigError(f"{field}: expected {words(accepted)}, got {value!r}")


def text_config(raw: Mapping[str, Any]) -> Mapping[str, Any]:
    """The text model's settings: `raw` itself, or what a multimodal config nests in it.

    What both levels may say stands where either says it. Raises ConfigError where they disagree.
    """
    if "text_config" not in raw:
        return raw
    if unknown := sorted(set(raw) - _OUTER - set(_SHARED)):
        raise ConfigError(
            f"{unknown[0]}: {raw[unknown[0]]!r} is not a known key of a config that has a "
            "text_config"
        )
    if (kind := raw.get("model_type")) not in _OUTER_TYPES:
        raise ConfigError(
            f"model_type: expected {words(_OUTER_TYPES)} beside text_config, got {kind!r}"
        )
    text = dict(as_object("text_config", raw["text_config"]))
    for field in _SHARED:
        inner, outer = text.get(field), raw.get(field)
        if None not in (inner, outer) and inner != outer:
            raise ConfigError(
                f"{field}: expected one value, got {outer!r} at the top level and {inner!r} in "
                "text_config"
            )
        if outer is not None:
            text[field] = outer
    return text
