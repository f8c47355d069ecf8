"""lmstorfs: a filesystem for LLM training.

Nothing is imported here: the keeper, which must have no reason to die, lives in this package
and loads the standard library only.
"""

__version__ = "0.1.0"
