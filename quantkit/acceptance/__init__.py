"""Acceptance of a served model: any OpenAI-compatible endpoint, five dimensions, one report."""
