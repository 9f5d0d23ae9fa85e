"""Run jobs on a scheduler: one with its text as it comes, or several side by side."""

from collections.abc import Callable, Sequence

from runtime.commands.generation.board import Board
from runtime.commands.generation.jobs import REFUSALS, Job
from runtime.commands.generation.results import Results
from runtime.commands.signals import Interruption
from runtime.serving.request import OnUpdate, Update
from runtime.serving.scheduler import Scheduler
from runtime.tokenizers.base import PromptError

JobProgress = Sequence[tuple[int, int]]  # index of a job that runs, and its tokens so far


def run_jobs(
    scheduler: Scheduler, jobs: Sequence[Job], interruption: Interruption, results: Results
) -> None:
    """Run jobs until all have ended, or a signal has come between two steps.

    Raises PromptError, and nothing has run, where one could never run.
    """
    tickets = [submit(scheduler, job) for job in jobs]
    board = Board(results)
    with board.bar:
        _run(scheduler, tickets, interruption, results, board.show)


def stream_job(
    scheduler: Scheduler,
    job: Job,
    interruption: Interruption,
    results: Results,
    write: Callable[[str], None],
) -> None:
    """Run one job as `run_jobs`, writing its text as it comes and a newline at the end.

    Writes token ids where there is no tokenizer.
    """
    new: list[str] = []  # written between steps: a callback that raises would end the request

    def collect(update: Update) -> None:
        new.append(update.text if scheduler.tokenizer else f"{update.token} ")

    def flush(running: JobProgress) -> None:
        write("".join(new))
        new.clear()

    tickets = [submit(scheduler, job, collect)]
    try:
        _run(scheduler, tickets, interruption, results, flush)
    finally:
        write("\n")


def _run(
    scheduler: Scheduler,
    tickets: Sequence[int],
    interruption: Interruption,
    results: Results,
    on_step: Callable[[JobProgress], None],
) -> None:
    index = {ticket: i for i, ticket in enumerate(tickets)}
    while scheduler.busy and not interruption.received:
        for ticket, completion in scheduler.step().items():
            results.add(index[ticket], completion)
        on_step([(index[item.ticket], len(item.tokens)) for item in scheduler.running])


def submit(scheduler: Scheduler, job: Job, on_update: OnUpdate | None = None) -> int:
    """The job's ticket. Raises PromptError."""
    try:
        return scheduler.submit(job.request, on_update)
    except REFUSALS as e:
        raise PromptError(f"{job.where}: {e}") from e
