"""Empty: the real one has autocast helpers."""
