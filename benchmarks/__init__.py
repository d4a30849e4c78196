"""What this package claims, measured: one module per claim, whose `BENCHMARK` `python -m benchmarks.run` runs.

The page of a claim, docs/benchmarks/NAME.md, has the prose, and a marked place for each part that is measured.
"""
