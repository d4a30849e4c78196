"""What tests and benchmarks share: formulas, counters, cases, parts of pages. It imports neither."""
