"""Ulysses sequence parallelism: exchanges, head shards and ranks inside one process."""
