"""Where the time of a step goes, on every rank: records, their summary as JSON, and a picture.

timer = StepTimer(device)
timer.attach(model)                    # before the request is planned
denoiser = Denoiser(model, ...)
timer.start()
sample(denoiser, state, settings, timer.on_step)
summary = summarise(gather_records(timer.records))
"""

from magi2.timing.picture import draw_summary
from magi2.timing.records import StepRecord, gather_records
from magi2.timing.summary import TimingSummary, summarise
from magi2.timing.timer import StepTimer

__all__ = [
    "StepRecord",
    "StepTimer",
    "TimingSummary",
    "draw_summary",
    "gather_records",
    "summarise",
]
