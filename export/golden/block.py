"""Goldens of one block: what the reference computes for fixed inputs and cache rows.

A case's arrays are input.*, output.*, tap.*, and regrid.* (export.golden.regrid). Taps are in the
checkpoint's layout, except that keys stand where the graph has them: a key that a query does not
see has the score MASKED and probability 0. Inputs are rounded to the graph's input types before the
reference reads them.
"""

import shutil
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from export.checkpoint.open import Checkpoint
from export.engine.layers import LinearForm
from export.golden.regrid import regrid
from export.golden.rounded import round_bf16
from export.packing.layer_weights import LayerPacker, to_numpy
from export.reference.attention import LatentRows, Taps, causal_mask
from export.reference.block import Block
from export.reference.feedforward import MoE
from graphs.contract.config import ModelConfig
from graphs.contract.spec import EXPERT_SLOTS, BuildSpec, Precision
from graphs.contract.tensorfile import write_arrays
from graphs.ops import MASKED

Arrays = dict[str, Tensor]


@dataclass(frozen=True)
class GoldenCase:
    """The content of one golden file."""

    name: str
    metadata: dict[str, str]
    arrays: Arrays


def write_cases(spec: BuildSpec, build: Path, cases: Iterable[GoldenCase]) -> list[Path]:
    """Replace all earlier goldens by these, once all are made."""
    with tempfile.TemporaryDirectory(dir=build, prefix=".golden_") as folder:
        files = [_write(spec, Path(folder), case) for case in cases]
        shutil.rmtree(build / "golden", ignore_errors=True)  # another version has other cases
        (build / "golden").mkdir()
        return [file.replace(build / "golden" / file.name) for file in files]


def _write(spec: BuildSpec, folder: Path, case: GoldenCase) -> Path:
    path = folder / f"{case.name}.safetensors"
    numpy = {key: to_numpy(value.detach()) for key, value in case.arrays.items()}
    write_arrays(path, numpy, spec.file_metadata(case.name) | case.metadata)
    return path


def as_stored(x: Tensor, precision: Precision) -> Tensor:
    """x rounded to the activation dtype of this precision, in its own dtype."""
    return x if precision == "fp32" else round_bf16(x)


@dataclass(frozen=True)
class BlockGolden:
    """Makes the cases of one layer. cos, sin: the rope tables [P, R/2]."""

    checkpoint: Checkpoint
    block: Block
    layer: int
    precision: Precision
    cos: Tensor
    sin: Tensor

    @property
    def config(self) -> ModelConfig:
        return self.checkpoint.config

    @property
    def form(self) -> LinearForm:
        return LinearForm.from_precision(self.precision)

    @property
    def packer(self) -> LayerPacker:
        return LayerPacker(self.checkpoint, self.form, self.layer)

    def case(
        self, mode: str, x_BSD: Tensor, context: Tensor, lengths: Sequence[int], stride: int
    ) -> GoldenCase:
        """Run the block on sequences of unequal cached lengths; the reference runs each alone."""
        batch, new, _ = x_BSD.shape
        positions = torch.tensor(lengths)[:, None] + torch.arange(new)
        results = [
            self._run(x_BSD[b : b + 1], context[b : b + 1, :length], positions[b : b + 1])
            for b, length in enumerate(lengths)
        ]
        padded = torch.zeros(batch, stride, self.config.cache_width)
        for b, length in enumerate(lengths):
            padded[b, :length] = context[b, :length]
        context = padded.to(self.form.activation)
        arrays = {"input.x": x_BSD, "input.positions": positions, "input.context": context}
        arrays |= self._outputs(results)
        if isinstance(self.block.mlp, MoE):
            bias = self.block.mlp.gate.e_score_correction_bias
            arrays |= {} if bias is None else {"bias": bias}
        for taps, length in zip(results, lengths, strict=True):
            for name, hidden in (("scores", MASKED), ("probabilities", 0.0)):
                taps[name] = _place_keys(taps[name], length, stride, hidden)
        for name in (tap for tap in results[0] if tap not in REFERENCE_ONLY):
            arrays[f"tap.{name}"] = torch.cat([taps[name] for taps in results])
        graph = self.config.block_type(self.layer)
        if mode == "prefill":
            arrays |= self._regrids({m: m for m in self._linears(graph)})
        return GoldenCase(f"{graph}_{self.layer:03d}_{mode}", self._metadata(graph, mode), arrays)

    def _linears(self, graph: str) -> list[str]:
        """Names of the block's packed linear layers; `attention` is W_UK and W_UV together."""
        low_rank = self.config.q_lora_rank is not None
        queries = ["qkv_a", "q_b"] if low_rank else ["qkv"]
        mlp = "mlp" if graph == "dense" else "shared"
        attention = [f"attention.{name}" for name in (*queries, "o")]
        return ["attention", *attention, f"{mlp}.gate_up", f"{mlp}.down"]

    def _regrids(self, modules: Mapping[str, str]) -> Arrays:
        """The `export.golden.regrid` ratios of packed modules, given by their name in the graph."""
        ratios = {name: regrid(self.packer, module) for name, module in modules.items()}
        return {f"regrid.{name}": r for name, r in ratios.items() if r is not None}

    def _metadata(self, graph: str, mode: str) -> dict[str, str]:
        return {"graph": graph, "layer": str(self.layer), "mode": mode}

    def _run(self, x_1SD: Tensor, rows_1TW: Tensor, positions_1S: Tensor) -> Taps:
        """All taps of the reference for one sequence."""
        C, length = self.config.kv_lora_rank, rows_1TW.shape[1]
        cache = LatentRows(rows_1TW[..., :C], rows_1TW[..., C:])
        tables = (table[positions_1S].to(x_1SD.dtype) for table in (self.cos, self.sin))
        mask = causal_mask(x_1SD.shape[1], length, x_1SD.dtype)
        taps: Taps = {}
        self.block(x_1SD, *tables, mask, cache, taps)
        return taps

    def _outputs(self, results: list[Taps]) -> Arrays:
        def joined(name: str) -> Tensor:
            return torch.cat([taps[name] for taps in results])

        new = torch.cat([joined("c_kv_normed"), joined("k_pe_rotated")], dim=-1)
        outputs = {"output.new": new.to(self.form.activation), "output.y": joined("y")}
        if isinstance(self.block.mlp, MoE):
            outputs |= {
                "output.acc": (joined("x_mid") + joined("shared")).flatten(0, 1),
                "output.h": joined("h").flatten(0, 1).to(self.form.activation),
                "output.experts": joined("experts"),
                "output.expert_weights": joined("expert_weights"),
            }
        return outputs

    def experts_cases(self, mode: str, block_case: Arrays) -> Iterator[GoldenCase]:
        """Run the experts graph on all experts that a block's case chose, the last slot unused.

        Each case starts from the sum with which the one before it ended, so the last ends with y.
        """
        acc = block_case["output.acc"]
        experts = torch.unique(block_case["output.experts"]).tolist()
        for number, start in enumerate(range(0, len(experts), EXPERT_SLOTS - 1)):
            used = experts[start : start + EXPERT_SLOTS - 1]
            slots = [used[min(slot, len(used) - 1)] for slot in range(EXPERT_SLOTS)]
            arrays = {"input.h": block_case["output.h"], "input.acc": acc}
            acc = acc.clone()
            for slot, expert in enumerate(slots):
                rows, gates, taps = self._run_expert(expert, slot < len(used), block_case)
                if slot < len(used):
                    acc[rows] += taps["output"] * gates
                arrays |= {f"input.rows_{slot}": rows, f"input.gates_{slot}": gates}
                for name in ("gate", "up", "product", "output"):
                    arrays[f"tap.slots.{slot}.{name}"] = taps[name]
            arrays["slot_experts"] = torch.tensor(slots)
            arrays |= self._regrids(
                {
                    f"slots.{slot}.{part}": f"experts.{expert}.{part}"
                    for slot, expert in enumerate(slots)
                    for part in ("gate_up", "down")
                }
            )
            arrays["output.acc_out"] = acc
            name = f"experts_{self.layer:03d}_{mode}_{number}"
            yield GoldenCase(name, self._metadata("experts", mode), arrays)

    def _run_expert(self, expert: int, used: bool, case: Arrays) -> tuple[Tensor, Tensor, Taps]:
        """Rows, gates and taps of an expert slot; an unused one has row 0 with gate 0."""
        assert isinstance(self.block.mlp, MoE)
        rows, gates, taps = torch.tensor([0]), torch.zeros(1, 1), Taps()
        if used:
            rows, columns = torch.where(case["output.experts"] == expert)
            gates = case["output.expert_weights"][rows, columns, None]
        taps["output"] = self.block.mlp.experts[expert](case["output.h"][rows].float(), taps)
        return rows, gates, taps


# Taps that the graphs, which attend over the latent, do not have.
REFERENCE_ONLY = ("k_nope", "keys", "values")


def _place_keys(keys: Tensor, length: int, stride: int, hidden: float) -> Tensor:
    """[1,H,S,length+S] as [1,H,S,stride+S]: the step's new keys stand behind the whole stride."""
    *sizes, new = *keys.shape[:3], keys.shape[3] - length
    result = torch.full((*sizes, stride + new), hidden)
    result[..., :length], result[..., stride:] = keys[..., :length], keys[..., length:]
    return result.masked_fill(result < MASKED, hidden)
