"""The Markdown table of compiled engines, from manifests."""

from pathlib import Path

import pytest

from graphs.contract.manifest import Compiler, EngineMode, EngineRecord, Manifest, Profile
from graphs.contract.program import Product, Program
from graphs.contract.spec import GraphName
from graphs.engines.table import engine_table

FP8 = Product(("attention.o",), ("fp8_e4m3", "fp8_e4m3", "float"), in_place=True)
PROGRAMS: dict[EngineMode, Program] = {
    "decode": Program(
        {"function": 17, "fully_connected": 10}, (FP8,), ("attention.o",), 1, 1, False
    ),
    "prefill": Program({"function": 34}, (), ("attention.o",), 1, 1, False),
}


def record(
    size: int,
    decode: int,
    prefill: int | None = 20_000_000,
    programs: dict[EngineMode, Program] = PROGRAMS,
) -> EngineRecord:
    activation: dict[EngineMode, int | None] = {"decode": decode, "prefill": prefill}
    seconds, memory = size / 1e6, size * 10
    return EngineRecord(
        "f", "", size, "", {}, {}, activation, {}, None, programs, "", seconds, memory
    )


def written(
    root: Path,
    model: str,
    target: str,
    engines: dict[GraphName, EngineRecord],
    precision: str = "fp8",
    tokens: int = 128,
    compiler: Compiler = "rtx",
) -> Path:
    manifest = Manifest(compiler, target, Profile(tokens=tokens), engines)
    folder = root / "build" / model / precision / manifest.folder
    folder.mkdir(parents=True)
    manifest.save(folder)
    return folder / "manifest.json"


def test_a_row_per_model_and_engine_and_what_differs_between_targets(tmp_path: Path) -> None:
    big, small = record(4_700_000, 13_600_000), record(300_000, 8_340_000, None, {})
    other = record(4_600_000, 13_600_000)
    paths = [
        written(tmp_path, "one", "sm120", {"dense": big, "head": small}),
        written(tmp_path, "one", "sm89", {"dense": other, "head": small}),
        written(tmp_path, "two", "sm120", {"moe": big}),
    ]
    assert engine_table(paths).splitlines() == [
        "| model | engine | file, MB | activation, decode, MB | activation, prefill, MB "
        "| launches, decode | launches, prefill | FP8 products |",
        "| --- | --- | ---: | ---: | ---: | ---: | ---: | ---: |",
        "| `one` | `dense` | 4.7 (SM89: 4.6) | 13.6 | 20.0 | 27 | 34 | 0 of 1 |",
        "| `one` | `moe` | – | – | – | – | – | – |",
        "| `one` | `experts` | – | – | – | – | – | – |",
        "| `one` | `head` | 0.3 | 8.3 | – | not read | not read | not read |",
        "| `two` | `dense` | – | – | – | – | – | – |",
        "| `two` | `moe` | 4.7 | 13.6 | 20.0 | 27 | 34 | 0 of 1 |",
        "| `two` | `experts` | – | – | – | – | – | – |",
        "| `two` | `head` | – | – | – | – | – | – |",
        "",
        "5 fp8 engines by rtx for SM120, SM89, profile b8t128c4096, each built in at most 4.7 s "
        "and 47 MB of memory.",
    ]


def test_models_with_the_same_figures_share_their_rows(tmp_path: Path) -> None:
    engine = record(4_700_000, 13_600_000)
    paths = [written(tmp_path, model, "sm120", {"dense": engine}) for model in ("one", "two")]
    paths.append(written(tmp_path, "three", "sm120", {"moe": engine}))
    rows = [line for line in engine_table(paths).splitlines() if "4.7 |" in line]
    assert [row.split(" | ")[0] for row in rows] == ["| `one`, `two`", "| `three`"]


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"precision": "bf16"}, "expected one precision, got bf16, fp8"),
        ({"tokens": 64}, "expected one profile, got b8t128c4096, b8t64c4096"),
        ({"compiler": "tensorrt"}, "expected one compiler, got rtx, tensorrt"),
    ],
)
def test_engines_that_cannot_be_compared_are_refused(
    tmp_path: Path, change: dict[str, object], expected: str
) -> None:
    engines: dict[GraphName, EngineRecord] = {"dense": record(1, 1)}
    first = written(tmp_path, "one", "sm120", engines)
    second = written(tmp_path, "two", "sm120", engines, **change)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=expected):
        engine_table([first, second])


def test_what_is_no_manifest_of_a_build_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"path: expected .*manifest\.json, got .*engines\.json"):
        engine_table([tmp_path / "engines.json"])
    with pytest.raises(ValueError, match=r"no manifest\.json; compile again"):
        engine_table([tmp_path / "one" / "fp8" / "rtx" / "manifest.json"])
    with pytest.raises(ValueError, match="no engine in any manifest"):
        engine_table([written(tmp_path, "one", "sm120", {})])
