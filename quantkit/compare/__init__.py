"""A candidate held against a baseline: pure functions of models and arrays, limits, the report.

Imports no other part of the toolkit but archs, spec, arithmetic and report, so that the runtime may use it.
"""
