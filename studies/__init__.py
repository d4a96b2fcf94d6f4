"""Measuring: bench.py's larger commands, the studies of learning, their tables and pictures."""
