"""Device code of qgnn's primitives: Triton kernels and their launchers. No autograd, no modules."""
