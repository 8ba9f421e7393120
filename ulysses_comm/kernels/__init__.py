"""Triton kernels; imported where they are launched, never by `import ulysses_comm`."""
