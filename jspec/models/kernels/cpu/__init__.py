"""Native CPU kernels that multiply by packed matrices. The system's C++ compiler builds them at first use."""
