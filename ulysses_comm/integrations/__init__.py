"""Sequence parallelism for models of other libraries; each module needs its library, on use."""
