"""Where the time of a Python process goes, told by itself when it ends.

Python loads this module first in every process that has its folder in PYTHONPATH. A phase's time is
without that of the phases within it: what a builder imports counts as imports, not as building. A
process appends one JSON object to the file that PHASES_FILE names.
"""

import atexit
import builtins
import functools
import importlib
import json
import operator
import os
import sys
import time
from _thread import get_ident
from collections.abc import Callable
from pathlib import Path
from typing import Any

# Of which module's functions the time is that of which phase.
PHASES = {
    "export.engine.to_onnx": {"export_graph": "export"},
    "graphs.engines.compile": {"_refuse_slow": "lint"},
    "polygraphy.backend.trt.loader": {
        "NetworkFromOnnxBytes.call_impl": "parse",
        "EngineBytesFromNetwork.call_impl": "build",
    },
}


def process_age() -> float:
    """Seconds since this process was started, to a hundredth."""
    fields = Path("/proc/self/stat").read_text("ascii").rpartition(")")[2].split()
    started = int(fields[19]) / os.sysconf("SC_CLK_TCK")
    return time.clock_gettime(time.CLOCK_BOOTTIME) - started


class Phases:
    """The running ones, outermost first, and the seconds of each so far. Of one thread only."""

    def __init__(self) -> None:
        self.seconds = {"start-up": process_age()}
        self.running = ["rest"]
        self.since, self.thread = time.perf_counter(), get_ident()

    def of(self, phase: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """The function, its time counted as this phase's."""

        @functools.wraps(function)
        def call(*arguments: Any, **options: Any) -> Any:
            if get_ident() != self.thread:
                return function(*arguments, **options)
            self._count()
            self.running.append(phase)
            try:
                return function(*arguments, **options)
            finally:
                self._count()
                self.running.pop()
                if phase == "imports" and "imports" not in self.running:
                    self._find_functions()

        return call

    def _count(self) -> None:
        now, phase = time.perf_counter(), self.running[-1]
        self.seconds[phase] = self.seconds.get(phase, 0) + now - self.since
        self.since = now

    def _find_functions(self) -> None:
        for module in [name for name in PHASES if name in sys.modules]:
            for path, phase in PHASES.pop(module).items():
                *owners, name = path.split(".")
                owner = sys.modules[module]
                for part in owners:
                    owner = getattr(owner, part)
                setattr(owner, name, self.of(phase, operator.attrgetter(name)(owner)))

    def write(self) -> None:
        self._count()
        content = {"argv": sys.orig_argv, "seconds": self.seconds}
        with Path(os.environ["PHASES_FILE"]).open("a", encoding="utf-8") as file:
            file.write(json.dumps(content) + "\n")


phases = Phases()
builtins.__import__ = phases.of("imports", builtins.__import__)
importlib.import_module = phases.of("imports", importlib.import_module)
atexit.register(phases.write)
