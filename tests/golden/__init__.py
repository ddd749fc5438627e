"""Golden vectors of the reference system, and where we differ from it on purpose."""
