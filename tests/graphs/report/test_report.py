"""The parity report: what it says, that it says so in every form, and that it asks no network."""

import json
import math
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from graphs.__main__ import app
from graphs.contract.spec import GRAPHS, BuildError, BuildSpec, GraphSpec, Precision, config_hash
from graphs.parity.findings import (
    FindingsSource,
    FP8Stats,
    Fragment,
    Hint,
    RangeWarning,
    RoutingRecord,
    TapComparison,
    Tie,
    first_bad,
    fragment_path,
)
from graphs.report.error_plots import tap_figures
from graphs.report.merge import BuildFindings, merge
from graphs.report.page import page, save_page
from graphs.report.svg import Axis, Point, Series, log_chart
from graphs.report.terminal import failures
from graphs.report.wording import limit_text, number, share
from tests.support.helpers import tiny_config
from tests.support.make_tree import MakeTree

ROOT = Path(__file__).parents[3]


def row(tap: str = "y", order: int = 0, error: float = 1e-4, **changes: Any) -> TapComparison:
    """A comparison of layer 1's prefill, held to a relative RMS of 2e-3."""
    values: dict[str, Any] = {
        "case": "moe_001_prefill",
        "graph": "moe",
        "layer": 1,
        "mode": "prefill",
        "tap": tap,
        "symbol": tap,
        "order": order,
        "kind": "tap",
        "fed": False,
        "max_error": 3 * error,
        "rms_error": error,
        "metric": "rms",
        "limit": 2e-3,
        "passed": error <= 2e-3,
        "worst": [0, 17, 3],
        "positions": [error, 2 * error, error / 2],
    }
    return TapComparison(**values | changes)


def rows(fault: int | None = None, **changes: Any) -> list[TapComparison]:
    """Seven taps of a case; from the place of the fault on they are off."""
    taps = ("x_attn", "c_q", "c_q_normed", "scores", "mix", "experts", "y")
    kinds = ("input", *["tap"] * 4, "output", "output")
    return [
        row(tap, order, 1e-5 if fault is None or order < fault else 0.3, kind=kind, **changes)
        for order, (tap, kind) in enumerate(zip(taps, kinds, strict=True))
    ]


def routing(margin: float, **changes: Any) -> RoutingRecord:
    """Three tokens of which the second chose expert 3 instead of 2."""
    values: dict[str, Any] = {
        "token": 1,
        "expected": [1, 2],
        "chosen": [1, 3],
        "margin": margin,
        "limit": 2e-3,
    }
    tie = Tie(**values | {"bound": 0.0123, "effect": 0.0045, "passed": margin <= 2e-3} | changes)
    return RoutingRecord("moe_001_prefill", 1, 3, [0.5, margin, 0.02], [True, False, True], [tie])


FP8 = FP8Stats(
    "moe_001_prefill", 1, "attention.o", "activation", [(-9, 3), (-7, 1)], 1000, 5, 20, 4, 0
)
WARNING = RangeWarning("moe_001_prefill", "x_mid", "norm_square", "3 rows overflow")
HINT = Hint("moe_001_prefill", "scores", "mscale2_missing", "mscale² is missing.", "ratio 1.813")


def build_at(path: Path, precision: Precision = "fp8", **changes: Any) -> Path:
    """A build folder with a spec alone, of a model named by the folder above."""
    path.mkdir(parents=True)
    raw = tiny_config(**changes)
    graphs = {name: GraphSpec(name, "", "", (), (), ()) for name in GRAPHS}
    BuildSpec(precision, raw, config_hash(raw), graphs).save(path)
    return path


def fragment(
    build: Path, source: FindingsSource, rows: list[TapComparison], **more: Any
) -> Fragment:
    spec = BuildSpec.load(build)
    values: dict[str, Any] = {
        "precision": spec.precision,
        "config_sha256": spec.config_sha256,
        "source": source,
    }
    return Fragment(**{"model": build.parent.name, "rows": rows} | values | more)


def reported(build: Path, rows: list[TapComparison], **more: Any) -> Path:
    """The build with both fragments: `rows` of the graphs, and a chain that is well."""
    fragment(build, "graphs", rows, **more).save(build)
    chain = row("logits", case="end_to_end", graph="chain", layer=None, mode=None, kind="output")
    fragment(build, "chain", [chain], not_run=["tokens: no golden of them"]).save(build)
    return build


@pytest.fixture
def build(tmp_path: Path) -> Path:
    """An fp8 build whose graphs are off from `scores` on, with everything a report can hold."""
    return reported(
        build_at(tmp_path / "tiny" / "fp8"),
        rows(fault=3),
        routing=[routing(1e-3)],
        fp8=[FP8],
        ranges=[WARNING],
        hints=[HINT],
    )


def command(*arguments: str | Path) -> Result:
    return CliRunner().invoke(app, ["report", *map(str, arguments)])


def test_a_fragment_is_read_as_it_was_written(tmp_path: Path) -> None:
    build = build_at(tmp_path / "tiny" / "fp8")
    bad = row("scores", error=math.nan, positions=[math.nan, math.inf, 0.25])
    parts = {"routing": [routing(1e-3, bound=None)], "fp8": [FP8], "ranges": [WARNING]}
    path = fragment(build, "graphs", [bad], hints=[HINT], not_run=["a"], **parts).save(build)
    assert path == build / "parity" / "graphs.json" and "NaN" not in path.read_text()
    read = Fragment.load(build, "graphs")
    assert math.isnan(read.rows[0].error) and math.isnan(read.rows[0].positions[1])
    assert read.rows[0].positions[2] == 0.25 and read.rows[0].worst == [0, 17, 3]
    assert read.routing == [routing(1e-3, bound=None)] and read.fp8 == [FP8]
    assert (read.ranges, read.hints, read.not_run) == ([WARNING], [HINT], ["a"])
    assert not read.passed


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"format": 7}, "expected format 2, got 7"),
        ({"precision": "bf16"}, "precision: expected fp8 as in the build, got bf16"),
        ({"config_sha256": "00"}, "config_sha256: expected .* as in the build, got 00"),
        ({"source": "chain"}, "source: expected graphs as in the build, got chain"),
        ({"rows": [{"case": "a"}]}, "damaged or incomplete"),
        ({"rows": None}, "damaged or incomplete"),
        ({"not_run": [3]}, "damaged or incomplete"),
        ({"more": 1}, "damaged or incomplete .*no 'more'"),
    ],
)
def test_a_fragment_that_does_not_belong_is_refused(
    build: Path, change: dict[str, Any], expected: str
) -> None:
    path = fragment_path(build, "graphs")
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(BuildError, match=expected) as e:
        merge([build])
    assert f"`python -m graphs parity {build}`" in str(e.value)


def test_the_first_bad_tap_is_the_first_in_the_model() -> None:
    """Whatever the order of the rows: by layer, then prefill before decode, then dataflow."""
    bad = [
        row("logits", 0, 1.0, layer=None, mode=None),
        row("product", 2, 1.0, mode=None),
        row("c_q", 1, 1.0, mode="decode"),
        row("c_q", 1, 1.0, layer=2),
        row("mix", 5, 1.0),
        row("scores", 4, math.nan),
        row("x_attn", 0, 1e-5),
    ]
    found = []
    while worst := first_bad(bad):
        bad.remove(worst)
        found.append((worst.layer, worst.mode, worst.tap))
    assert found == [
        (1, "prefill", "scores"),
        (1, "prefill", "mix"),
        (1, "decode", "c_q"),
        (1, None, "product"),
        (2, "prefill", "c_q"),
        (None, None, "logits"),
    ]


def test_report_json_merges_what_both_commands_found(build: Path, tmp_path: Path) -> None:
    good = reported(build_at(tmp_path / "tiny" / "fp32", "fp32"), rows())
    path = merge([build, good]).save(tmp_path / "out")
    raw = json.loads(path.read_text())
    assert (raw["format"], raw["model"], raw["verdict"]) == (2, "tiny", "failed")
    assert [(b["precision"], b["verdict"]) for b in raw["builds"]] == [
        ("fp32", "passed"),
        ("fp8", "failed"),
    ]
    first, second = raw["builds"]
    assert first["first_bad"] is None and second["first_bad"]["tap"] == "scores"
    assert [r["source"] for r in second["rows"]] == ["graphs"] * 7 + ["chain"]
    assert second["hints"][0]["cause"] == "mscale2_missing"
    assert second["routing"][0]["ties"][0]["bound"] == 0.0123
    assert second["not_run"] == ["tokens: no golden of them"]


def test_a_tie_past_its_limit_fails_a_build_whose_tensors_are_well(tmp_path: Path) -> None:
    build = reported(build_at(tmp_path / "tiny" / "fp8"), rows(), routing=[routing(0.3)])
    report = merge([build])
    assert verdict_of(page(report)) == "failed"
    (line, *_) = map(str, failures(report))
    assert "token 1 of moe_001_prefill chose other experts by a margin of 0.30" in line


@pytest.mark.parametrize("what", ["precision", "model", "config", "rows"])
def test_builds_that_make_no_report_are_refused(build: Path, tmp_path: Path, what: str) -> None:
    folder = tmp_path / ("other" if what == "model" else "tiny") / "second"
    precision: Precision = "fp8" if what == "precision" else "fp32"
    changes = {"hidden_size": 192} if what == "config" else {}
    other = reported(build_at(folder, precision, **changes), rows())
    if what == "rows":
        for source in ("graphs", "chain"):
            fragment(other, source, []).save(other)
    expected = {
        "precision": "expected one build per precision, got two of fp8",
        "model": "model: expected builds of one model, got other and tiny",
        "config": "config_sha256: expected builds of one model, got",
        "rows": "nothing was compared",
    }
    with pytest.raises(BuildError, match=expected[what]):
        merge([build, other])


def test_the_command_says_what_failed_first_and_leaves_the_report(
    build: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    done = command(build, "--out", out)
    assert done.exit_code == 1 and done.stderr == ""
    text = " ".join(done.stdout.split())
    assert "fp8, first bad tap: scores in moe_001_prefill, layer 1: relative RMS 0.30" in text
    assert "limit 0.002, largest at index [0, 17, 3]" in text
    assert "Right before it, c_q_normed is within its limit: 1.0e-5." in text
    assert "likely cause: mscale² is missing. ratio 1.813 [mscale2_missing; " in text
    assert "fp8, not compared: tokens: no golden of them" in text
    assert sorted(p.name for p in out.iterdir()) == ["report.html", "report.json"]


def test_the_command_passes_where_all_is_well(tmp_path: Path) -> None:
    build = reported(build_at(tmp_path / "tiny" / "fp8"), rows(), routing=[routing(1e-3)])
    done = command(build, "--out", tmp_path)
    assert done.exit_code == 0, done.output
    assert "first bad" not in done.stdout.replace("first bad,", "") and "passed" in done.stdout
    assert verdict_of((tmp_path / "report.html").read_text()) == "passed"


def test_a_missing_fragment_names_the_command_that_makes_it(build: Path, tmp_path: Path) -> None:
    fragment_path(build, "chain").unlink()
    done = command(build, "--out", tmp_path / "out")
    assert isinstance(done.exception, BuildError)
    assert f"no chain.json; run `python -m runtime parity {build}`" in str(done.exception)
    assert not (tmp_path / "out").exists()
    fragment_path(build, "graphs").unlink()
    with pytest.raises(BuildError, match=f"run `python -m graphs parity {build}`"):
        merge([build])


class Strict(HTMLParser):
    """Reads a page, and refuses one whose elements do not close in order."""

    VOID = ("meta", "input", "br", "col")

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.text: list[tuple[str, str]] = []  # the element it stands in, and what it says

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        assert len(dict(attrs)) == len(attrs), f"{tag}: an attribute twice"
        self.elements.append((tag, dict(attrs)))
        self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        svg = "svg" in self.open
        assert svg or tag in self.VOID, f"{tag} is not closed by a slash"
        self.elements.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag, f"{tag} closed out of order"

    def handle_data(self, data: str) -> None:
        self.text.append((self.open[-1] if self.open else "", data))


def parsed(html: str) -> Strict:
    reader = Strict()
    reader.feed(html)
    reader.close()
    assert reader.open == []
    return reader


def verdict_of(html: str) -> str:
    """The text of the one element with the id `verdict`."""
    matches: list[str] = re.findall(r'<[^>]*\bid="verdict"[^>]*>([^<]*)<', html)
    (verdict,) = matches
    return verdict


def test_the_page_is_whole_and_asks_nothing_of_a_network(build: Path) -> None:
    html = page(merge([build]))
    reader = parsed(html)
    assert verdict_of(html) == "failed"
    assert "//" not in html.replace("// ", "") and "url(" not in html and "@import" not in html
    for tag, attributes in reader.elements:
        assert tag not in ("link", "img", "iframe", "base") and "src" not in attributes
        assert (attributes.get("href") or "#").startswith("#")
    text = " ".join(data for _, data in reader.text)
    for expected in (
        "scores in moe_001_prefill, layer 1: relative RMS 0.30, limit 0.002",
        "mscale² is missing.",
        "3 rows overflow",
        "tokens: no golden of them",
        "All 8 comparisons",
        "0.0045",
        "2.0 % in layer 1",
        "2^-9 to 2^-6",
    ):
        assert expected in text, expected
    assert sum(tag == "svg" for tag, _ in reader.elements) == 3


def test_a_failed_build_without_a_hint_claims_no_cause(tmp_path: Path) -> None:
    build = reported(build_at(tmp_path / "tiny" / "fp8"), rows(fault=3))
    html = page(merge([build]))
    assert "It looks like none of the known causes." in html and "Likely cause" not in html


def test_text_from_a_fragment_stays_text(tmp_path: Path) -> None:
    evil = "</script><b onclick='x'>&amp;\"^Q"
    build = reported(
        build_at(tmp_path / "tiny" / "fp8"),
        [row(evil, 0, 0.3, case=evil, symbol=evil, remark=evil), row("y", 1)],
        model=evil,
        hints=[Hint(evil, evil, evil, evil, evil)],
        ranges=[RangeWarning(evil, evil, evil, evil)],
        routing=[RoutingRecord(evil, 1, 1, [0.1], [True], [])],
        fp8=[FP8Stats(evil, 1, evil, "weight", [(0, 1)], 1, 1, 0, 1, 0)],
        not_run=[evil],
    )
    chain = json.loads(fragment_path(build, "chain").read_text())
    fragment_path(build, "chain").write_text(json.dumps(chain | {"model": evil}))
    reader = parsed(page(merge([build])))
    assert not [tag for tag, _ in reader.elements if tag == "b" and _.get("onclick")]
    assert sum(tag == "script" for tag, _ in reader.elements) == 1
    assert ("li", evil) in reader.text and ("title", f"Parity of {evil}: failed") in reader.text


def circles(svg: str) -> Iterator[tuple[float, float, str]]:
    for match in re.finditer(r'class="(dot[^"]*)" cx="([\d.]+)" cy="([\d.]+)"', svg):
        yield float(match[2]), float(match[3]), match[1]


def test_a_plot_shows_what_has_no_logarithm_at_its_edges() -> None:
    values = [1e-7, 1e-3, 0.0, math.nan, math.inf, 1e-5]
    points = [Point(x, y, "here", y == 1e-3) for x, y in enumerate(values)]
    axis = Axis("x", -0.5, 5.5, [(x, str(x)) for x in range(6)])
    svg = log_chart("test", [Series("a", 0, points)], [(0, 5, 1e-4)], axis, 400)
    found = sorted(circles(svg))
    low, failed, zero, nan, infinite, middle = [y for _, y, _ in found]
    (height,) = re.findall(r'class="limit" d="M[\d.]+ ([\d.]+)H', svg)
    assert nan == infinite < failed < float(height) < middle < low < zero < 300
    assert middle == pytest.approx((low + failed) / 2, abs=0.2)
    assert [kind for _, _, kind in found if "bad" in kind] == ["dot s0 bad"]
    assert all(0 < x < 400 for x, _, _ in found) and "NaN, ∞" in svg and "10⁻⁷" in svg
    assert svg == log_chart("test", [Series("a", 0, points)], [(0, 5, 1e-4)], axis, 400)


def test_one_layer_one_case_and_no_error_at_all_are_drawn_too() -> None:
    axis = Axis("x", -0.5, 0.5, [(0, "y")], steep=True)
    svg = log_chart("test", [Series("a", 0, [Point(0, 0.0, "exact")])], [], axis, 300)
    assert len(list(circles(svg))) == 1 and "nan" not in svg and "inf" not in svg


def test_a_tap_that_fails_in_one_layer_is_marked_whatever_its_error(build: Path) -> None:
    """A key that only one of both masks fails, and need not have an error."""
    masked = row("scores", layer=2, error=1e-9, passed=False, remark="1 key masked by one only")
    report = BuildFindings("fp8", (fragment(build, "graphs", [*rows(), masked]),))
    (figure,) = tap_figures(report)
    assert [kind for *_, kind in circles(figure) if "bad" in kind] == ["dot s0 bad"]
    assert figure.count("FAILED") == 1 and "limit 0.002 FAILED" in figure


def test_a_large_report_stays_small(build: Path) -> None:
    """300 rows of 100 positions each: the numbers of positions are in report.json alone."""
    many = [
        row(
            f"tap{i % 30}", i % 30, case=f"moe_{i // 30:03d}", layer=i // 30, positions=[1e-4] * 100
        )
        for i in range(300)
    ]
    fragment(build, "graphs", many).save(build)
    assert len(page(merge([build])).encode()) < 150_000


def test_numbers_read_well() -> None:
    values = (0.0, 1.234e-5, 0.0999, 0.5, 12.34, 1234.5, 3e7, math.nan, -math.inf)
    assert [number(v) for v in values] == [
        *("0", "1.2e-5", "0.10", "0.50", "12", "1234", "3.0e7", "not finite", "not finite")
    ]
    assert [limit_text(v) for v in (2e-2, 2e-3, 5e-6, 2.5e-5)] == [
        "0.02",
        "0.002",
        "5e-6",
        "2.5e-5",
    ]
    assert [share(*v) for v in ((0, 0), (0, 9), (1, 10**6), (1, 8), (9, 9))] == [
        *("–", "0 %", "< 0.001 %", "12 %", "100 %")
    ]


@pytest.mark.skipif(shutil.which("chromium") is None, reason="no chromium in PATH")
@pytest.mark.parametrize("verdict", ["passed", "failed"])
def test_a_browser_shows_the_verdict(build: Path, tmp_path: Path, verdict: str) -> None:
    if verdict == "passed":
        fragment(build, "graphs", rows(), fp8=[FP8], routing=[routing(1e-3)]).save(build)
    path = save_page(merge([build]), tmp_path)
    done = subprocess.run(
        [
            *("chromium", "--headless", "--no-sandbox", "--disable-gpu", "--dump-dom"),
            *(f"--user-data-dir={tmp_path / 'profile'}", "--virtual-time-budget=5000"),
            path.as_uri(),
        ],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert verdict_of(done.stdout) == verdict, done.stderr
    assert 'type="search"' in done.stdout, "the page's script did not run"


def test_make_parity_fails_and_leaves_the_report(build: Path, tmp_path: Path) -> None:
    """Everything that parity needs is there; a python that writes findings stands in for it."""
    findings, tree = tmp_path / "findings", MakeTree(tmp_path / "tree")
    shutil.move(build / "parity", findings)
    made = tree.folder / "build" / "tiny"
    shutil.copytree(build, made / "fp8")
    tree.make_checkpoint()
    tree.pretend_built()
    shutil.rmtree(made / "fp8" / "parity")
    (made / "fp8" / ".parity").unlink()
    (tree.folder / "stub").write_text(
        "#!/bin/sh\n"
        'folder=build/tiny/fp8/parity; mkdir -p "$folder"\n'
        'case "$2 $3" in\n'
        f"graphs?parity) cp {findings}/graphs.json $folder; exit 1;;\n"
        f"runtime?parity) cp {findings}/chain.json $folder;;\n"
        "export?record) ;;\n"
        f'graphs?report) exec {sys.executable} "$@";;\n'
        '*) echo "$@ was not expected" >&2; exit 3;;\n'
        "esac\n"
    )
    for target in ("parity", "engines"):
        done = tree.run(target, "MODEL=models/tiny", "PRECISIONS=fp8", "TARGET=sm120")
        assert done.returncode != 0 and "first bad tap: scores" in done.stdout, done.stderr
    assert verdict_of((made / "report.html").read_text()) == "failed"
    assert not (made / "fp8" / ".parity").exists()
