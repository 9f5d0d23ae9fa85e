"""What engines take beside their budgets, and tokens a second at most, as one picture.

On the left is what the builder reports, on the right what is computed: nothing is timed.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import matplotlib
import typer

from graphs.budget.engines import Built, built_engines
from graphs.budget.gpus import GPUS
from graphs.budget.model import ModelBudget, model_budget, tokens_per_second
from graphs.cli import make_app, run
from graphs.contract.manifest import ENGINE_MODES, EngineMode, Profile
from graphs.engines.activation_budget import MARGIN

matplotlib.use("Agg")  # no screen
from matplotlib import pyplot

COLOURS: dict[EngineMode, str] = {"decode": "#0b6e4f", "prefill": "#e08e45"}
OVER, BUDGET = "#c1440e", "#555555"
MB = 1e6

app = make_app(__doc__.splitlines()[0])


@app.command()
def main(
    manifests: Annotated[
        list[Path],
        typer.Argument(help="build/MODEL/PRECISION/FOLDER/manifest.json, of one target."),
    ],
    model: Annotated[str, typer.Option(help="Whose tokens a second are shown.")] = "k2",
    out: Annotated[Path, typer.Option(help="The picture.")] = Path("bench/plots/budget.png"),
) -> None:
    """Write the picture."""
    built = distinct([built_engines(path) for path in manifests])
    figure, (left, right) = pyplot.subplots(
        1, 2, figsize=(12, 1.2 + 0.13 * sum(map(len, built.values()))), layout="constrained"
    )
    engines_plot(left, built)
    sequences_plot(right, model_budget(model, "fp8", Profile()))
    out.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(out, dpi=110, metadata={"Software": None})
    print(out)


def distinct(models: Sequence[list[Built]]) -> dict[str, list[Built]]:
    """Scratch of each model's engines; models with the same figures share one list."""
    names: dict[tuple[object, ...], list[str]] = {}
    lists: dict[tuple[object, ...], list[Built]] = {}
    for figures in models:
        scratch = [figure for figure in figures if figure.mode]
        key = tuple((f.graph, f.mode, f.logged, f.expected) for f in scratch)
        names.setdefault(key, []).append(scratch[0].model)
        lists.setdefault(key, scratch)
    return {", ".join(names[key]): figures for key, figures in lists.items()}


def engines_plot(axes: Any, built: dict[str, list[Built]]) -> None:
    """A bar for each engine and mode; its budget is a mark."""
    rows = [(model, figure) for model, figures in built.items() for figure in figures]
    labels = []
    for place, (model, figure) in enumerate(rows):
        assert figure.mode is not None
        colour = OVER if figure.too_much else COLOURS[figure.mode]
        axes.barh(place, (figure.logged or 0) / MB, color=colour)
        axes.plot([MARGIN * figure.expected / MB] * 2, [place - 0.45, place + 0.45], color=BUDGET)
        first = figure is built[model][0]
        name = figure.graph if figure.mode == ENGINE_MODES[0] else ""
        labels.append(f"{model}   {name}" if first else name)
        if first and place:
            axes.axhline(place - 0.5, color=BUDGET, linewidth=0.5)
    axes.set_yticks(range(len(rows)), labels, fontsize=7)
    axes.margins(y=0.01)
    axes.invert_yaxis()
    for mode in ENGINE_MODES:
        axes.barh(0, 0, color=COLOURS[mode], label=f"built, {mode}")
    axes.plot([], [], color=BUDGET, label=f"budget: {MARGIN - 1:.0%} more than expected")
    axes.set(xscale="log", xlabel="MB of scratch, by the builder")
    axes.set_title("Engines of full-size presets beside their budgets", loc="left", fontsize=10)
    axes.legend(frameon=False, fontsize=8, loc="lower right")


def sequences_plot(axes: Any, budget: ModelBudget) -> None:
    """A line for each GPU, or for those of the same rates."""
    counts = [sequences.count for sequences in budget.sequences]
    labels: dict[tuple[float, ...], list[str]] = {}
    for gpu in GPUS.values():
        rates = tuple(tokens_per_second(sequences, gpu) for sequences in budget.sequences)
        labels.setdefault(rates, []).append(gpu.label)
    for rates, names in labels.items():
        axes.plot(counts, rates, marker="o", markersize=3, label=", ".join(names))
    axes.set(xscale="log", yscale="log", xlabel="sequences in a step", ylabel="tokens/s at most")
    axes.set_xticks(counts, map(str, counts))
    axes.minorticks_off()
    axes.grid(alpha=0.3)
    axes.set_title(
        f"{budget.source}, {budget.precision}, {budget.profile.context:,} cached rows: computed, "
        "one step at a time",
        loc="left",
        fontsize=10,
    )
    axes.legend(frameon=False, fontsize=8)


if __name__ == "__main__":
    run(app)
