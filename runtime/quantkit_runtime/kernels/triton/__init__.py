"""Kernels in Triton, in the API of Triton 3.1, so that older vendor builds compile them too."""
