"""What a kernel wrote down before it trapped, and how the user gets to read it."""

from __future__ import annotations

import ctypes
import logging
import threading
import weakref

import torch

# By the numbers of `kernels/signals.py`.
_STAGES = {
    1: "rank {peer} had not begun it",
    2: "rank {peer} means another exchange (split sizes, heads, dtypes or direction differ)",
    3: "the data of rank {peer} had not arrived",
    4: "rank {peer} had not packed what it sends",
    5: "rank {peer} had not read what was sent before",
}
_WORDS = 4
_POLL_SECONDS = 0.1

_log = logging.getLogger("ulysses_comm")


class Report:
    """Four words of host memory that kernels can write: stage, peer, exchange, word seen.

    Attributes:
        words: The memory, int64, pinned where there is a GPU.
    """

    def __init__(self, rank: int, seconds: float, *, pinned: bool) -> None:
        self.words = torch.zeros(_WORDS, dtype=torch.int64, pin_memory=pinned)
        self._rank, self._seconds, self._told = rank, seconds, False
        self._stage = ctypes.c_longlong.from_address(self.words.data_ptr())

    def text(self) -> str:
        """Say what failed; empty if nothing did."""
        if not self._stage.value:
            return ""
        stage, peer, exchange, _ = self.words.tolist()
        waited = "" if stage == 2 else f", and this rank waited {self._seconds:g} s"
        return (
            f"ulysses_comm: rank {self._rank} gave up exchange {exchange} over symmetric memory: "
            f"{_STAGES.get(stage, 'stage {peer} is unknown').format(peer=peer)}{waited}. The GPU "
            "of this process has stopped ('unspecified launch failure'); end the run. Look for the "
            "other rank's own error; use_transport(timeout=...) sets how long to wait."
        )

    def tell(self) -> None:
        """Log what failed, once."""
        if self._stage.value and not self._told:
            self._told = True
            _log.error(self.text())

    def watch(self, owner: object) -> None:
        """Tell as soon as something fails, for as long as the owner is there.

        A thread, since the process may be waiting for the GPU, or be ended by another library, when
        it happens.
        """
        stop = threading.Event()

        def look() -> None:
            while not stop.wait(_POLL_SECONDS):
                self.tell()

        threading.Thread(target=look, name="ulysses_comm report", daemon=True).start()

        def end() -> None:
            stop.set()
            self.tell()

        weakref.finalize(owner, end)
