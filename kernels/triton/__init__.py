"""The GPU kernels, written in Triton. Importing a module of this package imports triton.

Importing the package does not.
"""
