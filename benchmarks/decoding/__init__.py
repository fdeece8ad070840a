"""What the `decode` suite measures with: prepared contexts, our loop and its rivals as sides that decode step by step.

Used by the benchmarks only. One thread; a rival from another environment runs in a process of its own.
"""
