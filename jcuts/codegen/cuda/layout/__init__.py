"""Layout kernels: transposing and rounding the weights of many GEMMs in one launch."""
