"""Rewrites a checkpoint with its routed experts in INT4, as Kimi K2-Thinking's are.

    python -m bench.quality.int4_checkpoint models/k2-nano build/k2-nano/int4/checkpoint

All else is written in 16 bits, as there. A weight group has as many inputs as K2-Thinking's, 32,
or, where those do not divide both widths of an expert, the most that do: the published packers know
no ragged groups. For models that fit in memory.
"""

import math
from pathlib import Path
from typing import Annotated, Any

import typer

from export.checkpoint.open import Checkpoint
from export.checkpoint.shards import CheckpointError
from export.synthetic.write_checkpoint import write_checkpoint
from graphs.cli import make_app, run
from graphs.contract.config import load_raw_config

app = make_app("Rewrite a checkpoint with its routed experts in INT4.")


def int4_config(raw: dict[str, Any]) -> dict[str, Any]:
    """A text model's config with K2-Thinking's quantisation, in groups that fit its experts."""
    quantization = load_raw_config("k2-thinking")["quantization_config"]
    weights = quantization["config_groups"]["group_0"]["weights"]
    weights["group_size"] = math.gcd(
        weights["group_size"], raw["hidden_size"], raw["moe_intermediate_size"]
    )
    return raw | {"quantization_config": quantization}


@app.command()
def main(
    checkpoint: Annotated[Path, typer.Argument(help="Folder with config.json and shards.")],
    out: Annotated[Path, typer.Argument(help="Folder of the new checkpoint.")],
) -> None:
    """Write the new checkpoint."""
    source = Checkpoint.open(checkpoint)
    state = {name: source.wide(name) for name in source.shapes}
    write_checkpoint(out, int4_config(source.raw_config), state)


if __name__ == "__main__":
    run(app, CheckpointError)
