"""Triton kernels: decode attention over a paged slab whose blocks are full precision or INT4 records, read in place.

decode (the two kernels that are launched), full and cold (an item of either form), parts (what they share).
Dims that are no power of two are cut in *pieces*, (first, width): a power of two and the padded rest; tensors by piece
travel as tuples. Only triton_paged imports these modules, and only where Triton is installed.
"""
