"""Measurements: `python -m benchmarks --suite NAME[,NAME] --json FILE`.

What lives here: the rows, the rounds and the report (this package), one module a suite (`benchmarks.suites`).
Nothing in the product imports it. Single threaded; peers run in processes of their own.
"""
