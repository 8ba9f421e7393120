"""Streams and events by name."""

import torch


class Stream(torch.Stream):
    pass


class Event(torch.Event):
    pass


class StreamContext:
    pass
