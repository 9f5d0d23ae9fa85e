"""Goldens: what the torch reference computes for fixed inputs, replayed by `parity` on any backend.

    golden/<block>_<layer>_<mode>.safetensors   input.*, output.*, tap.* of one layer's block: every
                                                layer's prefill; chunk and decode of the first
                                                layer of each type
    golden/experts_<layer>_<mode>_<n>.safetensors  the experts that these cases of the first MoE
                                                layer choose, one file per run of the experts graph
    golden/head.safetensors
    golden/end_to_end.safetensors               prompt_ids, logits of every position, cache rows of
                                                all layers, the greedy tokens that follow, and the
                                                lead of each one's logit over the second best

Inputs are hidden states and cache rows of the model itself, on a fixed text, rounded to the graph's
input types before the reference reads them. Taps are in the checkpoint's layout.

Cases have tens of rows because of fp8: where an activation lies on the border of two e4m3 values,
summation order decides, and one such flip moves its whole row by some thousandths in a model as
narrow as k2-nano. The relative RMS over 32 rows tells that from an error; over 3 rows it would not.
Flips add up from layer to layer, so every layer is also replayed with the reference's input.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from export.checkpoint.open import Checkpoint
from export.engine.layers import LinearForm
from export.golden.block import Arrays, BlockGolden, GoldenCase, as_stored, write_cases
from export.golden.rounded import rounded_reference
from export.packing.pack import matching_spec
from export.reference.attention import LatentRows, Taps
from export.reference.block import ReferenceModel
from graphs.contract.spec import GOLDEN_MODES, GoldenMode, Precision

TEXT = "And it came to pass in those days, that a man of the hill country went up to the gate."
PROMPT_LENGTH = 96
BATCH = 32  # sequences of the decode case; the docstring says why so many
GREEDY_TOKENS = 64
STRIDE = 128  # rows between two sequences of a batch, as the runtime's cache lays them out


def write_goldens(checkpoint: Checkpoint, build: Path) -> list[Path]:
    """Compute and write all goldens of a build, with the whole model in memory.

    Raises BuildError, CheckpointError.
    """
    spec = matching_spec(checkpoint, build)
    model = rounded_reference(checkpoint, spec.precision)
    return write_cases(spec, build, _Golden.make(checkpoint, model, spec.precision).cases())


def prompt_ids(vocab_size: int, bos: int, length: int) -> Tensor:
    """Token ids [1, length]: BOS, then the text's bytes, repeated, modulo the vocabulary."""
    text = (TEXT.encode() * (length // len(TEXT) + 1))[: length - 1]
    return torch.tensor([[bos, *(byte % vocab_size for byte in text)]])


@dataclass(frozen=True)
class _Golden:
    checkpoint: Checkpoint
    model: ReferenceModel
    precision: Precision
    prompt: Tensor  # [1, PROMPT_LENGTH]
    logits: Tensor  # [1, PROMPT_LENGTH, vocab]
    taps: list[Taps]  # by layer, from the prompt's prefill

    @classmethod
    def make(cls, checkpoint: Checkpoint, model: ReferenceModel, precision: Precision) -> "_Golden":
        config = model.config
        prompt = prompt_ids(config.vocab_size, config.bos_token_id, PROMPT_LENGTH)
        taps: list[Taps] = [{} for _ in range(config.num_hidden_layers)]
        return cls(checkpoint, model, precision, prompt, model(prompt, taps=taps), taps)

    def cases(self) -> Iterator[GoldenCase]:
        config = self.model.config
        for layer in range(config.num_hidden_layers):
            block, tables = self.model.block(layer), (self.model.cos, self.model.sin)
            golden = BlockGolden(self.checkpoint, block, layer, self.precision, *tables)
            first = layer in (0, config.first_k_dense_replace)
            cases = [
                self.block_case(golden, mode)
                for mode in (GOLDEN_MODES if first else GOLDEN_MODES[:1])
            ]
            yield from cases
            if first and config.block_type(layer) == "moe":
                for mode, case in zip(GOLDEN_MODES, cases, strict=True):
                    yield from golden.experts_cases(mode, case.arrays)
        yield GoldenCase("head", {"graph": "head"}, self.head_case())
        yield GoldenCase("end_to_end", {"graph": "chain"}, self.end_to_end())

    def block_case(self, golden: BlockGolden, mode: GoldenMode) -> GoldenCase:
        """A prefill with nothing cached; a second chunk; or one token each on unequal lengths."""
        taps = self.taps[golden.layer]
        x = taps["x"]
        rows = torch.cat([taps["c_kv_normed"], taps["k_pe_rotated"]], dim=-1)
        rows = as_stored(rows, self.precision)
        half = PROMPT_LENGTH // 2
        if mode == "prefill":
            return golden.case(mode, x[:, :half], rows[:, :0], [0], stride=0)
        if mode == "chunk":
            return golden.case(mode, x[:, half:], rows[:, :half], [half], stride=half)
        lengths = torch.linspace(1, PROMPT_LENGTH - 1, BATCH).int().tolist()
        tokens = torch.cat([x[:, n : n + 1] for n in lengths])
        return golden.case(mode, tokens, rows.expand(BATCH, -1, -1), lengths, stride=STRIDE)

    def head_case(self) -> Arrays:
        return {"input.hidden": self.taps[-1]["y"][0], "output.logits": self.logits[0]}

    def end_to_end(self) -> Arrays:
        """Prefill of the prompt in one step, then greedy decoding on rows rounded as stored."""
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
                    as_stored(cache.latent_BTC, self.precision),
                    as_stored(cache.k_pe_BTR, self.precision),
                )
            step = self.model(torch.tensor([tokens[-1:]]), caches)
        return {
            "prompt_ids": self.prompt[0],
            "logits": logits[0],
            "rows": rows.to(LinearForm.from_precision(self.precision).activation),
            "tokens": torch.tensor(tokens),
            "margins": torch.stack(margins),
        }
