"""The parts of the real package's core that torchada imports."""

from torch_musa.core import _utils, stream  # noqa: F401
