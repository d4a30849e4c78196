"""Tests of the benchmarks themselves, which ``make test`` runs, too."""
