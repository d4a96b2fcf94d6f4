"""What only the methods use: 8-bit layers, calibration, codes."""
