"""`python -m runtime`: generate, evaluate, check parity and measure speed from a build folder."""

from graphs.cli import make_lazy_app, run
from runtime.commands.errors import error_types
from runtime.commands.signals import Interruption, without_traceback

COMMANDS = {
    name: f"runtime.commands.{name}:{name}" for name in ("generate", "evaluate", "parity", "bench")
}

app = make_lazy_app("Tokens from a build folder, on ONNX Runtime or TensorRT.", COMMANDS)


def main() -> None:
    without_traceback()
    with Interruption() as interruption:
        run(app, find_errors=error_types)
    interruption.leave()


if __name__ == "__main__":
    main()
