"""fuse."""
