"""`python -m graphs describe|budget|parity|report|standalone|verify|lint|compile|table`."""

from graphs.cli import make_lazy_app, run
from graphs.commands import ERRORS

app = make_lazy_app(
    "The contract between export and runtime: models, graphs and engines.",
    {
        "describe": "graphs.commands.describe",
        "budget": "graphs.commands.budget",
        "parity": "graphs.commands.parity",
        "report": "graphs.commands.parity",
        "standalone": "graphs.commands.parity",
        "verify": "graphs.commands.checks",
        "lint": "graphs.commands.checks",
        "compile": "graphs.commands.compile",
        "table": "graphs.commands.compile",
    },
)

if __name__ == "__main__":
    run(app, *ERRORS)
