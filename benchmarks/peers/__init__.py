"""The peers that `bench_peers.py` measures, our own forms beside them, and how ranks are run."""
