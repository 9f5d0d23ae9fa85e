"""Train k2-nano, a byte-level model of exactly Kimi K2's architecture, and write its checkpoint.

The model is the fp32 reference (`export.reference`), so nothing is converted: the engines are
checked against the very model that was trained. Hidden matrices are trained with Muon, whose steps
have no outlying directions, the rest with AdamW. Steps are small (2048 tokens), since on this text
their number matters more than their size.

Experts are balanced without an auxiliary loss (DeepSeek-V3 §2.1.2): after each step a correction
bias moves by a fixed amount, down where its expert was chosen more often than the mean, up where
less often. The amount starts at 0.02, twenty times the paper's, and falls to zero with the learning
rate: at a tenth of it nearly every token still chose the same expert after 130 steps.

The text is the King James Bible without the four held-out books, as one stream of BOS book EOS BOS
book EOS …; each pass over it starts at a random phase and is cut into windows that are visited in
random order, each after a BOS. Windows of 256 come first, since they are cheaper. The score is that
of the checkpoint as written, rounded to block FP8 and bf16, not of the weights in memory.
"""

import argparse
import lzma
import math
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from export.checkpoint.open import Checkpoint
from export.reference.block import ReferenceModel
from export.reference.feedforward import Gate
from export.synthetic.write_checkpoint import write_checkpoint, write_indented_json
from graphs.contract.config import ModelConfig, load_raw_config
from graphs.scoring import WINDOW, Scores, scored_logits

SOURCE = Path(__file__).parent / "k2-nano"  # config.json, train.txt.xz, heldout.txt
BOOK_BREAK = "\n\n\n"  # chapters are separated by one blank line, books by two
TOKENS_PER_STEP = 2048
THREADS = 2


@dataclass(frozen=True)
class Recipe:
    """One training run: `short_steps` with windows of 256 tokens, then `long_steps` with 512."""

    seed: int
    short_steps: int = 700
    long_steps: int = 400
    matrix_rate: float = 0.02
    other_rate: float = 0.003
    matrix_decay: float = 0.1
    momentum: float = 0.95
    bias_rate: float = 0.02
    warmup_steps: int = 20

    @property
    def steps(self) -> int:
        return self.short_steps + self.long_steps

    def scale(self, step: int) -> float:
        """Multiplier of the learning rates: warmup, then linear to zero."""
        remaining = (self.steps - step) / max(self.steps - self.warmup_steps, 1)
        return min((step + 1) / self.warmup_steps, remaining)


class Muon(torch.optim.Optimizer):
    """Nesterov momentum, its matrices made orthogonal (Jordan et al. 2024), in fp32.

    torch.optim.Muon rounds to bf16, which CPUs without bf16 units emulate slowly; this one also
    takes matrices of one shape together, such as the experts'.
    """

    def __init__(self, params: list[nn.Parameter], lr: float, momentum: float, decay: float):
        super().__init__(params, {"lr": lr, "momentum": momentum, "decay": decay})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            shapes: dict[torch.Size, list[nn.Parameter]] = {}
            for p in group["params"]:
                if p.grad is not None:
                    shapes.setdefault(p.shape, []).append(p)
            for shape, params in shapes.items():
                directions = []
                for p in params:
                    grad = p.grad
                    assert grad is not None
                    mean = self.state[p].setdefault("mean", torch.zeros_like(p))
                    mean.lerp_(grad, 1 - group["momentum"])
                    directions.append(grad.lerp(mean, group["momentum"]))
                rate = group["lr"] * max(1.0, shape[0] / shape[1]) ** 0.5
                for p, update in zip(params, orthogonal(torch.stack(directions)), strict=True):
                    p.mul_(1 - group["lr"] * group["decay"]).add_(update, alpha=-rate)


def orthogonal(matrices: Tensor) -> Tensor:
    """[n, a, b] with singular values pushed near 1: five Newton-Schulz steps, Muon's quintic."""
    tall = matrices.shape[1] > matrices.shape[2]
    x: Tensor = matrices.mT if tall else matrices
    x = x / (x.norm(dim=(1, 2), keepdim=True) + 1e-7)
    for _ in range(5):
        gram = x @ x.mT
        x = 3.4445 * x + torch.baddbmm(gram, gram, gram, beta=-4.7750, alpha=2.0315) @ x
    return x.mT if tall else x


def initialise(model: ReferenceModel, std: float) -> None:
    """Normal weights with deviation `std`; projections into the residual stream start at zero."""
    for name, p in model.named_parameters():
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            nn.init.zeros_(p)
        elif p.ndim == 2:
            nn.init.normal_(p, std=std)


def training_stream(config: ModelConfig, text: str) -> Tensor:
    """Token ids of all books, each between BOS and EOS."""
    ids: list[int] = []
    for book in text.split(BOOK_BREAK):
        ids += [config.bos_token_id, *book.encode("ascii"), config.eos_token_id[0]]
    return torch.tensor(ids)


def batches(stream: Tensor, bos: int, window: int, generator: torch.Generator) -> Iterator[Tensor]:
    """[TOKENS_PER_STEP / window, window + 1] token ids, each row BOS and then the stream's."""
    rows: list[Tensor] = []
    while True:
        phase = int(torch.randint(window, (1,), generator=generator))
        starts = torch.arange(phase, len(stream) - window, window)
        for start in starts[torch.randperm(len(starts), generator=generator)].tolist():
            rows.append(F.pad(stream[start : start + window], (1, 0), value=bos))
            if len(rows) * window == TOKENS_PER_STEP:
                yield torch.stack(rows)
                rows = []


class Balancer:
    """Counts the experts each gate chooses and moves the gates' correction bias after each step."""

    def __init__(self, model: ReferenceModel) -> None:
        self.loads: dict[Gate, Tensor] = {}
        for module in model.modules():
            if isinstance(module, Gate):
                module.register_forward_hook(self._count)

    def _count(self, gate: Gate, _: object, output: tuple[Tensor, Tensor]) -> None:
        load = torch.bincount(output[0].flatten(), minlength=gate.config.n_routed_experts)
        self.loads[gate] = self.loads.get(gate, 0) + load

    def step(self, rate: float) -> float:
        """Move every bias; returns the largest load in units of the mean one."""
        worst = 0.0
        for gate, load in self.loads.items():
            mean = load.sum() / len(load)
            bias = gate.e_score_correction_bias
            assert bias is not None  # k2-nano has noaux_tc gates
            bias += rate * torch.sign(mean - load)
            worst = max(worst, float(load.max() / mean))
        self.loads.clear()
        return worst


def train(model: ReferenceModel, recipe: Recipe, stream: Tensor) -> None:
    """Train in place, printing progress; the result depends on the recipe and the stream alone."""
    generator = torch.Generator().manual_seed(recipe.seed)
    matrices = [
        p for n, p in model.named_parameters() if n.endswith(("_proj.weight", "mqa.weight"))
    ]
    matrix_ids = {id(p) for p in matrices}
    others = [p for p in model.parameters() if id(p) not in matrix_ids]
    optimizers = (
        Muon(matrices, recipe.matrix_rate, recipe.momentum, recipe.matrix_decay),
        torch.optim.AdamW(others, recipe.other_rate, betas=(0.9, 0.98), weight_decay=0.0),
    )
    rates = (recipe.matrix_rate, recipe.other_rate)
    balancer = Balancer(model)
    bos = model.config.bos_token_id
    sources = [batches(stream, bos, window, generator) for window in (WINDOW // 2, WINDOW)]
    begin, bits = time.monotonic(), math.nan
    for step in range(recipe.steps):
        ids = next(sources[step >= recipe.short_steps])
        loss = F.cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())
        loss.backward()  # type: ignore[no-untyped-call]
        step_bits = loss.item() / math.log(2)
        bits = step_bits if step == 0 else bits + 0.05 * (step_bits - bits)
        for optimizer, rate in zip(optimizers, rates, strict=True):
            for group in optimizer.param_groups:
                group["lr"] = rate * recipe.scale(step)
            optimizer.step()
            optimizer.zero_grad()
        worst = balancer.step(recipe.bias_rate * recipe.scale(step))
        if (step + 1) % 50 == 0:
            seconds = time.monotonic() - begin
            speed = f"{(step + 1) * TOKENS_PER_STEP / seconds:.0f} tokens/s, {seconds:.0f} s"
            load = f"busiest expert {worst:.2f}x"
            print(
                f"step {step + 1}/{recipe.steps}: {bits:.3f} bits/byte, {load}, {speed}", flush=True
            )


@torch.inference_mode()
def bits_per_byte(model: ReferenceModel, text: bytes) -> float:
    """Bits per byte that the model needs for a text, scored by the rule of `graphs.scoring`."""
    scored = scored_logits(
        lambda ids: [model(torch.tensor([ids]))[0].numpy()], text, model.config.bos_token_id
    )
    return Scores.from_logits(scored, len(text)).bits_per_byte


def write(folder: Path, raw: dict[str, Any], model: ReferenceModel) -> None:
    """Write the checkpoint in two shards, and generation_config.json."""
    write_checkpoint(folder, raw, model.state_dict())
    special = {name: raw[name] for name in ("bos_token_id", "eos_token_id")}
    write_indented_json(
        folder / "generation_config.json", special | {"do_sample": True, "temperature": 0.7}
    )


def main(recipe: Recipe, folder: Path) -> None:
    """Train, write the checkpoint to `folder`, and score the checkpoint as written."""
    torch.set_num_threads(THREADS)
    torch.manual_seed(recipe.seed)
    raw = load_raw_config(SOURCE)
    model = ReferenceModel(ModelConfig.from_dict(raw))
    initialise(model, raw["initializer_range"])
    text = lzma.decompress((SOURCE / "train.txt.xz").read_bytes()).decode("ascii")
    train(model, recipe, training_stream(model.config, text))
    write(folder, raw, model)
    heldout = (SOURCE / "heldout.txt").read_bytes()
    xz = 8 * len(lzma.compress(heldout, preset=9)) / len(heldout)
    score = bits_per_byte(Checkpoint.open(folder).reference(), heldout)
    print(f"held out: {score:.4f} bits/byte as written, xz -9 {xz:.4f}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Train k2-nano and write its checkpoint.")
    parser.add_argument("--out", type=Path, required=True, help="folder to write the checkpoint to")
    parser.add_argument("--seed", type=int, default=1, help="seed of weights and batches")
    arguments = parser.parse_args()
    main(Recipe(arguments.seed), arguments.out)
