"""Conversion: plan everything, then write it, then verify it."""
