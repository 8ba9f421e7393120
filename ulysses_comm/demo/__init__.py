"""The main job: a released encoder, its attention run through the exchanges, compared bit by bit.

`python -m ulysses_comm demo` runs it. The model code (`attention`, `encoder`, `step`) takes the
group as an argument and is the same for simulated ranks and real processes.
"""
