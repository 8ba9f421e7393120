"""MAGI-2 Preview, an audio-video diffusion transformer, on `ulysses_comm`."""
