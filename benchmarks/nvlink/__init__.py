"""The parts of bench_nvlink.py."""
