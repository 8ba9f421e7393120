"""Triton kernels; imported where they are launched, never by `import magi2`."""
