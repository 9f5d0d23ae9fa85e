"""The errors that end a command with one line."""


def error_types() -> tuple[type[Exception], ...]:
    """Errors that a user can act on; any other is a bug of ours.

    A function, since the modules that define them are heavy: ask for them when one was raised.
    """
    from graphs.engines.tensorrt import TensorRTError
    from graphs.session import SessionError
    from runtime.backends import BackendError
    from runtime.benchmark.bench import BenchError
    from runtime.cache.errors import CacheError
    from runtime.devices.base import DeviceError
    from runtime.serving.sampling import SamplingError
    from runtime.step.chain import StepError
    from runtime.tokenizers.base import PromptError

    return (
        *(PromptError, SamplingError, StepError, CacheError, BackendError, DeviceError),
        *(SessionError, TensorRTError, BenchError),
    )
