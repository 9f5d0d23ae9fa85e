"""An fp32 decode step on the CPU makes no copy of a weight or of the cache, found by counting.

1. Everything bound lies where it should: weights in their mapped files, contexts in the cache.
2. What Python and numpy allocate in a step is less than the smallest matrix and context, and does
   not grow with the cache (tracemalloc's peak).
3. What ONNX Runtime allocates fits an arena of less than the smallest matrix and context: the
   outputs of nodes, and all scratch that kernels ask their allocator for. A byte more and the run
   fails, naming the node (tests/support/limited_step.py).

What is not counted: panels of a weight that a product repacks block by block in its threads' own
memory; vectors, such as norms, and the router's matrix, which are as small as activations. For
every count a copy is planted.
"""

import os
import subprocess
import sys
import tracemalloc
from pathlib import Path

import pytest

from graphs.contract.spec import GraphName
from runtime.backends.onnxruntime import OnnxRuntimeBackend
from runtime.cache.kv_cache import LatentCache
from runtime.devices.base import HostDevice
from runtime.step.chain import Chain
from tests.support.builds import Build
from tests.support.limited_step import ARENA_BYTES, open_chain, step

ROOT = Path(__file__).parents[3]
CASES = [(1, 250), (3, 70)]  # sequences, and cached rows of each


def limited_step(build: Path, sequences: int, cached: int, *planted: str) -> str:
    """What the chain raised in a process of its own; empty where all steps succeeded."""
    command = [
        sys.executable,
        "-m",
        "tests.support.limited_step",
        str(build),
        str(sequences),
        str(cached),
    ]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [*command, *planted], cwd=ROOT, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize(("sequences", "cached"), CASES)
def test_the_arena_is_smaller_than_every_matrix_and_context(
    nano: Build, sequences: int, cached: int
) -> None:
    chain = open_chain(nano("fp32"), sequences, cached)
    files = (*chain.weights.layers, chain.weights.head)
    named = (item for file in files for item in file.tensors.items())
    matrices = [a.nbytes for name, a in named if a.ndim > 1 and name != "gate.weight"]
    assert min(*matrices, chain.cache.context(0, 0, sequences).nbytes) > ARENA_BYTES


@pytest.mark.slow
@pytest.mark.parametrize(("sequences", "cached"), CASES)
def test_a_step_runs_in_an_arena_that_holds_no_matrix_and_no_context(
    nano: Build, sequences: int, cached: int
) -> None:
    assert limited_step(nano("fp32"), sequences, cached) == ""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("graph", "value"),
    [
        ("dense", "attention.w_uk"),
        ("moe", "context"),
        ("moe", "shared.down.weight"),
        ("experts", "slots.3.down.weight"),
        ("head", "lm_head.weight"),
    ],
)
def test_a_copy_in_a_graph_does_not_fit_the_arena(
    nano: Build, graph: GraphName, value: str
) -> None:
    found = limited_step(nano("fp32"), *CASES[0], graph, value)
    assert f"graph {graph}" in found and "Neg node" in found and "BFCArena" in found


def peak_of_a_step(chain: Chain) -> int:
    """Bytes that Python and numpy held at most, above what they held before."""
    step(chain)  # what is made once
    tracemalloc.start()
    try:
        before, _ = tracemalloc.get_traced_memory()
        step(chain)
        return tracemalloc.get_traced_memory()[1] - before
    finally:
        tracemalloc.stop()


def test_what_the_host_allocates_is_small_and_does_not_grow_with_the_cache(nano: Build) -> None:
    small, large = (peak_of_a_step(open_chain(nano("fp32"), 3, 70, rows)) for rows in (1024, 65536))
    assert 0 < small < ARENA_BYTES and abs(large - small) < 2048, (small, large)


def test_a_context_copied_on_the_host_is_seen(nano: Build, monkeypatch: pytest.MonkeyPatch) -> None:
    context = LatentCache.context
    monkeypatch.setattr(LatentCache, "context", lambda *arguments: context(*arguments).copy())
    assert peak_of_a_step(open_chain(nano("fp32"), 3, 70)) > ARENA_BYTES


def misplaced(chain: Chain) -> list[str]:
    """Names of weights, tables and contexts that are bound to other memory than their own."""
    backend = chain.backend
    assert isinstance(backend, OnnxRuntimeBackend)
    files = [file.tensors | chain.weights.rope.tensors for file in chain.weights.layers]
    own = [file | {"context": chain.cache.rows[layer]} for layer, file in enumerate(files)]
    owners = [*zip(backend.layers, own, strict=True)]
    owners.append((backend.head_binding, chain.weights.head.tensors))
    found = [
        name
        for binding, arrays in owners
        for name, place in binding.places.items()
        if name in arrays and place[-1] != arrays[name].ctypes.data
    ]
    stored = {array.ctypes.data for file in files for array in file.values()}
    slots = ((n, p) for n, p in backend.experts_binding.places.items() if n.startswith("slots."))
    return found + [name for name, place in slots if place[-1] not in stored]


def test_weights_are_bound_in_their_files_and_contexts_in_the_cache(nano: Build) -> None:
    chain = open_chain(nano("fp32"), 3, 70)
    step(chain)
    assert misplaced(chain) == []


def test_a_weight_that_lies_elsewhere_is_seen(nano: Build, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        HostDevice, "place", lambda _, tensors, progress: {n: a.copy() for n, a in tensors.items()}
    )
    chain = open_chain(nano("fp32"), *CASES[0])
    step(chain)
    found = misplaced(chain)
    assert {"lm_head.weight", "attention.w_uk", "cos", "slots.0.down.weight"} <= set(
        found
    ) and "context" not in found
