"""Native products of packed matrices on CPU, which the system's C++ compiler builds at first use."""
