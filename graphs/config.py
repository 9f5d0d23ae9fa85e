"""The model's configuration: a checkpoint's `config.json`, read once, checked, and never changed.

Field names are the checkpoint's own. What this pipeline cannot run is refused here, before a weight
is read: every refusal names the field, the value found and the values supported. A key that is
neither a field nor on the list of ignored ones is refused too, since an unknown key may change the
arithmetic.
"""

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Self

from graphs.config_parts import ConfigError, RopeConfig, block_size, is_number, rope_config, words

BlockType = Literal["dense", "moe"]

# q_a_layernorm and kv_a_layernorm are built without the config's eps in the published model code.
LATENT_NORM_EPS = 1e-6

PRESETS = Path(__file__).parent / "presets"

# Keys that do not change what is computed at inference.
_IGNORED = {
    *("architectures", "auto_map", "model_type", "torch_dtype", "dtype", "transformers_version"),
    *("aux_loss_alpha", "seq_aux", "initializer_range", "pretraining_tp", "use_cache", "ep_size"),
    *("attention_dropout", "pad_token_id", "output_router_logits", "_name_or_path"),
    *("head_dim", "qk_head_dim", "num_key_value_heads", "rope_theta", "rope_scaling"),
    *("rope_parameters", "quantization_config"),
}

# Keys with one supported value: field -> values accepted.
_FIXED: dict[str, tuple[Any, ...]] = {
    "hidden_act": ("silu",),
    "attention_bias": (False,),
    "tie_word_embeddings": (False,),
    "rope_interleave": (True,),
    "moe_layer_freq": (1,),
    "scoring_func": ("sigmoid",),
    "topk_method": ("noaux_tc",),
    "num_nextn_predict_layers": (0,),
}


@dataclass(frozen=True)
class ModelConfig:
    """One checkpoint's architecture. Build it with `load_config` or `ModelConfig.from_dict`."""

    vocab_size: int
    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int
    q_lora_rank: int
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int
    intermediate_size: int
    moe_intermediate_size: int
    n_routed_experts: int
    n_shared_experts: int
    num_experts_per_tok: int
    first_k_dense_replace: int
    n_group: int
    topk_group: int
    norm_topk_prob: bool
    routed_scaling_factor: float
    rms_norm_eps: float
    max_position_embeddings: int
    rope: RopeConfig
    bos_token_id: int
    eos_token_id: tuple[int, ...]
    weight_block_size: tuple[int, int] | None  # None: 16- or 32-bit weights

    @classmethod
    def from_dict(cls, raw: Mapping[str, Any]) -> Self:
        """Check and convert the content of a `config.json`. Raises ConfigError."""
        own = {f.name for f in dataclasses.fields(cls)} - {"rope", "weight_block_size"}
        if unknown := sorted(set(raw) - own - _IGNORED - set(_FIXED)):
            raise ConfigError(
                f"{unknown[0]}: {raw[unknown[0]]!r} is not a known key; if it does not change "
                "inference, add it to the ignored keys in graphs/config.py"
            )
        for field, accepted in _FIXED.items():
            value = raw.get(field, accepted[0])
            if not any(value == a and type(value) is type(a) for a in accepted):
                raise ConfigError(f"{field}: {value!r} found, supported: {words(accepted)}")
        if missing := sorted(own - set(raw)):
            raise ConfigError(f"{missing[0]}: missing; a Kimi K2 config.json has it")
        values = {name: raw[name] for name in own}
        floats = {f.name for f in dataclasses.fields(cls) if f.type is float}
        values |= {name: float(values[name]) for name in floats if type(values[name]) is int}
        eos = values["eos_token_id"]
        values["eos_token_id"] = tuple(eos) if isinstance(eos, list | tuple) else (eos,)
        config = cls(
            **values,
            rope=rope_config(raw),
            weight_block_size=block_size(raw.get("quantization_config")),
        )
        config._check(raw)
        return config

    def _check(self, raw: Mapping[str, Any]) -> None:
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            floor = 0 if field.name in ("first_k_dense_replace", "bos_token_id") else 1
            if field.type is int and (type(value) is not int or value < floor):
                raise ConfigError(
                    f"{field.name}: {value!r} found, supported: a whole number of at least {floor}"
                )
            if field.type is float and not (is_number(value) and value > 0):
                raise ConfigError(f"{field.name}: {value!r} found, supported: a number above 0")
        if type(self.norm_topk_prob) is not bool:
            raise ConfigError(
                f"norm_topk_prob: {self.norm_topk_prob!r} found, supported: true, false"
            )
        heads = raw.get("num_key_value_heads")
        if heads is not None and heads != self.num_attention_heads:
            raise ConfigError(
                f"num_key_value_heads: {heads!r} found, supported: num_attention_heads "
                f"({self.num_attention_heads})"
            )
        if self.qk_rope_head_dim % 2:
            raise ConfigError(f"qk_rope_head_dim: {self.qk_rope_head_dim} found, supported: even")
        if self.first_k_dense_replace > self.num_hidden_layers:
            raise ConfigError(
                f"first_k_dense_replace: {self.first_k_dense_replace} found, supported: at most "
                f"num_hidden_layers ({self.num_hidden_layers})"
            )
        if self.n_routed_experts % self.n_group or self.topk_group > self.n_group:
            raise ConfigError(
                f"n_group: {self.n_group} found, supported: a divisor of n_routed_experts "
                f"({self.n_routed_experts}) that is at least topk_group ({self.topk_group})"
            )
        if self.n_group > 1 and self.n_routed_experts < 2 * self.n_group:
            raise ConfigError(
                f"n_group: {self.n_group} found, supported: groups of at least 2 experts, since a "
                "group's score is the sum of its two best"
            )
        candidates = self.n_routed_experts // self.n_group * self.topk_group
        if self.num_experts_per_tok > candidates:
            raise ConfigError(
                f"num_experts_per_tok: {self.num_experts_per_tok} found, supported: at most "
                f"{candidates}, the experts of topk_group groups"
            )
        if not self.eos_token_id:
            raise ConfigError("eos_token_id: [] found, supported: at least one token id")
        for token in (self.bos_token_id, *self.eos_token_id):
            if type(token) is not int or not 0 <= token < self.vocab_size:
                raise ConfigError(
                    f"bos_token_id, eos_token_id: {token!r} found, supported: below vocab_size "
                    f"({self.vocab_size})"
                )

    @property
    def qk_head_dim(self) -> int:
        return self.qk_nope_head_dim + self.qk_rope_head_dim

    @property
    def cache_width(self) -> int:
        """Values kept per position and layer: the normed latent, then the rotated shared key."""
        return self.kv_lora_rank + self.qk_rope_head_dim

    @property
    def softmax_scale(self) -> float:
        """qk_head_dim^−½ · mscale², applied to the whole score (nope and rope part alike)."""
        return float(self.qk_head_dim**-0.5 * self.rope.softmax_multiplier)

    @property
    def shared_intermediate_size(self) -> int:
        return self.moe_intermediate_size * self.n_shared_experts

    def block_type(self, layer: int) -> BlockType:
        """`dense` for the first `first_k_dense_replace` layers, `moe` for the rest."""
        return "dense" if layer < self.first_k_dense_replace else "moe"

    def count(self, block_type: BlockType) -> int:
        """How many layers are of this type."""
        dense = self.first_k_dense_replace
        return dense if block_type == "dense" else self.num_hidden_layers - dense


def load_raw_config(source: str | Path) -> dict[str, Any]:
    """The JSON object behind a preset's name, a `config.json`, or a checkpoint's folder.

    Raises ConfigError where there is none.
    """
    preset, path = PRESETS / f"{source}.json", Path(source)
    if not path.exists() and preset.is_file():
        path = preset
    elif path.is_dir():
        path = path / "config.json"
    if not path.is_file():
        names = ", ".join(sorted(p.stem for p in PRESETS.glob("*.json")))
        raise ConfigError(
            f"{source}: no such preset (there are: {names}), config file, or folder that has one"
        )
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as e:
        raise ConfigError(f"{path}: not valid JSON: {e}") from e
    if not isinstance(raw, dict):
        raise ConfigError(f"{path}: a JSON object expected, found {type(raw).__name__}")
    return raw


def load_config(source: str | Path) -> ModelConfig:
    """`load_raw_config`, checked. Raises ConfigError naming the source and the field."""
    try:
        return ModelConfig.from_dict(load_raw_config(source))
    except ConfigError as e:
        text = str(e)
        raise ConfigError(text if text.startswith(str(source)) else f"{source}: {text}") from e
