"""What tests and benchmarks share: formulas, counters, a training loop, parts of pages."""
