"""One module per claim: `python -m benchmarks.bench_startup` and so on; each writes into docs/benchmarks."""
