"""`python -m graphs lint|verify`: a build's graphs against the rules, its weights' checksums."""

from pathlib import Path
from typing import Annotated

import typer

from graphs.cli import progress_bar
from graphs.contract.spec import GRAPHS, BuildSpec
from graphs.contract.tensorfile import TensorFile
from graphs.engines.lint import RULES, lint_build
from graphs.parity.ranges import golden_findings
from graphs.parity.replay import graph_cases


def lint(
    build: Annotated[
        Path, typer.Argument(help="A build folder with spec.json: build/MODEL/PRECISION.")
    ],
) -> None:
    """Check every graph against the rules that keep engines fast; exit status 1 if one is broken.

    Warns where 16 bits or an FP8 scale would lose values of the goldens, if there are any.
    """
    findings = lint_build(build)
    goldens = graph_cases(build, BuildSpec.load(build)) if (build / "golden").exists() else []
    warnings = [warning for golden in goldens for warning in golden_findings(golden)]
    for line in (*(f"warning: {w}" for w in warnings), *(f"error: {f}" for f in findings)):
        print(line)
    ranges = f"{len(warnings)} range warnings in {len(goldens)} goldens"
    if not goldens:
        ranges = "no goldens, so no ranges; make them with `python -m export golden`"
    print(f"{build}: {len(RULES)} rules, {len(GRAPHS)} graphs, {len(findings)} errors; {ranges}")
    if findings:
        raise typer.Exit(1)


def verify(
    build: Annotated[Path, typer.Argument(help="A build folder: build/MODEL/PRECISION.")],
) -> None:
    """Recompute the checksums of all packed tensors, and name the first that differs."""
    files = sorted(build / name for name in BuildSpec.load(build).weight_files)
    with progress_bar() as progress:
        for path in progress.track(files, description="verifying"):
            TensorFile.open(path).verify()
    print(f"{build}: {len(files)} files are as they were written")
