"""Measuring and choosing: workloads, benchmarks, reports."""
