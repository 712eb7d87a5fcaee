"""Block sizes used when the caller gives none."""

from kernels.layout import cdiv

_ROWS_PER_BLOCK = 512
_KEYS_PER_BLOCK = 512


def default_num_queries_per_block(num_tokens: int, num_heads: int) -> int:
    """Queries whose (padded) heads together make 512 rows of the score matrix, and no more than there are tokens.

    512 rows keep a matrix unit busy for longer than it takes to load the next weights; more would only grow VMEM.
    """
    return max(1, min(_ROWS_PER_BLOCK // num_heads, num_tokens))


def default_num_kv_pages_per_block(page_size: int, pages_per_sequence: int) -> int:
    """Pages that together hold 512 keys, and no more than a sequence's page table holds.

    512 keys hide the latency of a page's copy behind the block before it, for pages of any size.
    """
    return max(1, min(_KEYS_PER_BLOCK // page_size, pages_per_sequence))


def even_queries_per_block(q_len: int, limit: int) -> int:
    """The size that cuts q_len queries into the fewest blocks of at most `limit`, with the fewest unused rows."""
    return cdiv(q_len, cdiv(q_len, limit))
