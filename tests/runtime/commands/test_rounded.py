"""`--rounded`: a build whose bf16 values are rounded on the CPU as in an engine."""

from pathlib import Path

from typer.testing import CliRunner

from runtime.__main__ import app
from tests.support.builds import NANO, Build


def invoke(*arguments: str | Path) -> str:
    done = CliRunner().invoke(app, [*map(str, arguments), "--threads", "1"])
    assert done.exit_code == 0, done.output
    return done.output


def test_parity_prints_the_distance_of_each_block_and_saves_no_finding(nano: Build) -> None:
    build = nano("fp8")
    before = {path: path.stat().st_mtime_ns for path in build.rglob("*")}
    table = invoke("parity", build, "--rounded")
    assert "fp8, rounded as an engine: distance from the reference" in table
    rows = [line.split("│")[1:-1] for line in table.splitlines() if line.startswith("│")]
    distances = {tuple(cell.strip() for cell in row[:3]): float(row[3]) for row in rows}
    for layer in range(4):
        case = f"{'moe' if layer else 'dense'}_{layer:03d}_prefill"
        assert 1e-3 < distances[case, str(layer), "y"] < 5e-2
    assert 1e-3 < distances["end_to_end", "", "logits"] < 5e-2
    assert {path: path.stat().st_mtime_ns for path in build.rglob("*")} == before


def test_evaluate_scores_the_rounded_values(nano: Build, tmp_path: Path) -> None:
    text = tmp_path / "text"
    text.write_bytes((NANO / "heldout.txt").read_bytes()[:700])
    scores = tmp_path / "scores.safetensors"
    invoke("evaluate", nano("fp8"), "--text", text, "--out", scores)
    printed = invoke("evaluate", nano("fp8"), "--text", text, "--rounded", "--against", scores)
    assert "bits per byte" in printed and "+0.000%" not in printed
