"""The rope settings of a `config.json`, and helpers for its refusals."""

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


class ConfigError(ValueError):
    """A configuration this pipeline refuses; names the field, what is expected and the value."""


@dataclass(frozen=True)
class RopeConfig:
    """Rotary embedding settings, from `rope_theta` + `rope_scaling` or from `rope_parameters`.

    `factor` is 1 where the rope is not scaled; the YaRN fields then have no effect.
    """

    rope_theta: float
    factor: float = 1.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale: float = 1.0
    mscale_all_dim: float = 0.0
    original_max_position_embeddings: int = 4096

    @property
    def softmax_multiplier(self) -> float:
        """m(factor, mscale_all_dim)², by which YaRN sharpens the softmax (published model code)."""
        return yarn_mscale(self.factor, self.mscale_all_dim) ** 2

    @property
    def table_multiplier(self) -> float:
        """The multiplier of cos and sin: m(factor, mscale) / m(factor, mscale_all_dim)."""
        if self.mscale and self.mscale_all_dim:
            return yarn_mscale(self.factor, self.mscale) / yarn_mscale(
                self.factor, self.mscale_all_dim
            )
        return yarn_mscale(self.factor, 1.0)


def yarn_mscale(factor: float, mscale: float) -> float:
    """m(s, k) = 0.1·k·ln s + 1, and 1 where nothing is stretched (published model code)."""
    return 0.1 * mscale * math.log(factor) + 1.0 if factor > 1.0 else 1.0


_ROPE_ABOVE = {"rope_theta": 1, "beta_fast": 0, "beta_slow": 0}  # divisors, theta by its log
_ROPE_AT_LEAST = {"factor": 1, "original_max_position_embeddings": 1}  # the others: 0


def rope_config(raw: Mapping[str, Any]) -> RopeConfig:
    """Read `rope_parameters`, or `rope_theta` and `rope_scaling`. Raises ConfigError."""
    where = "rope_parameters" if raw.get("rope_parameters") else "rope_scaling"
    parameters = dict(as_object(where, raw.get(where) or {}))
    theta = parameters.pop("rope_theta", raw.get("rope_theta"))
    if theta is None:
        raise ConfigError("rope_theta: missing, both at the top level and in rope_parameters")
    old, new = parameters.pop("type", None), parameters.pop("rope_type", None)
    kind = new or old or "default"
    if kind not in ("default", "yarn") or (old and new and old != new):
        raise ConfigError(
            f"{where}.rope_type: expected 'default' or 'yarn', got {new!r} (type: {old!r})"
        )
    names = {f.name for f in dataclasses.fields(RopeConfig)} - {"rope_theta"}
    if unknown := sorted(set(parameters) - names):
        raise ConfigError(f"{where}.{unknown[0]}: {parameters[unknown[0]]!r} is not a known key")
    if kind == "default":
        parameters = {}
    elif missing := sorted({"factor", "original_max_position_embeddings"} - set(parameters)):
        raise ConfigError(f"{where}.{missing[0]}: missing; rope type 'yarn' needs it")
    for name, value in {"rope_theta": theta, **parameters}.items():
        above, at_least = _ROPE_ABOVE.get(name), _ROPE_AT_LEAST.get(name, 0)
        if above is not None and not (is_number(value) and value > above):
            raise ConfigError(f"{where}.{name}: expected a number above {above}, got {value!r}")
        if above is None and not (is_number(value) and value >= at_least):
            raise ConfigError(
                f"{where}.{name}: expected a number of at least {at_least}, got {value!r}"
            )
    if raw.get("rope_theta") not in (None, theta):
        raise ConfigError(
            f"rope_theta: expected one value, got {raw['rope_theta']!r} at the top level and "
            f"{theta!r} in {where}"
        )
    return RopeConfig(rope_theta=float(theta), **parameters)


def as_object(field: str, value: Any) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise ConfigError(f"{field}: expected an object, got {value!r}")
    return value


def is_number(value: Any) -> bool:
    return type(value) in (int, float) and math.isfinite(value)


def one_of(value: Any, accepted: tuple[Any, ...]) -> bool:
    """Whether the value is one of these, types included: 1 is not True."""
    return any(value == a and type(value) is type(a) for a in accepted)


def words(values: tuple[Any, ...]) -> str:
    """The values in a message: `'a', 'b' or 'c'`, leaving None out where there is another."""
    *first, last = [repr(v) for v in values if v is not None] or ["null"]
    return f"{', '.join(first)} or {last}" if first else last
