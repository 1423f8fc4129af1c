"""The GPU kernels, written in Triton. Importing a module of this package imports triton; importing the package does not."""
