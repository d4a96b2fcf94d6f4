"""Measuring: bench.py's larger commands, the studies of learning and their tables."""
