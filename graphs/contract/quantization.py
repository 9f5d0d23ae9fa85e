"""A checkpoint's `quantization_config`: which weights are quantised, and how.

Two methods are known. `fp8` (Kimi K2, DeepSeek-V3): every linear layer but the gate is e4m3 with a
multiplier per scale block. `compressed-tensors` in its pack-quantized form (Kimi K2-Thinking,
K2.5): the routed experts are 4-bit integers with a multiplier per weight group, all else is 16
bits.
"""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from graphs.contract.rope_config import ConfigError, as_object, one_of, words

_PATTERN = "re:"  # before a rule that is a regular expression, not a name


@dataclass(frozen=True)
class FP8Blocks:
    """e4m3 weights, one scale per `block` of (rows, columns)."""

    block: tuple[int, int]


@dataclass(frozen=True)
class Int4Groups:
    """4-bit integers −8 … 7 of routed experts, one scale per `group_size` inputs of a row.

    `targeted` says of a module's name whether the config would quantise it; the rules are kept so
    that they can be held against the model's modules.
    """

    group_size: int
    ignore: tuple[str, ...]

    def targeted(self, module: str) -> bool:
        """Whether a linear layer of this name is quantised; an `re:` rule matches its start."""
        return not any(
            re.match(rule.removeprefix(_PATTERN), module)
            if rule.startswith(_PATTERN)
            else rule == module
            for rule in self.ignore
        )


Quantization = FP8Blocks | Int4Groups

_FP8: dict[str, tuple[Any, ...]] = {
    "quant_method": ("fp8",),
    "fmt": ("e4m3", None),
    "activation_scheme": ("dynamic", None),
    "scale_fmt": ("ue8m0", None),  # scales are powers of two: nothing else changes
    "modules_to_not_convert": (None, []),
}
_COMPRESSED: dict[str, tuple[Any, ...]] = {
    "quant_method": ("compressed-tensors",),
    "format": ("pack-quantized",),
    "quantization_status": ("compressed", None),
    "kv_cache_scheme": (None,),
    "sparsity_config": (None, {}),
    "transform_config": (None, {}),
}
_COMPRESSED_IGNORED = {"global_compression_ratio", "version"}
_GROUP: dict[str, tuple[Any, ...]] = {
    "input_activations": (None,),
    "output_activations": (None,),
    "targets": (["Linear"],),
    "format": ("pack-quantized", None),
}
_INT4: dict[str, tuple[Any, ...]] = {
    "num_bits": (4,),
    "type": ("int",),
    "symmetric": (True,),
    "strategy": ("group",),
    "dynamic": (False, None),
    "actorder": (None,),
    "block_structure": (None,),
    "zp_dtype": (None,),
}
_INT4_IGNORED = {"observer", "observer_kwargs", "scale_dtype"}  # of the calibration


def quantization(raw: Mapping[str, Any] | None) -> Quantization | None:
    """The checked `quantization_config`; None where there is none. Raises ConfigError."""
    if raw is None:
        return None
    where = "quantization_config"
    match as_object(where, raw).get("quant_method"):
        case "fp8":
            _check(where, raw, _FP8, {"weight_block_size"})
            return FP8Blocks(_block(raw.get("weight_block_size")))
        case "compressed-tensors":
            _check(where, raw, _COMPRESSED, {"config_groups", "ignore"} | _COMPRESSED_IGNORED)
            return _int4(raw)
        case other:
            raise ConfigError(
                f"{where}.quant_method: expected 'fp8' or 'compressed-tensors', got {other!r}"
            )


def _block(size: Any) -> tuple[int, int]:
    field = "quantization_config.weight_block_size"
    if not (isinstance(size, list) and len(size) == 2 and all(type(s) is int for s in size)):
        raise ConfigError(f"{field}: expected two whole numbers, got {size!r}")
    if min(size) < 1:
        raise ConfigError(f"{field}: expected sizes above 0, got {size!r}")
    return size[0], size[1]


def _int4(raw: Mapping[str, Any]) -> Int4Groups:
    where = "quantization_config.config_groups"
    groups = as_object(where, raw.get("config_groups"))
    if len(groups) != 1:
        raise ConfigError(
            f"{where}: expected one group, got {sorted(groups)}; mixed methods are not known"
        )
    (name, group), *_ = groups.items()
    _check(f"{where}.{name}", as_object(f"{where}.{name}", group), _GROUP, {"weights"})
    weights = as_object(f"{where}.{name}.weights", group.get("weights"))
    _check(f"{where}.{name}.weights", weights, _INT4, {"group_size"} | _INT4_IGNORED)
    size = weights.get("group_size")
    if type(size) is not int or size < 1:
        raise ConfigError(
            f"{where}.{name}.weights.group_size: expected a whole number of at least 1, got "
            f"{size!r}"
        )
    return Int4Groups(size, _rules(raw.get("ignore")))


def _rules(ignore: Any) -> tuple[str, ...]:
    field = "quantization_config.ignore"
    if not (isinstance(ignore, list) and all(isinstance(rule, str) for rule in ignore)):
        raise ConfigError(f"{field}: expected a list of module names, got {ignore!r}")
    for rule in ignore:
        if rule.startswith(_PATTERN):
            try:
                re.compile(rule.removeprefix(_PATTERN))
            except re.error as e:
                raise ConfigError(
                    f"{field}: expected a regular expression, got {rule!r}: {e}"
                ) from e
    return tuple(ignore)


def _check(
    where: str, raw: Mapping[str, Any], supported: Mapping[str, tuple[Any, ...]], known: set[str]
) -> None:
    for field, accepted in supported.items():
        if not one_of(value := raw.get(field), accepted):
            raise ConfigError(f"{where}.{field}: expected {words(accepted)}, got {value!r}")
    if unknown := sorted(set(raw) - set(supported) - known):
        raise ConfigError(f"{where}.{unknown[0]}: {raw[unknown[0]]!r} is not a known key")


def check_int4_modules(
    int4: Int4Groups, experts: Iterable[str], others: Iterable[str], prefix: str
) -> None:
    """Raises ConfigError where the rules quantise anything but routed experts, or not all of those.

    Modules are named with and without `prefix`, since rules are written for either.
    """
    for expected, modules in ((True, experts), (False, others)):
        for module in modules:
            quantised = int4.targeted(module) and int4.targeted(prefix + module)
            if quantised != expected:
                raise ConfigError(
                    "quantization_config.ignore: expected INT4 for the routed experts and for "
                    f"nothing else, got {list(int4.ignore)}, by which {module} is "
                    f"{'quantised' if quantised else 'not quantised'}"
                )
