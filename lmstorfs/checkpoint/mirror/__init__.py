"""The mirror: a peer node keeps replicas of what is written here, in its RAM."""
