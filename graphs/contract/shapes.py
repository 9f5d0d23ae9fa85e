"""The input shapes that the two profiles of an engine admit, from its graph's dimension names."""

from graphs.contract.manifest import Bounds, EngineMode, Profile
from graphs.contract.spec import GraphSpec


class CompileError(ValueError):
    """A target, profile or graph that no engine can be made of; the message says what can be."""


Range = tuple[int, int, int]  # least, usual, greatest
USUAL_ROWS = 8  # of an expert; 128 here makes the builder take 95 MB of scratch where 8 takes 19


def check_profile(profile: Profile) -> None:
    """Raises CompileError."""
    if profile.tokens < 2:
        raise CompileError(
            f"tokens: expected at least 2, got {profile.tokens}; a profile fixed at one row makes "
            "the builder re-lay out the weights at every run"
        )
    for name, size in (("batch", profile.batch), ("context", profile.context)):
        if size < 1:
            raise CompileError(f"{name}: expected at least 1, got {size}")


def dimension_ranges(mode: EngineMode, profile: Profile) -> dict[str, Range]:
    """Every dynamic dimension's range.

    No profile is fixed at one row, where the builder re-lays out the weights at every run: a batch
    of 1 is built for 1..2 (K2's dense block, FP8: 9.6 MB of scratch, and 25.6 MB at exactly 1).
    """
    sequences = max(profile.batch, 2) if mode == "decode" else 1
    tokens = 1 if mode == "decode" else profile.tokens
    rows = sequences * tokens
    context = (0, profile.context // 4, profile.context)
    return {
        "batch": (1, sequences, sequences),
        "tokens": (1, tokens, tokens),
        "context": context,
        "rows": (1, rows, rows),
        "slot": (1, min(USUAL_ROWS, rows), rows),
    }


def input_bounds(graph: GraphSpec, mode: EngineMode, profile: Profile) -> dict[str, Bounds]:
    """The shapes that a profile admits, for each dynamic input of a graph. Raises CompileError."""
    ranges = dimension_ranges(mode, profile)
    if all("batch" not in tensor.dims for tensor in graph.inputs):
        ranges["tokens"] = ranges["rows"]  # the experts' graph counts tokens of all sequences

    def bounds(name: str, dims: tuple[int | str, ...]) -> Bounds:
        sizes = []
        for dim in dims:
            key = "slot" if isinstance(dim, str) and dim.startswith("rows_") else dim
            if isinstance(key, str) and key not in ranges:
                raise CompileError(
                    f"graph {graph.name}: input {name}: expected a dimension of "
                    f"{', '.join(ranges)}, got {dim!r}; export again with this version"
                )
            sizes.append(ranges[key] if isinstance(key, str) else (key, key, key))
        least, usual, greatest = (tuple(size[i] for size in sizes) for i in range(3))
        return least, usual, greatest

    dynamic = (t for t in graph.inputs if any(isinstance(d, str) for d in t.dims))
    return {t.name: bounds(t.name, t.dims) for t in dynamic}
