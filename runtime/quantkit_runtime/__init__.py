"""The lean runtime that proves converted weights: transformers' modelling code, INT8 arithmetic grafted in."""
