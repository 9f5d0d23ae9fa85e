"""The goldens of one block: what the reference computes for given inputs and cache rows.

A case's arrays are input.*, output.* and tap.*; taps are in the checkpoint's layout. Inputs are
rounded to the types in which the graph reads them before the reference sees them.
"""

import shutil
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from export.attention import LatentRows, Taps, causal_mask
from export.block import Block
from export.feedforward import MoE
from export.layer_weights import to_numpy
from export.layers import Form
from export.rounded import round_bf16
from graphs.config import ModelConfig
from graphs.ops import MASKED
from graphs.spec import SLOTS, BuildSpec, Precision
from graphs.tensorfile import write_arrays

Arrays = dict[str, Tensor]


@dataclass(frozen=True)
class Case:
    """The content of one file of goldens."""

    name: str
    metadata: dict[str, str]
    arrays: Arrays


def write_cases(spec: BuildSpec, build: Path, cases: Iterable[Case]) -> list[Path]:
    """Write them in place of all earlier goldens, when all are made."""
    with tempfile.TemporaryDirectory(dir=build, prefix=".golden_") as folder:
        files = [_write(spec, Path(folder), case) for case in cases]
        shutil.rmtree(build / "golden", ignore_errors=True)  # of another version, other cases
        (build / "golden").mkdir()
        return [file.replace(build / "golden" / file.name) for file in files]


def _write(spec: BuildSpec, folder: Path, case: Case) -> Path:
    path = folder / f"{case.name}.safetensors"
    numpy = {key: to_numpy(value.detach()) for key, value in case.arrays.items()}
    write_arrays(path, numpy, spec.file_metadata(case.name) | case.metadata)
    return path


def as_stored(x: Tensor, precision: Precision) -> Tensor:
    """As it is after being stored in the activation's type."""
    return x if precision == "fp32" else round_bf16(x)


@dataclass(frozen=True)
class BlockGolden:
    """Makes the cases of one layer. cos, sin: the rope tables [positions, R/2]."""

    block: Block
    layer: int
    config: ModelConfig
    precision: Precision
    cos: Tensor
    sin: Tensor

    @property
    def activation(self) -> torch.dtype:
        return Form.of(self.precision).activation

    def case(
        self, mode: str, x_BSD: Tensor, context: Tensor, lengths: Sequence[int], stride: int
    ) -> Case:
        """The block on a batch of unequal contexts; the reference runs each sequence alone."""
        batch, new, _ = x_BSD.shape
        positions = torch.tensor(lengths)[:, None] + torch.arange(new)
        results = [
            self._run(x_BSD[b : b + 1], context[b : b + 1, :length], positions[b : b + 1])
            for b, length in enumerate(lengths)
        ]
        padded = torch.zeros(batch, stride, self.config.cache_width)
        for b, length in enumerate(lengths):
            padded[b, :length] = context[b, :length]
        arrays = {
            "input.x": x_BSD,
            "input.positions": positions,
            "input.mask": _mask(lengths, new, stride).to(self.activation),
            "input.context": padded.to(self.activation),
        }
        arrays |= self._outputs(results)
        if isinstance(self.block.mlp, MoE):
            bias = self.block.mlp.gate.e_score_correction_bias
            arrays |= {} if bias is None else {"bias": bias}
        left_out = {"k_nope", "keys", "values"}  # the graphs have none
        if batch > 1:
            left_out |= {"scores", "probabilities"}  # of unequal lengths
        for name in (n for n in results[0] if n not in left_out):
            arrays[f"tap.{name}"] = torch.cat([taps[name] for taps in results])
        graph = self.config.block_type(self.layer)
        metadata = {"graph": graph, "layer": str(self.layer)}
        return Case(f"{graph}_{self.layer:03d}_{mode}", metadata, arrays)

    def _run(self, x_1SD: Tensor, rows_1TW: Tensor, positions_1S: Tensor) -> Taps:
        """Everything that the reference computes for one sequence."""
        C, length = self.config.kv_lora_rank, rows_1TW.shape[1]
        cache = LatentRows(rows_1TW[..., :C], rows_1TW[..., C:])
        tables = (table[positions_1S].to(x_1SD.dtype) for table in (self.cos, self.sin))
        mask = causal_mask(x_1SD.shape[1], length, x_1SD.dtype)
        taps: Taps = {}
        self.block(x_1SD, *tables, mask, cache, taps)
        return taps

    def _outputs(self, results: list[Taps]) -> Arrays:
        def whole(name: str) -> Tensor:
            return torch.cat([taps[name] for taps in results])

        new = torch.cat([whole("c_kv_normed"), whole("k_pe_rotated")], dim=-1)
        outputs = {"output.new": new.to(self.activation), "output.y": whole("y")}
        if isinstance(self.block.mlp, MoE):
            outputs |= {
                "output.acc": (whole("x_mid") + whole("shared")).flatten(0, 1),
                "output.h": whole("h").flatten(0, 1).to(self.activation),
                "output.experts": whole("experts"),
                "output.expert_weights": whole("expert_weights"),
            }
        return outputs

    def experts_case(self, block_case: Arrays) -> Case:
        """The experts graph on the first experts of a case of this block, its last slot unused."""
        moe = self.block.mlp
        assert isinstance(moe, MoE)
        h, acc = block_case["output.h"], block_case["output.acc"]
        chosen, weights = block_case["output.experts"], block_case["output.expert_weights"]
        used = torch.unique(chosen).tolist()[: SLOTS - 1]
        arrays = {"input.h": h, "input.acc": acc}
        result = acc.clone()
        for slot in range(SLOTS):
            rows, gates = torch.tensor([0]), torch.zeros(1, 1)
            if slot < len(used):
                rows, columns = torch.where(chosen == used[slot])
                gates = weights[rows, columns, None]
                result[rows] += moe.experts[used[slot]](h[rows].float()) * gates
            arrays |= {f"input.rows_{slot}": rows, f"input.gates_{slot}": gates}
        arrays["slot_experts"] = torch.tensor((used + [used[0]] * SLOTS)[:SLOTS])
        arrays["output.acc_out"] = result
        metadata = {"graph": "experts", "layer": str(self.layer)}
        return Case(f"experts_{self.layer:03d}", metadata, arrays)


def _mask(lengths: Sequence[int], new: int, stride: int) -> Tensor:
    """[B, stride+new, 1, new], keys-major: query i sees its cached rows and new rows 0 … i."""
    keys = torch.arange(stride + new)[None, :, None]
    queries = torch.arange(new)[None, None, :]
    cached = keys < torch.tensor(lengths)[:, None, None]
    own = (keys >= stride) & (keys - stride <= queries)
    return torch.where(cached | own, 0.0, MASKED)[:, :, None, :]
