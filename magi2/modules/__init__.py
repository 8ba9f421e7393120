"""The model's parts: each takes its piece of the configuration and holds its own weights.

Parameters carry the released checkpoint's names, so a state dict is a checkpoint. They are not
initialised here: load a checkpoint, or call `magi2.initialise.initialise`.
"""
