"""Exchanges through symmetric memory: each rank writes into, or reads from, its peers' memory."""
