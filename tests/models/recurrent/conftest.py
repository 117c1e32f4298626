"""Fixtures of the kernels' tests."""

from recurrent.cpp_kernels import cpp_folder, kernels

__all__ = ["cpp_folder", "kernels"]
