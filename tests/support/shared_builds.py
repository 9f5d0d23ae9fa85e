"""Builds that all tests, pytest workers and runs share: each is made once for the same sources.

They lie in `build/tests/<sources>/<inputs>/<precision>`. The first process that needs one makes it
under a lock of the kernel's, which ends with its holder; the others wait and read it. Tests do not
change a shared build: they copy it first, and the end of a run checks that (`changed_files`).
"""

import fcntl
import functools
import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from onnx import ModelProto

    from export.checkpoint.open import Checkpoint
    from graphs.contract.config import ModelConfig
    from graphs.contract.spec import GraphName, Precision

ROOT = Path(__file__).parents[2]
SOURCES = ("export", "graphs/contract", "graphs/ops", "graphs/passes", "graphs/parity/taps.py")
PACKAGES = ("ml_dtypes", "numba", "numpy", "onnx", "onnx-ir", "onnxscript", "torch")
RECORD = "files.json"

_ATTENTION = (
    *("hidden_size", "num_attention_heads", "q_lora_rank", "kv_lora_rank", "qk_nope_head_dim"),
    *("qk_rope_head_dim", "v_head_dim", "rms_norm_eps", "max_position_embeddings", "rope"),
)
_GATE = (
    *("n_routed_experts", "n_shared_experts", "num_experts_per_tok", "scoring_func", "n_group"),
    *("topk_method", "topk_group", "norm_topk_prob", "routed_scaling_factor"),
)
# The fields of a config that each graph is made from; a slow test exports graphs without sharing.
FIELDS: "dict[GraphName, tuple[str, ...]]" = {
    "dense": (*_ATTENTION, "intermediate_size"),
    "moe": (*_ATTENTION, *_GATE, "moe_intermediate_size"),
    "experts": ("hidden_size", "moe_intermediate_size"),
    "head": ("hidden_size", "vocab_size", "rms_norm_eps"),
}


class BuildStore:
    """The folder of the builds of one state of the sources."""

    def __init__(self, root: Path, sources: str) -> None:
        """Open it, and remove those of other sources that no process has open."""
        self.folder = root / sources
        root.mkdir(parents=True, exist_ok=True)
        with _locked(root / "store.lock"):
            self.folder.mkdir(exist_ok=True)
            self._open = os.open(self.folder, os.O_RDONLY)  # until `close`, or this process ends
            fcntl.flock(self._open, fcntl.LOCK_SH)
            for other in root.iterdir():
                if other.is_dir() and other != self.folder:
                    _remove_unless_open(other)

    def close(self) -> None:
        """Let a store of other sources remove this one."""
        os.close(self._open)

    def build(self, name: str, inputs: str, make: Callable[[Path], object]) -> Path:
        """The folder `name` that `make` filled, now or before; `inputs` names all it depends on."""
        entry = self.folder / hashlib.sha256(f"{name} {inputs}".encode()).hexdigest()[:16]
        with _locked(entry.with_suffix(".lock")):
            if not entry.exists():
                unfinished = entry.with_suffix(".unfinished")
                shutil.rmtree(unfinished, ignore_errors=True)
                make(unfinished / name)
                (unfinished / RECORD).write_text(json.dumps(_files(unfinished / name)))
                unfinished.rename(entry)
        return entry / name

    def changed_files(self) -> list[str]:
        """Files of shared builds that were changed, added or deleted; such builds are removed."""
        changed = []
        for record in self.folder.glob(f"*/{RECORD}"):
            recorded = json.loads(record.read_text())
            build = next(path for path in record.parent.iterdir() if path.is_dir())
            files = _files(build)
            names = {n for n in recorded.keys() | files.keys() if recorded.get(n) != files.get(n)}
            changed += [f"{build}/{name}" for name in sorted(names)]
            if names:
                shutil.rmtree(record.parent)
        return changed


def sources_digest(root: Path = ROOT) -> str:
    """A digest of what makes a build: sources, and versions of packages."""
    digest = hashlib.sha256(" ".join(map(version, PACKAGES)).encode())
    for source in SOURCES:
        path = root / source
        for file in sorted(path.rglob("*.py")) if path.is_dir() else [path]:
            digest.update(f"{file.relative_to(root)}\n".encode() + file.read_bytes())
    return digest.hexdigest()[:16]


@functools.cache
def store() -> BuildStore:
    """This checkout's."""
    return BuildStore(ROOT / "build" / "tests", sources_digest())


@contextmanager
def graphs_exported_once() -> Iterator[None]:
    """While this lasts, `export_graphs` exports only graphs that were not exported before."""
    from export.engine import to_onnx

    with pytest.MonkeyPatch.context() as patch:
        export = functools.partial(_shared_graph, to_onnx.export_graph)
        patch.setattr(to_onnx, "export_graph", export)
        yield


def shared_graphs(raw_config: dict[str, Any], precision: "Precision") -> Path:
    """A folder with a model's graphs and spec.json."""
    from export.engine.to_onnx import export_graphs

    def make(folder: Path) -> None:
        with graphs_exported_once():
            export_graphs(raw_config, precision, folder)

    return store().build(precision, f"graphs {json.dumps(raw_config)}", make)


def _shared_graph(
    export: "Callable[[ModelConfig, Precision, GraphName], ModelProto]",
    config: "ModelConfig",
    precision: "Precision",
    graph: "GraphName",
) -> "ModelProto":
    """One graph, shared by all models that agree in what it is made from."""
    import onnx

    def make(path: Path) -> None:
        path.mkdir(parents=True)
        content = export(config, precision, graph).SerializeToString(deterministic=True)
        (path / "graph.onnx").write_bytes(content)

    inputs = f"{precision} {[getattr(config, field) for field in FIELDS[graph]]}"
    return onnx.load(store().build(graph, inputs, make) / "graph.onnx")


def export_once(raw_config: dict[str, Any], precision: "Precision", build: Path) -> None:
    """Write what `export_graphs` writes, from the shared graphs."""
    shutil.copytree(shared_graphs(raw_config, precision), build, dirs_exist_ok=True)


def shared_build(checkpoint: "Checkpoint", precision: "Precision") -> Path:
    """A build with graphs, weights and goldens."""
    from export.golden.model import write_goldens
    from export.packing.pack import pack

    def make(folder: Path) -> None:
        export_once(checkpoint.raw_config, precision, folder)
        pack(checkpoint, folder, workers=1)
        write_goldens(checkpoint, folder)

    return store().build(precision, f"goldens {_content_digest(checkpoint.folder)}", make)


def _content_digest(folder: Path) -> str:
    digest = hashlib.sha256()
    for file in sorted(path for path in folder.rglob("*") if path.is_file()):
        content = hashlib.sha256(file.read_bytes()).hexdigest()
        digest.update(f"{file.relative_to(folder)} {content}\n".encode())
    return digest.hexdigest()


def _files(build: Path) -> dict[str, list[int]]:
    stats = {path: path.stat() for path in build.rglob("*") if path.is_file()}
    return {str(p.relative_to(build)): [s.st_size, s.st_mtime_ns] for p, s in stats.items()}


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _remove_unless_open(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return
    else:
        shutil.rmtree(folder)
    finally:
        os.close(descriptor)
