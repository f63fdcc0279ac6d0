"""Which experts come from host memory or disk, and which stay: predictions, caches and files."""
