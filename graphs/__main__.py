"""`python -m graphs describe|budget|parity|report|standalone|verify|lint|compile|table`."""

from graphs.cli import make_lazy_app, run
from graphs.commands import ERRORS

app = make_lazy_app(
    "The contract between export and runtime: models, graphs and engines.",
    {
        "describe": "graphs.commands.describe:describe",
        "budget": "graphs.commands.budget:budget",
        "parity": "graphs.commands.parity:parity",
        "report": "graphs.commands.parity:report",
        "standalone": "graphs.commands.parity:standalone",
        "verify": "graphs.commands.checks:verify",
        "lint": "graphs.commands.checks:lint",
        "compile": "graphs.commands.compile:compile",
        "table": "graphs.commands.compile:table",
    },
)

if __name__ == "__main__":
    run(app, *ERRORS)
