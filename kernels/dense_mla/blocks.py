"""Block sizes used when the caller gives none."""

import jax.numpy as jnp
from jax.typing import DTypeLike

from kernels.layout import cdiv


def _side_of_scores(dot_dtype: DTypeLike) -> int:
    """Rows, and keys, of the score matrix of a block.

    512 rows keep a matrix unit busy for longer than it takes to load the next weights, and 512 keys hide the latency of
    a copy behind the block before. Dots of float32 inputs take several passes, so half of it does, and fits in VMEM.
    """
    return 256 if dot_dtype == jnp.float32 else 512


def default_num_queries_per_block(num_tokens: int, num_heads: int, dot_dtype: DTypeLike) -> int:
    """Queries whose heads, padded, fill the rows of a block's scores, and no more than there are tokens."""
    return max(1, min(_side_of_scores(dot_dtype) // num_heads, num_tokens))


def default_num_kv_pages_per_block(page_size: int, pages_per_sequence: int, dot_dtype: DTypeLike) -> int:
    """Pages that together fill the keys of a block's scores, and no more than a sequence's page table holds."""
    return max(1, min(_side_of_scores(dot_dtype) // page_size, pages_per_sequence))


def even_queries_per_block(q_len: int, limit: int) -> int:
    """The size that cuts q_len queries into the fewest blocks of at most `limit`, with the fewest unused rows."""
    return cdiv(q_len, cdiv(q_len, limit))
