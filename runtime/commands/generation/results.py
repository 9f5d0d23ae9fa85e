"""Results of several prompts: shown in the order of the prompts, and saved as one file."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType

from graphs.contract.files import write_text
from graphs.contract.spec import BuildError
from runtime.commands.generation.jobs import Job
from runtime.commands.options import require_writable
from runtime.serving.request import Completion


def json_line(job: Job, completion: Completion) -> str:
    """A result as one JSON object, for programs."""
    return json.dumps(
        {
            "id": job.id,
            "prompt_ids": completion.prompt,
            "tokens": completion.tokens,
            "text": completion.text,
            "finish_reason": completion.reason,
            "error": None if completion.error is None else str(completion.error),
        }
    )


def plain_text(completion: Completion) -> str:
    """The text; its token ids where there is no tokenizer."""
    if completion.text is None:
        return " ".join(map(str, completion.tokens))
    return completion.text


class Results:
    """A context manager that at its end, whatever the cause, shows and saves all results so far."""

    def __init__(
        self, jobs: Sequence[Job], show: Callable[[Job, Completion], None], out: Path | None = None
    ) -> None:
        """Raises BuildError where `out` cannot name a file."""
        require_writable(out)
        self.jobs, self.show, self.out = jobs, show, out
        self.ended: dict[int, Completion] = {}
        self._shown = 0  # the first job that was not shown

    def __enter__(self) -> "Results":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self.out is not None and self.ended:
            self._save(self.out)
        for index in sorted(self.ended):
            if index >= self._shown:
                self.show(self.jobs[index], self.ended[index])

    def add(self, index: int, completion: Completion) -> None:
        """Take a job's result, by the job's index; it is shown when all before it have been."""
        self.ended[index] = completion
        while self._shown in self.ended:
            self.show(self.jobs[self._shown], self.ended[self._shown])
            self._shown += 1

    @property
    def tokens(self) -> int:
        return sum(len(completion.tokens) for completion in self.ended.values())

    @property
    def failed(self) -> list[tuple[Job, Exception]]:
        """The jobs that ended in an error, in order."""
        ended = [(self.jobs[index], self.ended[index].error) for index in sorted(self.ended)]
        return [(job, error) for job, error in ended if error is not None]

    def _save(self, out: Path) -> None:
        lines = [json_line(self.jobs[i], self.ended[i]) + "\n" for i in sorted(self.ended)]
        try:
            write_text(out, "".join(lines))
        except OSError as e:
            raise BuildError(f"{out}: not written: {e}") from e
