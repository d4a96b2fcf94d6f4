"""Shared by several methods: 8-bit layers, calibration, codes, worked answers."""
