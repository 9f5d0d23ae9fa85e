"""Goldens: what the torch reference computes for fixed inputs, replayed by `parity` on any backend.

    golden/<block>_<layer>_<mode>.safetensors   input.*, output.*, tap.* of one layer's block: every
                                                layer's prefill; chunk and decode of the first
                                                layer of each type
    golden/experts_<layer>.safetensors          eight slots of the first MoE layer's experts
    golden/head.safetensors
    golden/end_to_end.safetensors               prompt_ids, logits of every position, cache rows of
                                                all layers, the greedy tokens that follow, and by
                                                how much each one's logit led

Inputs are hidden states and cache rows of the model itself, on a fixed text, rounded to the types
in which the graph reads them, before the reference sees them. Taps are in the checkpoint's layout.

Cases have tens of rows for the sake of fp8: where an activation lies on the border of two e4m3
values, summation order decides, and one such flip moves its whole row by some thousandths in a
model as narrow as k2-nano. The relative RMS over 32 rows tells that from an error; over 3 it would
not. Flips add up from layer to layer, so every layer is also replayed at the reference's own input.
"""

import shutil
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

import torch
from torch import Tensor

from export.attention import LatentRows, Taps, causal_mask
from export.block import ReferenceModel
from export.checkpoint import Checkpoint
from export.feedforward import MoE
from export.pack import matching_spec, to_numpy
from export.rounded import round_bf16, rounded_reference
from graphs.ops import MASKED
from graphs.spec import SLOTS, BuildSpec, Precision
from graphs.tensorfile import write_arrays

TEXT = "And it came to pass in those days, that a man of the hill country went up to the gate."
PROMPT_LENGTH = 96
BATCH = 32  # sequences of the decode case; see below
GREEDY_TOKENS = 64
STRIDE = 128  # rows between two sequences of a batch, as the runtime's cache lays them out

Arrays = dict[str, Tensor]
Mode = Literal["prefill", "chunk", "decode"]
MODES: tuple[Mode, ...] = get_args(Mode)


def write_goldens(checkpoint: Checkpoint, build: Path) -> list[Path]:
    """Compute and write all goldens of a build. Raises BuildError, CheckpointError."""
    spec = matching_spec(checkpoint, build)
    model = rounded_reference(checkpoint, spec.precision)
    golden = _Golden.make(model, spec.precision)
    config = spec.config
    cases: dict[str, tuple[dict[str, str], Arrays]] = {}
    for layer in range(config.num_hidden_layers):
        block = config.block_type(layer)
        metadata = {"graph": block, "layer": str(layer)}
        first = layer in (0, config.first_k_dense_replace)
        for mode in MODES if first else MODES[:1]:
            cases[f"{block}_{layer:03d}_{mode}"] = metadata, golden.block_case(layer, mode)
        if first and block == "moe":
            prefill = cases[f"{block}_{layer:03d}_prefill"][1]
            metadata = {"graph": "experts", "layer": str(layer)}
            cases[f"experts_{layer:03d}"] = metadata, golden.experts_case(layer, prefill)
    cases["head"] = {"graph": "head"}, golden.head_case()
    cases["end_to_end"] = {"graph": "chain"}, golden.end_to_end()
    with tempfile.TemporaryDirectory(dir=build, prefix=".golden_") as folder:
        files = [_write(spec, Path(folder), name, *case) for name, case in cases.items()]
        shutil.rmtree(build / "golden", ignore_errors=True)  # of another version, other cases
        (build / "golden").mkdir()
        return [file.replace(build / "golden" / file.name) for file in files]


def _write(
    spec: BuildSpec, folder: Path, name: str, metadata: dict[str, str], arrays: Arrays
) -> Path:
    path = folder / f"{name}.safetensors"
    numpy = {key: to_numpy(value.detach()) for key, value in arrays.items()}
    write_arrays(path, numpy, spec.file_metadata(name) | metadata)
    return path


def prompt_ids(vocab_size: int, bos: int, length: int) -> Tensor:
    """[1, length]: BOS, then the text's bytes, repeated; within any vocabulary."""
    text = (TEXT.encode() * (length // len(TEXT) + 1))[: length - 1]
    return torch.tensor([[bos, *(byte % vocab_size for byte in text)]])


@dataclass(frozen=True)
class _Golden:
    model: ReferenceModel
    precision: Precision
    prompt: Tensor  # [1, PROMPT_LENGTH]
    logits: Tensor  # [1, PROMPT_LENGTH, vocab]
    taps: list[Taps]  # of the prompt's prefill, by layer

    @classmethod
    def make(cls, model: ReferenceModel, precision: Precision) -> "_Golden":
        config = model.config
        prompt = prompt_ids(config.vocab_size, config.bos_token_id, PROMPT_LENGTH)
        taps: list[Taps] = [{} for _ in range(config.num_hidden_layers)]
        return cls(model, precision, prompt, model(prompt, taps=taps), taps)

    @property
    def activation(self) -> torch.dtype:
        return torch.float32 if self.precision == "fp32" else torch.bfloat16

    def rounded(self, x: Tensor) -> Tensor:
        """As it is after being stored in the activation's type."""
        return x if self.precision == "fp32" else round_bf16(x)

    def block_case(self, layer: int, mode: Mode) -> Arrays:
        """Prefill from nothing; a second chunk; one token each for sequences of unequal lengths."""
        taps = self.taps[layer]
        x = taps["x"]
        rows = self.rounded(torch.cat([taps["c_kv_normed"], taps["k_pe_rotated"]], dim=-1))
        half = PROMPT_LENGTH // 2
        if mode == "prefill":
            return self.run_block(layer, x[:, :half], rows[:, :0], [0], stride=0)
        if mode == "chunk":
            return self.run_block(layer, x[:, half:], rows[:, :half], [half], stride=half)
        lengths = torch.linspace(1, PROMPT_LENGTH - 1, BATCH).int().tolist()
        tokens = torch.cat([x[:, n : n + 1] for n in lengths])
        return self.run_block(layer, tokens, rows.expand(BATCH, -1, -1), lengths, stride=STRIDE)

    def run_block(
        self, layer: int, x_BSD: Tensor, context: Tensor, lengths: Sequence[int], stride: int
    ) -> Arrays:
        """One block on a batch of unequal contexts; the reference runs each sequence alone."""
        config = self.model.config
        batch, new, _ = x_BSD.shape
        block = self.model.block(layer)
        positions = torch.tensor(lengths)[:, None] + torch.arange(new)
        results: list[Taps] = []
        for b, length in enumerate(lengths):
            rows = context[b : b + 1, :length]
            C = config.kv_lora_rank
            cache = LatentRows(rows[..., :C], rows[..., C:])
            tables = self.model.tables(positions[b : b + 1], x_BSD.dtype)
            taps: Taps = {}
            block(x_BSD[b : b + 1], *tables, causal_mask(new, length, x_BSD.dtype), cache, taps)
            results.append(taps)
        padded = torch.zeros(batch, stride, config.cache_width)
        for b, length in enumerate(lengths):
            padded[b, :length] = context[b, :length]
        arrays = {
            "input.x": x_BSD,
            "input.positions": positions,
            "input.mask": _mask(lengths, new, stride).to(self.activation),
            "input.context": padded.to(self.activation),
        }
        arrays |= self.block_outputs(results, isinstance(block.mlp, MoE))
        if isinstance(block.mlp, MoE):
            arrays["bias"] = block.mlp.gate.e_score_correction_bias
        left_out = {"k_nope", "keys", "values"}  # the graphs have none
        if batch > 1:
            left_out |= {"scores", "probabilities"}  # of unequal lengths
        for name in (n for n in results[0] if n not in left_out):
            arrays[f"tap.{name}"] = torch.cat([taps[name] for taps in results])
        return arrays

    def block_outputs(self, results: list[Taps], moe: bool) -> Arrays:
        def whole(name: str) -> Tensor:
            return torch.cat([taps[name] for taps in results])

        new = torch.cat([whole("c_kv_normed"), whole("k_pe_rotated")], dim=-1)
        outputs = {"output.new": new.to(self.activation), "output.y": whole("y")}
        if moe:
            outputs |= {
                "output.acc": (whole("x_mid") + whole("shared")).flatten(0, 1),
                "output.h": whole("h").flatten(0, 1).to(self.activation),
                "output.experts": whole("experts"),
                "output.expert_weights": whole("expert_weights"),
            }
        return outputs

    def experts_case(self, layer: int, prefill: Arrays) -> Arrays:
        """The experts graph on the first experts of the MoE prefill, its last slot unused."""
        h, acc = prefill["output.h"], prefill["output.acc"]
        chosen, weights = prefill["output.experts"], prefill["output.expert_weights"]
        used = torch.unique(chosen).tolist()[: SLOTS - 1]
        moe = self.model.block(layer).mlp
        assert isinstance(moe, MoE)
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
        return arrays

    def head_case(self) -> Arrays:
        return {"input.hidden": self.taps[-1]["y"][0], "output.logits": self.logits[0]}

    def end_to_end(self) -> Arrays:
        """Prefill of the prompt in one step, then greedy decoding; the cache in its own type."""
        caches = self.model.empty_caches(1)
        logits = self.model(self.prompt, caches)
        rows = torch.stack([cache.rows()[0] for cache in caches if isinstance(cache, LatentRows)])
        step, tokens, margins = logits, [], []
        for _ in range(GREEDY_TOKENS):
            best, second = step[0, -1].topk(2).values
            tokens.append(int(step[0, -1].argmax()))
            margins.append(best - second)
            for cache in caches:
                assert isinstance(cache, LatentRows)
                cache.latent_BTC, cache.k_pe_BTR = (
                    self.rounded(cache.latent_BTC),
                    self.rounded(cache.k_pe_BTR),
                )
            step = self.model(torch.tensor([tokens[-1:]]), caches)
        return {
            "prompt_ids": self.prompt[0],
            "logits": logits[0],
            "rows": rows.to(self.activation),
            "tokens": torch.tensor(tokens),
            "margins": torch.stack(margins),
        }


def _mask(lengths: Sequence[int], new: int, stride: int) -> Tensor:
    """[B, stride+new, 1, new], keys-major: query i sees its cached rows and new rows 0 … i."""
    keys = torch.arange(stride + new)[None, :, None]
    queries = torch.arange(new)[None, None, :]
    cached = keys < torch.tensor(lengths)[:, None, None]
    own = (keys >= stride) & (keys - stride <= queries)
    return torch.where(cached | own, 0.0, MASKED)[:, :, None, :]
