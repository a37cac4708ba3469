"""Calibration texts for static quantization, with their sources and the script that rebuilds them."""
