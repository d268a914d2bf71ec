"""An executable model of a hybrid model's scheduler, block allocator, prefix cache and worker."""

from mambackpt.engine.splitter import Splitter, chunk_ends
from mambackpt.engine.variants import VARIANTS, Query, Rules, find_rules, variant

__all__ = ["VARIANTS", "Query", "Rules", "Splitter", "chunk_ends", "find_rules", "variant"]
