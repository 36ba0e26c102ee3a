"""GPU code in CuTe DSL: kernels, their compile cache and the ahead-of-time build."""
