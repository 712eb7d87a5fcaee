"""NumPy float64 oracles of both kernels, each with the error bound it grants a correct kernel."""
