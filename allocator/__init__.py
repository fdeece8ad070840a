"""Device blocks and tables: geometry, block pool, block tables, prefix index, eviction, slab."""
