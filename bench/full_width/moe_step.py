"""One decode step of a MoE layer on the CPU: seconds, memory, and how much of its file it touches.

    python -m bench.full_width.moe_step build/full-size/k2/fp8

The step is the block and its routed experts, for one token on 1,000 cached rows, on ONNX Runtime.
Weights are memory-mapped, so a step should bring in the block's own and the chosen experts', and no
other. Memory is counted in two parts: anonymous (what the step allocates) is sampled while it runs;
of the layer's file, the pages that this process has mapped are counted after it.
"""

import statistics
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

import numpy as np
import typer

from graphs.cli import make_app, run
from graphs.contract.spec import BuildError, BuildSpec, layer_file
from graphs.contract.tensorfile import Array
from runtime.load import load_chain
from runtime.step.chain import Chain
from runtime.step.expert_routing import expert_slots

CACHED = 1000
SAMPLE_SECONDS = 0.002


def anonymous_bytes() -> int:
    """Resident memory of this process that no file backs."""
    lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("RssAnon:")) * 1024


def resident_bytes(file: Path) -> int:
    """Bytes of a mapped file that are resident in this process."""
    total, inside = 0, False
    for line in Path("/proc/self/smaps").read_text(encoding="utf-8").splitlines():
        fields = line.split()
        if "-" in fields[0]:  # a mapping: addresses, permissions, offset, device, inode, path
            inside = fields[-1] == str(file.resolve())
        elif inside and fields[0] == "Rss:":
            total += int(fields[1]) * 1024
    return total


@dataclass
class Peak:
    """The most anonymous memory seen while the block is entered."""

    bytes: int = 0
    _stop: threading.Event = field(default_factory=threading.Event)

    def __enter__(self) -> "Peak":
        self._thread = threading.Thread(target=self._sample)
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._stop.set()
        self._thread.join()

    def _sample(self) -> None:
        while not self._stop.wait(SAMPLE_SECONDS):
            self.bytes = max(self.bytes, anonymous_bytes())


class DecodeStep:
    """One token's way through a MoE layer, on random inputs."""

    def __init__(self, chain: Chain, layer: int) -> None:
        self.chain, self.layer = chain, layer
        c, activation = chain.config, chain.activation
        random = np.random.default_rng(0)
        context = random.standard_normal((1, CACHED, c.cache_width), np.float32)
        self.inputs = {
            "x": random.standard_normal((1, 1, c.hidden_size), np.float32),
            "positions": np.array([[CACHED]]),
            "context": context.astype(activation),
        }
        K = c.num_experts_per_tok
        self.outputs: dict[str, Array] = {
            "acc": np.empty((1, c.hidden_size), np.float32),
            "h": np.empty((1, c.hidden_size), activation),
            "experts": np.empty((1, K), np.int64),
            "expert_weights": np.empty((1, K), np.float32),
            "new": np.empty((1, 1, c.cache_width), activation),
        }

    def run(self) -> list[int]:
        """Run it; returns the experts that the token chose."""
        out, backend = self.outputs, self.chain.backend
        backend.block("moe", self.layer, self.inputs, out)
        valid = np.ones(1, dtype=bool)
        slots = self.chain.spec.slots
        runs = list(expert_slots(out["experts"], out["expert_weights"], valid, slots))
        acc, spare = out["acc"].copy(), np.empty_like(out["acc"])
        y, _ = backend.experts(self.layer, runs, out["h"], acc, spare)
        assert np.isfinite(y).all()
        return sorted(out["experts"][0].tolist())

    def needed_bytes(self, experts: list[int]) -> int:
        """Bytes of the block's own weights and these experts' in the layer's file."""
        tensors = self.chain.weights.layers[self.layer].tensors
        chosen = tuple(f"experts.{expert}." for expert in experts)
        used = [n for n in tensors if n.startswith(chosen) or not n.startswith("experts.")]
        return sum(tensors[name].nbytes for name in used)


app = make_app("Seconds and memory of one MoE decode step on the CPU.")


@app.command()
def main(
    build: Annotated[Path, typer.Argument(help="Build folder, build/MODEL/PRECISION.")],
    runs: Annotated[int, typer.Option(min=1, help="Runs after the first.")] = 5,
    threads: Annotated[int, typer.Option(help="ONNX Runtime's; 0: one per core.")] = 0,
) -> None:
    """Measure it on the first MoE layer of a build."""
    config = BuildSpec.load(build).config
    if not config.count("moe"):
        raise BuildError(f"{build}: expected a model with a MoE layer, got dense layers only")
    layer = config.first_k_dense_replace
    step = DecodeStep(load_chain(build, cache=64, threads=threads), layer)
    before = anonymous_bytes()
    with Peak() as peak:
        seconds = []
        for _ in range(runs + 1):
            start = time.perf_counter()
            experts = step.run()
            seconds.append(time.perf_counter() - start)
    file = build / layer_file(layer)
    size, resident, needed = file.stat().st_size, resident_bytes(file), step.needed_bytes(experts)
    print(f"layer {layer}, 1 token on {CACHED} cached rows, experts {experts}")
    print(f"first run            {seconds[0]:.2f} s")
    print(f"median of {runs}          {statistics.median(seconds[1:]):.2f} s")
    print(f"anonymous memory     {peak.bytes / 1e9:.2f} GB at most, {before / 1e9:.2f} GB before")
    print(f"layer's file         {size / 1e9:.2f} GB")
    print(f"resident part        {resident / 1e9:.3f} GB, {resident / size:.1%}")
    print(f"weights of the step  {needed / 1e9:.3f} GB: the block's and {len(experts)} experts'")


if __name__ == "__main__":
    run(app)
