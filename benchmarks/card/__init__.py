"""What the `gpu` suite measures with: a clock for a device, scenes of paged KV on it, and rivals where installed.

Written for a CUDA card. Everything also runs on the CPU through torch, which shows that it works and proves no figure.
"""
