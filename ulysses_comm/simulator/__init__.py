"""The parts of the in-process simulator; `ulysses_comm.simulate` is the way in."""
