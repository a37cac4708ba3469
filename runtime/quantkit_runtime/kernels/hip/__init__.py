"""The kernel in HIP C++, one source for hipcc, nvcc and, through `cpu_shim.h`, a CPU compiler."""
