"""INT8 kernels: a registry of rows, imported on use."""
