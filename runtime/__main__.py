"""`python -m runtime`: generate, evaluate, check parity and measure speed from a build folder."""

from graphs.cli import make_app, run
from runtime.commands.errors import error_types
from runtime.commands.lazy import add_command
from runtime.commands.signals import Interruption, without_traceback

COMMANDS = {
    "generate": "Continue prompts: the text of one as it comes; several run side by side, shown in "
    "order.",
    "evaluate": "Bits per byte and per token, in windows of 512 tokens with at least 255 tokens of "
    "context.",
    "parity": "Compare blocks and the whole chain with the build's goldens; exit status 1 past "
    "tolerance.",
    "bench": "Time each engine alone and the whole chain, decode and prefill, beside the GPU's "
    "roofline.",
}

app = make_app("Tokens from a build folder, on ONNX Runtime or TensorRT.")
for _name, _summary in COMMANDS.items():
    add_command(app, f"runtime.commands.{_name}", _summary)


def main() -> None:
    without_traceback()
    with Interruption() as interruption:
        run(app, find_errors=error_types)
    interruption.leave()


if __name__ == "__main__":
    main()
