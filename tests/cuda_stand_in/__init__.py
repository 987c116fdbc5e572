"""A stand-in for CUDA: what is written for a GPU runs on a machine without one, and its streams are checked for races.

Tensors on `cuda:0` are what torch's own dispatcher, autograd engine and Python bindings make of them. Beneath, in
`stand_in.cpp`, operations are the CPU's, done at once, in memory that the CPU cannot reach at the address that tensors
give. So it shows

- any use of a GPU's memory by the CPU: a segmentation fault;
- any mix of devices in an operation: torch's error;
- any two accesses to the same bytes of which one writes and that no event, stream or wait puts in an order, whatever
  the order in which they happened to run: a race, with both operations named;
- any copy that makes the caller wait, and any from RAM that is not pinned: counted;
- any `record_stream`: an error.

It does not show speed, and it runs the CPU's kernels instead of Triton's, which have tests of their own.

`PYTHONPATH=tests python -m pytest -p cuda_stand_in.plugin -m gpu tests/runtime/test_cuda.py` runs tests that need a GPU
with it; a C++ compiler must be there, and torch must be a build without CUDA.
"""
