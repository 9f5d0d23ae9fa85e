"""The kernels that TensorRT-RTX compiled for an engine on this GPU, kept for the next start.

An engine of TensorRT-RTX is not yet machine code: that is made for the GPU at hand when a context
is created, and once more for shapes where it is told to (runtime.backends.engine.RtxOptions). All
contexts of an engine share one cache of it, so that one layer's does not compile what another's
has. A cache that cannot be read costs that time again and nothing else, so it is reported and
replaced.
"""

import logging
import re
from pathlib import Path
from typing import Any

from graphs.contract.files import replacing

log = logging.getLogger(__name__)


def cache_path(engine: Path, gpu: str, version: str) -> Path:
    """The path of an engine's cache for one kind of GPU and one version of TensorRT."""
    kind = re.sub(r"[^a-z0-9]+", "-", gpu.lower()).strip("-")
    return engine.with_suffix(f".{kind}-{version}.cache")


class KernelCache:
    """The file of an IRuntimeCache."""

    def __init__(self, path: Path, cache: Any) -> None:
        """Load the file, if there is one that this GPU and version made."""
        self.path, self.cache = path, cache
        self._loaded = b""
        if not path.exists():
            return
        try:
            content = path.read_bytes()
        except OSError as e:
            log.warning("%s: not readable (%s); kernels are compiled again", path, e)
            return
        if cache.deserialize(content):
            self._loaded = content
        else:
            log.warning("%s: damaged, or of another GPU or version; made again", path)

    def save(self) -> None:
        """Replace the file where more has been compiled since; logs a failure."""
        blob = self.cache.serialize()
        content = b"" if blob is None else bytes(blob)
        if not content or content == self._loaded:
            return
        try:
            with replacing(self.path) as temporary:
                temporary.write_bytes(content)
        except OSError as e:
            log.warning("%s: not saved (%s); kernels are compiled again next time", self.path, e)
