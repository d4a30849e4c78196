"""One module per claim, which `python -m benchmarks.run` measures: the result goes into docs/benchmarks."""
