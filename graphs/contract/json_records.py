"""Dataclasses in JSON files, and back by their types.

JSON has no NaN and no infinity: a number that is not finite is written as null. Floats have six
significant digits: an error has no more to say.
"""

import dataclasses
import functools
import json
import math
import types
from pathlib import Path
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints, overload

from graphs.contract.files import write_text

DIGITS = 6

_fields = functools.cache(get_type_hints)
_T = TypeVar("_T")


def write_json(path: Path, content: Any) -> None:
    """The content, of dicts, lists, tuples and plain values; whole or not at all."""
    write_text(path, json.dumps(_finite(content), ensure_ascii=False, allow_nan=False) + "\n")


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return float(f"{value:.{DIGITS}g}") if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: _finite(v) for key, v in value.items()}
    return [_finite(v) for v in value] if isinstance(value, list | tuple) else value


@overload
def decode(kind: type[_T], value: Any) -> _T: ...
@overload
def decode(kind: Any, value: Any) -> Any: ...
def decode(kind: Any, value: Any) -> Any:
    """Parsed JSON as a value of this type. Raises TypeError, KeyError for a field that is absent.

    null is NaN where a number is meant and None is not allowed.
    """
    origin, inner = get_origin(kind), get_args(kind)
    if kind is Any:
        return value
    if kind is float and value is None:
        return math.nan
    if kind is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if kind in (bool, int, float, str) and type(value) is kind:
        return value
    if isinstance(kind, type) and dataclasses.is_dataclass(kind) and isinstance(value, dict):
        fields = _fields(kind)
        if unknown := value.keys() - fields.keys():
            raise TypeError(f"{kind.__name__} has no {min(unknown)!r}")
        return kind(**{name: decode(hint, value[name]) for name, hint in fields.items()})
    if origin is list and isinstance(value, list):
        return [decode(inner[0], v) for v in value]
    if origin is tuple and isinstance(value, list) and inner[1:] == (...,):
        return tuple(decode(inner[0], v) for v in value)
    if origin is dict and isinstance(value, dict):
        return {decode(inner[0], k): decode(inner[1], v) for k, v in value.items()}
    if origin is tuple and isinstance(value, list) and len(value) == len(inner):
        return tuple(decode(k, v) for k, v in zip(inner, value, strict=True))
    if origin is Literal and value in inner:
        return value
    if origin in (Union, types.UnionType):
        if value is None and type(None) in inner:
            return None
        choices = [k for k in inner if k is not type(None)]
        return decode(type(value) if type(value) in choices else choices[0], value)
    raise TypeError(f"expected {kind}, got {value!r:.80}")
