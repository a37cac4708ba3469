"""Checkpoints: reading any source by key, writing files atomically."""
