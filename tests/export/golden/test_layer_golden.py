"""Single layers: equal to those of the whole model, with goldens that pass, and fail on a fault."""

import functools
import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from export.checkpoint.open import Checkpoint
from export.checkpoint.shards import CheckpointError
from export.checkpoint.tensor_names import is_routed
from export.golden.layer import CACHED, PREFILL, STRIDE, write_layer_goldens
from export.golden.rounded import rounded_block, rounded_head, rounded_reference
from export.packing.pack import pack
from export.reference.attention import LatentRows, Taps, causal_mask
from export.reference.block import Block
from export.reference.rope import rope_tables
from export.synthetic.make import write_synthetic
from graphs.contract.config import ModelConfig, load_raw_config
from graphs.contract.spec import BuildSpec, Precision, layer_file
from graphs.contract.tensorfile import Array, TensorFile
from graphs.ops import MASKED
from graphs.parity.graphs import graph_parity
from graphs.parity.replay import golden_inputs
from runtime import parity
from runtime.load import load_chain
from runtime.parity import runtime_parity
from runtime.step.expert_routing import expert_slots
from tests.support.builds import NANO
from tests.support.helpers import INT4
from tests.support.shared_builds import export_once

ROOT = Path(__file__).parents[3]
RAW = load_raw_config(NANO) | {"num_hidden_layers": 2}
FORMS = {
    "fp8": RAW,
    "int4": RAW | {"quantization_config": INT4},
    "bf16": RAW | {"quantization_config": None},
}
MOE = 1  # the layer
MODES = ("prefill", "decode")
Build = Callable[[Precision], Path]


def synthetic(folder: Path, raw: dict[str, Any]) -> Checkpoint:
    write_synthetic(raw, folder, 0, lambda name, done, total: None, shard_bytes=300_000)
    return Checkpoint.open(folder)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    return synthetic(tmp_path_factory.mktemp("layers") / "checkpoint", RAW)


@pytest.fixture(scope="module")
def builds(checkpoint: Checkpoint, tmp_path_factory: pytest.TempPathFactory) -> Build:
    """Builds with goldens of single layers. Tests do not change them."""

    @functools.cache
    def make(precision: Precision) -> Path:
        build = tmp_path_factory.mktemp("builds") / precision
        export_once(checkpoint.raw_config, precision, build)
        pack(checkpoint, build)
        write_layer_goldens(checkpoint, build)
        return build

    return make


@pytest.fixture(params=["fp32", pytest.param("fp8", marks=pytest.mark.slow)])
def build(request: pytest.FixtureRequest, builds: Build) -> Path:
    return builds(request.param)


def edit(file: Path, name: str, change: Callable[[Array], None]) -> None:
    """Change the bytes of one tensor of a safetensors file in place."""
    with file.open("rb") as opened:
        size = int.from_bytes(opened.read(8), "little")
        begin, end = json.loads(opened.read(size))[name]["data_offsets"]
    octets = np.memmap(file, np.uint8, "r+", 8 + size + begin, (end - begin,))
    change(octets)
    octets.flush()


def poison(octets: Array) -> None:
    """NaN, as e4m3 and as fp32."""
    octets[:] = 0xFF


def run_block(block: Block, config: ModelConfig, tokens: int) -> Taps:
    x = torch.randn(1, tokens, config.hidden_size, generator=torch.Generator().manual_seed(5))
    cos, sin = (table[None, :tokens] for table in rope_tables(config))
    taps: Taps = {}
    cache = LatentRows.empty(config, 1, torch.float32)
    block(x, cos, sin, causal_mask(tokens, 0, torch.float32), cache, taps)
    return taps


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("precision", ["fp32", "fp8"])
def test_a_layer_alone_is_that_of_the_whole_model_bit_for_bit(
    form: str, precision: Precision, tmp_path: Path
) -> None:
    checkpoint = synthetic(tmp_path, FORMS[form])
    config, whole = checkpoint.config, rounded_reference(checkpoint, precision)
    for layer in range(config.num_hidden_layers):
        alone = run_block(rounded_block(checkpoint, layer, precision), config, 6)
        within = run_block(whole.block(layer), config, 6)
        assert alone.keys() == within.keys()
        assert [name for name in alone if not torch.equal(alone[name], within[name])] == []
    hidden = torch.randn(3, config.hidden_size, generator=torch.Generator().manual_seed(6))
    expected = whole.lm_head(whole.model.norm(hidden))
    assert torch.equal(rounded_head(checkpoint, precision)(hidden), expected)


def test_the_reference_reads_the_chosen_experts_only(
    checkpoint: Checkpoint, tmp_path: Path
) -> None:
    expected = run_block(rounded_block(checkpoint, MOE, "fp8"), checkpoint.config, 1)
    chosen = expected["experts"].flatten().tolist()
    folder = Path(shutil.copytree(checkpoint.folder, tmp_path / "poisoned"))

    for name, stored in checkpoint.stored.items():
        spared = any(f".experts.{expert}." in name for expert in chosen)
        if is_routed(name) and name.endswith("weight") and not spared:
            edit(folder / stored.shard.name, name, poison)
    poisoned = Checkpoint.open(folder)
    taps = run_block(rounded_block(poisoned, MOE, "fp8"), checkpoint.config, 1)
    assert all(torch.equal(taps[name], expected[name]) for name in expected)
    with pytest.raises(CheckpointError, match=r"mlp\.experts\..*NaN"):
        rounded_reference(poisoned, "fp8")


def test_each_graph_and_block_is_within_its_bar(build: Path) -> None:
    graphs = graph_parity(build, threads=1).rows
    blocks = runtime_parity(load_chain(build, threads=1), build).rows
    modes = {f"{block}_{mode}" for block in ("dense_000", "moe_001") for mode in MODES}
    assert {row.case for row in graphs} == {*modes, "experts_001_prefill_0", "head"}
    fp8 = BuildSpec.load(build).precision == "fp8"
    fed = {row.case for row in graphs if row.fed}
    assert fed == ({*modes, "experts_001_prefill_0"} if fp8 else set())
    assert {row.case for row in blocks} == modes
    fed = {row.case for row in blocks if row.fed}  # the routed experts, at any precision
    assert fed == {f"moe_001_{mode}" for mode in MODES}
    assert [row for row in graphs + blocks if not row.passed] == []
    routing = [row.remark for row in graphs + blocks if row.tap == "experts"]
    assert {remark.split(",")[0] for remark in routing} == {"same experts"} and len(routing) >= 4


def test_a_build_without_an_end_to_end_golden_says_so(build: Path) -> None:
    (reason,) = runtime_parity(load_chain(build, threads=1), build).not_run
    assert reason.startswith("end_to_end") and "the chain was not compared" in reason
    command = [sys.executable, "-m", "runtime", "parity", str(build), "--threads", "2"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0 and reason in done.stdout and "nan" not in done.stdout


def test_a_decode_golden_has_a_thousand_rows_and_the_rest_masked(build: Path) -> None:
    for block in ("dense_000", "moe_001"):
        golden = TensorFile.open(build / "golden" / f"{block}_decode.safetensors")
        context, scores = golden["input.context"], golden["tap.scores"]
        assert context.shape[:2] == (1, STRIDE) and scores.shape[2:] == (1, STRIDE + 1)
        seen = scores[0, 0, 0] > MASKED / 2
        assert seen.sum() == CACHED + 1 and seen[:CACHED].all() and seen[-1]
        rows = context.astype(np.float32)[0, :CACHED]
        assert rows.std() == pytest.approx(1, abs=0.05) and golden["input.positions"] == [[CACHED]]
        prefill = TensorFile.open(build / "golden" / f"{block}_prefill.safetensors")
        assert prefill["input.x"].shape[1] == PREFILL["dense" if "dense" in block else "moe"]
        assert prefill["input.x"].std() == pytest.approx(1, abs=0.05)


def first_used(build: Path) -> int:
    return int(
        TensorFile.open(build / "golden" / "experts_001_prefill_0.safetensors")["slot_experts"][0]
    )


@pytest.fixture
def unverified(monkeypatch: pytest.MonkeyPatch) -> None:
    """Weight files are loaded without checking their checksums, as large ones are."""
    monkeypatch.setattr("runtime.devices.weights.VERIFIED_BELOW", 0)


@pytest.mark.usefixtures("unverified")
def test_one_changed_byte_of_an_expert_fails(build: Path, tmp_path: Path) -> None:
    copy = Path(shutil.copytree(build, tmp_path / "copy"))
    expert = first_used(build)

    def flip_sign(octets: Array) -> None:
        """Flip the sign of the largest weight."""
        if BuildSpec.load(copy).precision == "fp8":
            octets[np.argmax(octets & 0x7F)] ^= 0x80
        else:
            octets[4 * np.argmax(np.abs(octets.view(np.float32))) + 3] ^= 0x80

    edit(copy / layer_file(MOE), f"experts.{expert}.down.weight", flip_sign)
    failed = {row.case for row in graph_parity(copy, threads=1).rows if not row.passed}
    assert failed == {"experts_001_prefill_0"}
    rows = runtime_parity(load_chain(copy, threads=1), copy).rows
    failed = {row.case for row in rows if row.fed and not row.passed}
    assert "moe_001_prefill" in failed
    assert all(row.passed for row in rows if row.graph == "dense")


def decode(build: Path) -> tuple[Array, set[int]]:
    """The MoE decode golden's step, its result and the experts that it chose."""
    golden = TensorFile.open(build / "golden" / "moe_001_decode.safetensors")
    chain = load_chain(build, threads=1)
    names = [t.name for t in chain.spec.graphs["moe"].outputs]
    out = {name: np.empty_like(golden[f"output.{name}"]) for name in names}
    parity.run_block(chain, "moe", MOE, golden_inputs(golden), out)
    valid = np.ones(len(out["h"]), dtype=bool)
    groups = list(expert_slots(out["experts"], out["expert_weights"], valid, chain.spec.slots))
    y = parity.run_experts(chain, MOE, groups, out["h"], out["acc"])
    return y, set(out["experts"].flatten().tolist())


@pytest.mark.usefixtures("unverified")
def test_a_step_touches_the_chosen_experts_only(build: Path, tmp_path: Path) -> None:
    expected, chosen = decode(build)
    copy = Path(shutil.copytree(build, tmp_path / "copy"))
    file = copy / layer_file(MOE)

    poisoned = set()
    for name in TensorFile.open(file).tensors:
        if name.startswith("experts.") and int(name.split(".")[1]) not in chosen:
            edit(file, name, poison)
            poisoned.add(int(name.split(".")[1]))
    assert poisoned | chosen == set(range(8)) and poisoned
    y, _ = decode(copy)
    assert np.array_equal(y, expected) and np.isfinite(y).all()
    edit(file, f"experts.{min(chosen)}.down.weight", poison)
    assert not np.array_equal(decode(copy)[0], expected)


def export(*arguments: str | Path) -> list[Path]:
    """The files that a command line lists."""
    command = [sys.executable, "-m", "export", *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    files = [Path(line) for line in done.stdout.splitlines()]
    assert files and all(f.is_file() for f in files)
    return files


@pytest.mark.slow
def test_the_command_line_writes_a_checkpoint_of_the_given_size(tmp_path: Path) -> None:
    config = tmp_path / "config.json"
    config.write_text(json.dumps(RAW), encoding="utf-8")
    sizes = ("--layers", "3", "--dense", "0", "--vocab", "128", "--seed", "3")
    export("synthetic", "--preset", config, "--out", tmp_path / "c", *sizes)
    made = Checkpoint.open(tmp_path / "c").config
    assert (made.count("moe"), made.count("dense"), made.vocab_size) == (3, 0, 128)
    assert made.eos_token_id == (127,)


@pytest.mark.slow
def test_the_command_line_writes_goldens_of_layers_only(
    checkpoint: Checkpoint, build: Path, tmp_path: Path
) -> None:
    (tmp_path / "golden").mkdir()
    (tmp_path / "golden" / "end_to_end.safetensors").touch()  # from an earlier version
    shutil.copy(build / "spec.json", tmp_path)
    arguments = ("--checkpoint", checkpoint.folder, "--out", tmp_path, "--blocks-only")
    goldens = export("golden", *arguments)
    assert {path.name for path in goldens} == {p.name for p in (build / "golden").iterdir()}
    assert {path.name for path in goldens} == {p.name for p in (tmp_path / "golden").iterdir()}
    for path in goldens:
        assert path.read_bytes() == (build / "golden" / path.name).read_bytes()
