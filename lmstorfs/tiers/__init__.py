"""Tiers: directories of plain files, each with a budget."""

from lmstorfs.tiers.placement import Placement
from lmstorfs.tiers.tier import Tier, TierStatistics

__all__ = ["Placement", "Tier", "TierStatistics"]
