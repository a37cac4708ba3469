"""Calibration: real text through the model, layer by layer, and what every GEMM sees of it."""
