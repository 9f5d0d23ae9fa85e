"""The model's configuration: a checkpoint's `config.json`, read once, checked, and never changed.

Field names are the checkpoint's own. What this pipeline cannot run is refused here, before a weight
is read: every refusal names the field, the values expected and the value that it got. A key that is
neither a field nor on the list of ignored ones is refused too, since an unknown key may change the
arithmetic.
"""

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Self

from graphs.contract.config_keys import check_keys, text_config
from graphs.contract.gates import METHODS, GroupScore, check_gate, with_gate_defaults
from graphs.contract.quantization import (
    FP8Blocks,
    Int4Groups,
    Quantization,
    check_int4_modules,
    quantization,
)
from graphs.contract.rope_config import ConfigError, RopeConfig, is_number, rope_config

BlockType = Literal["dense", "moe"]

# q_a_layernorm and kv_a_layernorm are built without the config's eps in the published model code.
LATENT_NORM_EPS = 1e-6

PRESETS = Path(__file__).parent / "presets"

# The prefix of the text model's tensors in a multimodal checkpoint (Kimi K2.5).
TEXT_PREFIX = "language_model."

# Whole numbers that may be 0; the others are at least 1.
_FROM_ZERO = ("first_k_dense_replace", "bos_token_id", "num_nextn_predict_layers")


@dataclass(frozen=True)
class ModelConfig:
    """One checkpoint's architecture. Build it with `load_config` or `ModelConfig.from_dict`."""

    vocab_size: int
    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int
    q_lora_rank: int | None  # None: queries are projected directly
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int
    intermediate_size: int
    moe_intermediate_size: int
    n_routed_experts: int
    n_shared_experts: int
    num_experts_per_tok: int
    scoring_func: str
    topk_method: str
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
    quantization: Quantization | None  # None: 16- or 32-bit weights
    num_nextn_predict_layers: int = 0  # stored behind the last layer, for training; not used

    @classmethod
    def from_dict(cls, raw: Mapping[str, Any]) -> Self:
        """Check and convert the content of a `config.json`. Raises ConfigError."""
        raw = with_gate_defaults(text_config(raw))
        fields = {f.name: f for f in dataclasses.fields(cls)}
        keys = set(fields) - {"rope", "quantization"}
        check_keys(raw, keys)
        optional = {n for n, f in fields.items() if f.default is not dataclasses.MISSING}
        if missing := sorted(keys - optional - set(raw)):
            raise ConfigError(f"{missing[0]}: missing; a Kimi K2 config.json has it")
        values = {name: raw[name] for name in keys if name in raw}
        floats = {n for n, f in fields.items() if f.type is float}
        values |= {name: float(values[name]) for name in floats if type(values[name]) is int}
        eos = values["eos_token_id"]
        values["eos_token_id"] = tuple(eos) if isinstance(eos, list | tuple) else (eos,)
        config = cls(
            **values,
            rope=rope_config(raw),
            quantization=quantization(raw.get("quantization_config")),
        )
        config._check(raw)
        return config

    def _check(self, raw: Mapping[str, Any]) -> None:
        self._check_numbers()
        heads = raw.get("num_key_value_heads")
        if heads is not None and heads != self.num_attention_heads:
            raise ConfigError(
                f"num_key_value_heads: expected num_attention_heads ({self.num_attention_heads}), "
                f"got {heads!r}"
            )
        if self.qk_rope_head_dim % 2:
            raise ConfigError(
                f"qk_rope_head_dim: expected an even number, got {self.qk_rope_head_dim}"
            )
        if self.first_k_dense_replace > self.num_hidden_layers:
            raise ConfigError(
                f"first_k_dense_replace: expected at most num_hidden_layers "
                f"({self.num_hidden_layers}), got {self.first_k_dense_replace}"
            )
        counts = (self.n_routed_experts, self.n_group, self.topk_group, self.num_experts_per_tok)
        check_gate(self.topk_method, self.scoring_func, *counts)
        if self.norm_topk_prob and self.num_experts_per_tok == 1:
            raise ConfigError(
                "num_experts_per_tok: expected at least 2 with norm_topk_prob, got 1: the "
                "published code normalises no weight that is alone"
            )
        if isinstance(self.quantization, Int4Groups):
            check_int4_modules(self.quantization, *self._linear_modules(), TEXT_PREFIX)
        if not self.eos_token_id:
            raise ConfigError("eos_token_id: expected at least one token id, got []")
        for token in (self.bos_token_id, *self.eos_token_id):
            if type(token) is not int or not 0 <= token < self.vocab_size:
                raise ConfigError(
                    f"bos_token_id, eos_token_id: expected ids below vocab_size "
                    f"({self.vocab_size}), got {token!r}"
                )

    def _check_numbers(self) -> None:
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            floor = 0 if field.name in _FROM_ZERO else 1
            whole = field.type is int or (field.type == int | None and value is not None)
            if whole and (type(value) is not int or value < floor):
                raise ConfigError(
                    f"{field.name}: expected a whole number of at least {floor}, got {value!r}"
                )
            if field.type is float and not (is_number(value) and value > 0):
                raise ConfigError(f"{field.name}: expected a number above 0, got {value!r}")
        if type(self.norm_topk_prob) is not bool:
            raise ConfigError(
                f"norm_topk_prob: expected true or false, got {self.norm_topk_prob!r}"
            )

    def _linear_modules(self) -> tuple[list[str], list[str]]:
        """Names of the linear layers of the first and last routed expert, and of all others."""
        projections = ("gate_proj", "up_proj", "down_proj")
        queries = ("q_proj",) if self.q_lora_rank is None else ("q_a_proj", "q_b_proj")
        experts, others = [], ["lm_head"]
        for layer in range(self.num_hidden_layers):
            prefix = f"model.layers.{layer}"
            for name in (*queries, "kv_a_proj_with_mqa", "kv_b_proj", "o_proj"):
                others.append(f"{prefix}.self_attn.{name}")
            shared = "mlp" if self.block_type(layer) == "dense" else "mlp.shared_experts"
            others += [f"{prefix}.{shared}.{name}" for name in projections]
            if self.block_type(layer) == "moe":
                ends = {0, self.n_routed_experts - 1}
                experts += [f"{prefix}.mlp.experts.{e}.{p}" for e in ends for p in projections]
        return experts, others

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
    def group_score(self) -> GroupScore | None:
        """The score of an expert group; None where the method knows no groups."""
        return METHODS[self.topk_method].group_score

    @property
    def has_gate_bias(self) -> bool:
        """Whether a correction bias takes part in choosing experts."""
        return METHODS[self.topk_method].bias

    @property
    def expert_scaling(self) -> float:
        """The factor by which the chosen experts' weights are multiplied.

        The softmax gates scale only where they do not normalise (published DeepSeek-V2 code).
        """
        softmax = self.scoring_func == "softmax"
        return 1.0 if softmax and self.norm_topk_prob else self.routed_scaling_factor

    @property
    def weight_block_size(self) -> tuple[int, int] | None:
        """The scale blocks of FP8 weights; None where the checkpoint has none."""
        return self.quantization.block if isinstance(self.quantization, FP8Blocks) else None

    @property
    def shared_intermediate_size(self) -> int:
        return self.moe_intermediate_size * self.n_shared_experts

    def block_type(self, layer: int) -> BlockType:
        """`dense` for the first `first_k_dense_replace` layers, `moe` for the rest."""
        return "dense" if layer < self.first_k_dense_replace else "moe"

    def count(self, block_type: BlockType) -> int:
        """The number of layers of this type."""
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
        raise ConfigError(f"{path}: expected a JSON object, got {type(raw).__name__}")
    return raw


def load_config(source: str | Path) -> ModelConfig:
    """`load_raw_config`, checked. Raises ConfigError naming the source and the field."""
    try:
        return ModelConfig.from_dict(load_raw_config(source))
    except ConfigError as e:
        text = str(e)
        raise ConfigError(text if text.startswith(str(source)) else f"{source}: {text}") from e
