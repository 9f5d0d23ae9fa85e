"""The output of `python -m graphs budget`: tables, or the same figures as JSON."""

import dataclasses
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from graphs.budget.engines import built_engines
from graphs.budget.gpus import Gpu
from graphs.budget.model import ModelBudget, model_budget
from graphs.budget.tables import (
    built_table,
    memory_table,
    sequence_table,
    step_table,
)
from graphs.contract.manifest import Profile
from graphs.contract.spec import BuildError, Precision


@dataclass(frozen=True)
class Show:
    """A console, and whether figures go to it as JSON."""

    console: Console
    as_json: bool

    def tables(self, tables: Iterable[Table], figures: dict[str, Any]) -> None:
        """The tables, or the figures that they are made of."""
        if self.as_json:
            print(json.dumps(figures, indent=1, ensure_ascii=False))
            return
        for table in tables:
            self.console.print(table, "")


def show_models(
    show: Show,
    sources: Sequence[str],
    precision: Precision,
    profile: Profile,
    gpus: Sequence[Gpu],
    steps: bool,
) -> None:
    """Show memory and cards of all models, with `steps` the steps of each. Raises ConfigError."""
    budgets = [model_budget(source, precision, profile) for source in sources]
    figures = {
        "gpus": _gpus(gpus),
        "models": {budget.source: budget.as_dict(gpus) for budget in budgets},
    }
    show.tables(_model_tables(budgets, gpus, steps), figures)


def _model_tables(
    budgets: Sequence[ModelBudget], gpus: Sequence[Gpu], steps: bool
) -> Iterable[Table]:
    yield memory_table(budgets, gpus)
    for budget in budgets if steps else ():
        yield step_table(budget, gpus)
        yield sequence_table(budget, gpus)


def show_built(show: Show, manifests: Sequence[Path]) -> bool:
    """Show built engines, and say whether all keep their budgets. Raises BuildError."""
    built = [figure for manifest in manifests for figure in built_engines(manifest)]
    if not built:
        raise BuildError("no engine in any manifest; make them with `python -m graphs compile`")
    over = [figure for figure in built if figure.too_much]
    figures = {
        "engines": [dataclasses.asdict(f) | {"too_much": f.too_much} for f in built],
    }
    show.tables([built_table(built)], figures)
    if not show.as_json:
        for figure in over:
            show.console.print(f"error: {figure}", soft_wrap=True)
    return not over


def _gpus(gpus: Sequence[Gpu]) -> dict[str, dict[str, Any]]:
    return {gpu.name: dataclasses.asdict(gpu) for gpu in gpus}
