"""The commands of `python -m graphs`, imported when one is called; and the errors that end them."""

from graphs.budget.gpus import UnknownGpuError
from graphs.contract.shapes import CompileError
from graphs.engines.tensorrt import TensorRTError

ERRORS = (CompileError, TensorRTError, UnknownGpuError)
