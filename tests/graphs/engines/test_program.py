"""The program inside an engine's file: small texts of its form, and engines with planted faults."""

import functools
import multiprocessing
import shutil
from pathlib import Path
from typing import Any
from unittest import mock

import onnx
import pytest
from typer.testing import CliRunner

from graphs.__main__ import app
from graphs.contract.config import load_raw_config
from graphs.contract.manifest import ENGINE_MODES, Manifest, Profile
from graphs.contract.program import Product, Program
from graphs.contract.shapes import CompileError, input_bounds
from graphs.contract.spec import BuildSpec
from graphs.engines import tensorrt
from graphs.engines.compile import compile_build
from graphs.engines.program import LinearLayers, ProgramTextError, read_programs
from graphs.passes.inline import inline
from tests.support.builds import NANO
from tests.support.graph_surgery import change_body, replace_graph
from tests.support.shared_builds import shared_graphs

LAYERS = LinearLayers(
    {"Gemm_7": "attention.o.weight", "MatMul_9": "attention.w_uk", "Gemm_12": "lm_head.weight"},
    ("attention.o",),
)
FP8 = ("fp8_e4m3", "fp8_e4m3", "float")
BF16 = ("bf16", "bf16", "bf16")

HEADER = """header {{
  version = {version}
  n_streams = {streams}
  n_events = {events}
{region}  tf32={tf32}
}}
"""


def product(result: str, x: str, weight: str, *nodes: str) -> str:
    layers = "".join(f"[ONNX Layer: {node}]" for node in nodes)
    return (
        f'  fully_connected={{ name="{nodes[0]}" output={{"{result}" }} input={{"{x}" "{weight}" '
        f'"a" }} stream=0 layers="{layers}" }}\n'
    )


# The weight of the first product is a view of a bound one; that of the second is a copy.
PROGRAM = f"""descriptors {{
  tensor={{ dims={{ 8 4 }} name="x.1" offset=0 strides={{ 4 1 }} type=fp8_e4m3 }}
  tensor={{ dims={{ 8 6 }} name="y.1" offset=0 strides={{ 6 1 }} type=float }}
  tensor={{ dims={{ 6 4 }} name="attention.o.weight.1" strides={{ 4 1 }} type=fp8_e4m3 }}
  tensor={{ dims={{ 8 6 }} name="q" offset=0 strides={{ 6 1 }} type=bf16 }}
  tensor={{ dims={{ 8 6 }} name="copy" offset=0 strides={{ 6 1 }} type=bf16 }}
  sub_tensor={{ base="attention.o.weight.1" dims={{ 4 6 }} name="w^deref" type=fp8_e4m3 }}
}}
main {{
 label bb1:
  shape_call={{ name="s" stream=0  layers="" subg_id=0 }}
  function={{ name=__myl_Mul args={{ "x.1" }} stream=0 layers="[ONNX Layer: Mul_2]" }}
{product("y.1", "x.1", "w^deref", "Gemm_7", "DequantizeLinear_5")}\
  signal={{ name="e" stream=0 event=1 layers="" }}
{product("q", "q", "copy", "MatMul_9")}{product("q", "q", "q", "MatMul_10")}}}
"""
FUSION = f"""descriptors {{
  tensor={{ dims={{ 8 4 }} name="h.1" offset=0 strides={{ 4 1 }} type=bf16 }}
  tensor={{ dims={{ 6 4 }} name="lm_head.weight.1__mye2" offset=0 strides={{ 4 1 }} type=bf16 }}
}}
main {{
 label bb1:
{product("h.1", "h.1", "lm_head.weight.1__mye2", "Gemm_12")}\
  cast={{ name="Cast_13" output={{"h.1" }} input={{"h.1" }} stream=0  layers="" }}
}}
"""
REGION = "  region = { name=runtime-fusion-consts size=132 type=system }\n"
LAUNCHED_FUSION = (
    '  runtime_fusion={ name=__myl_FcCast stream=0 layers="[ONNX Layer: Gemm_12]" backbone=gemm }\n'
)


def header(version: int = 5, streams: int = 1, events: int = 1, tf32: int = 0) -> str:
    return HEADER.format(version=version, streams=streams, events=events, tf32=tf32, region="")


def engine(*texts: str) -> bytes:
    """Texts as they lie in an engine's file: among other bytes, each ended by one of zero."""
    return b"ptrt\0\1" + b"\0\xff{\n".join(text.encode() for text in texts) + b"\0\2main {\n"


def second_profile(program: str) -> str:
    return program.replace('"x.1"', '"x [profile 1].1"').replace(
        '"attention.o.weight.1"', '"attention.o.weight [profile 1].1"'
    )


def test_a_program_of_each_profile_with_its_fusions() -> None:
    launching = PROGRAM.replace("main {\n label bb1:\n", "main {\n label bb1:\n" + LAUNCHED_FUSION)
    fusion = HEADER.format(version=4, streams=1, events=0, tf32=0, region=REGION) + FUSION
    texts = (
        header() + launching + "shape_main {\n  mul={ name=m }\n}\n",
        fusion,
        header(streams=2, events=6, tf32=1) + second_profile(PROGRAM),
    )
    decode, prefill = read_programs(engine(*texts), LAYERS, 2)
    products = (
        Product(("attention.o",), FP8, in_place=True),
        Product(("attention.w_uk",), BF16, in_place=False),
        Product(("MatMul_10",), BF16, in_place=False),
    )
    head = Product(("lm_head",), BF16, in_place=True)
    launches = {"fully_connected": 3, "function": 1}
    assert decode == Program(
        launches | {"runtime_fusion": 1}, (*products, head), ("attention.o",), 1, 1, False
    )
    assert prefill == Program(launches, products, ("attention.o",), 2, 6, True)
    assert (decode.launch_count, prefill.launch_count) == (5, 4)
    assert (decode.fp8_products, decode.faults()) == (1, [])
    assert prefill.faults() == [
        "expected fp32 products in fp32, got TF32",
        "expected 1 stream, got 2",
    ]


@pytest.mark.parametrize("types", [BF16, ("fp8_e4m3", "bf16", "float"), (*FP8[:2], "bf16")])
def test_an_fp8_layer_that_is_no_fp8_product_is_named(types: tuple[str, str, str]) -> None:
    products = (Product(("attention.o",), types, in_place=False),)
    program = Program({}, products, ("attention.o", "mlp.down"), 1, 0, tf32=False)
    assert program.fp8_products == 0
    assert program.faults() == [
        f"attention.o: expected fp8_e4m3 × fp8_e4m3 → float, got {types[0]} × {types[1]} → "
        f"{types[2]}",
        "mlp.down: expected an FP8 product, got none",
    ]


def test_a_layer_that_is_an_fp8_product_and_another_one_too_is_named() -> None:
    products = [Product(("attention.o",), types, in_place=True) for types in (BF16, FP8)]
    for order in (products, products[::-1]):
        program = Program({}, tuple(order), ("attention.o",), 1, 0, tf32=False)
        assert program.fp8_products == 0
        assert program.faults() == [
            "attention.o: expected fp8_e4m3 × fp8_e4m3 → float, got bf16 × bf16 → bf16"
        ]


@pytest.mark.parametrize(
    ("texts", "message"),
    [
        ([], "expected programs of 1 profiles, got those of \\[\\]"),
        ([header(version=6) + PROGRAM], "expected a program of version 5, got 6"),
        ([header() + PROGRAM] * 2, "expected programs of 1 profiles, got those of \\[0, 0\\]"),
        ([header() + second_profile(PROGRAM)], "got those of \\[1\\]"),
        ([header()], "no descriptors and main"),
        (
            [header() + PROGRAM.replace(" label bb1:\n", LAUNCHED_FUSION)],
            "expected 1 fusions, got 0",
        ),
        ([header().replace("  tf32=0\n", "") + PROGRAM], "expected a flag tf32, got none"),
        ([header() + PROGRAM.replace(' name="q"', ' name="r"')], "without a type: 'q'"),
        ([header() + PROGRAM.replace("input={", "in={")], "a product without operands"),
        (
            [HEADER.format(version=4, streams=1, events=0, tf32=0, region=REGION) + FUSION],
            "a fusion before any program",
        ),
    ],
)
def test_a_text_of_another_form_is_not_read(texts: list[str], message: str) -> None:
    with pytest.raises(ProgramTextError, match=message):
        read_programs(engine(*texts), LAYERS, 1)


def build_with_defaults(content: bytes, shapes: list[Any], path: Path) -> None:
    """An engine as Polygraphy configures it, in a process of its own."""

    def config(_trt: Any, _backend: Any, _compiler: str, capability: tuple[int, int]) -> Any:
        from polygraphy.backend.tensorrt_rtx import CreateConfigRTX

        return functools.partial(CreateConfigRTX, compute_capabilities=[capability])

    with mock.patch.object(tensorrt, "_config", config):
        built = tensorrt.build_engine(content, shapes, "rtx", (12, 0), lambda *_: None)
    path.write_bytes(built.data)


@pytest.fixture(scope="module")
def wide() -> Path:
    """The graphs of K2, not to be changed."""
    return shared_graphs(load_raw_config("k2"), "fp8")


@pytest.mark.slow
def test_tf32_and_a_second_stream_are_seen(wide: Path, tmp_path: Path) -> None:
    """Polygraphy leaves TF32 on, and TensorRT takes two streams for a prefill step."""
    spec, model = BuildSpec.load(wide), onnx.load(wide / "onnx" / "dense.onnx")
    shapes = [input_bounds(spec.graphs["dense"], mode, Profile()) for mode in ENGINE_MODES]
    content, path = inline(model).SerializeToString(), tmp_path / "dense.engine"
    child = multiprocessing.get_context("spawn").Process(
        target=build_with_defaults, args=(content, shapes, path)
    )
    child.start()
    child.join()
    assert child.exitcode == 0
    layers = LinearLayers.from_model(model)
    decode, prefill = read_programs(path.read_bytes(), layers, len(ENGINE_MODES))
    tf32 = "expected fp32 products in fp32, got TF32"
    assert decode.faults() == [tf32]
    assert prefill.faults() == [tf32, "expected 1 stream, got 2"]


@pytest.mark.slow
def test_a_scale_per_channel_in_the_weights_dequantisation_is_refused(
    wide: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The form of before, which lint would refuse: TensorRT multiplies it in bf16."""
    build = Path(shutil.copytree(wide, tmp_path / "fp8"))
    model = onnx.load(build / "onnx" / "dense.onnx")
    change_body(
        model,
        "FP8Linear",
        (
            "x_e4m3 = DequantizeLinear<output_dtype = 1>",
            "x_e4m3 = DequantizeLinear<output_dtype = 16>",
        ),
        (
            "DequantizeLinear<output_dtype = 1>(weight, one)",
            "DequantizeLinear<axis = 0, output_dtype = 16>(weight, scale)",
        ),
        ("product = Gemm", "narrow = Gemm"),
        ("by_row = Mul(product", "product = Cast<to = 1>(narrow)\nby_row = Mul(product"),
        ("by_channel = Mul(by_row, scale)", "by_channel = Identity(by_row)"),
    )
    replace_graph(build, "dense", model.SerializeToString())
    monkeypatch.setattr("graphs.engines.compile.lint_model", lambda *_: [])
    bf16 = "expected fp8_e4m3 × fp8_e4m3 → float, got bf16 × bf16 → "
    with pytest.raises(CompileError) as error:
        compile_build(build, "sm120", graphs=["dense"])
    for layer in ("attention.qkv_a", "attention.q_b", "attention.o", "mlp.gate_up", "mlp.down"):
        assert f"{layer}: {bf16}" in str(error.value)
    assert str(error.value).startswith("dense: decode, as compiled: ")
    assert not list(build.glob("rtx-*"))


@pytest.mark.slow
def test_an_engine_whose_text_cannot_be_read_is_kept_and_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    build = Path(shutil.copytree(shared_graphs(load_raw_config(NANO), "fp8"), tmp_path / "fp8"))

    def refuse(*_: object) -> None:
        raise ProgramTextError("expected a program of version 5, got 6")

    monkeypatch.setattr("graphs.engines.compile.read_programs", refuse)
    result = CliRunner().invoke(
        app, ["compile", str(build), "--target", "sm120", "--graph", "head"]
    )
    assert result.exit_code == 0, result.output
    record = Manifest.load(next(build.glob("rtx-*"))).engines["head"]
    version = record.versions["tensorrt_rtx"]
    why = f"not read: tensorrt_rtx {version}: expected a program of version 5, got 6"
    assert (record.programs, record.not_read) == ({}, why)
    assert (record.launches("decode"), record.fp8_products) == ("not read", "not read")
    assert f"warning: head: {why}" in result.output.splitlines()
