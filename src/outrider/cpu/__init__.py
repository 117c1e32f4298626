"""What Linux CPUs need: a fast BLAS, matmul kernels, threads, and layers that suit x86."""
