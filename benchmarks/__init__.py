"""What this package claims, measured: `python -m benchmarks.run` runs the modules that it names.

The page of a claim, docs/benchmarks/NAME.md, has the prose, and a marked place for each measured part.
"""
