"""Progress of several requests: a bar for all, and one for each of the first that run."""

import time
from collections.abc import Sequence

from rich.markup import escape
from rich.progress import Progress, TaskID, TextColumn

from graphs.cli import progress_bar
from runtime.commands.generation.results import Results

BARS = 8  # of running requests, whatever their number


class Board:
    """Bars on standard error while it is open; nothing where that is no terminal."""

    def __init__(self, results: Results) -> None:
        self.results = results
        self.bar: Progress = progress_bar(TextColumn("{task.fields[note]}"))
        self.total = self.bar.add_task("all", total=len(results.jobs), note="")
        self.tasks: dict[int, TaskID] = {}  # by a job's index
        self.start = time.perf_counter()

    def show(self, running: Sequence[tuple[int, int]]) -> None:
        """Show `running`: each job's index and the tokens that it has so far."""
        shown = dict(running[:BARS])
        for index in self.tasks.keys() - shown.keys():
            self.bar.remove_task(self.tasks.pop(index))
        for index, tokens in shown.items():
            if index not in self.tasks:
                job = self.results.jobs[index]
                self.tasks[index] = self.bar.add_task(
                    escape(f"[{job.id}]"), total=job.request.max_new_tokens, note=""
                )
            self.bar.update(self.tasks[index], completed=tokens, note=f"{tokens} tokens")
        tokens = self.results.tokens + sum(tokens for _, tokens in running)
        rate = tokens / (time.perf_counter() - self.start)
        ended = len(self.results.ended)
        note = f"{ended} of {len(self.results.jobs)} done, {tokens} tokens, {rate:.1f} tokens/s"
        self.bar.update(self.total, completed=ended, note=note)
