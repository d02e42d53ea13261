"""What shard_batch put into a batch, for plugins: how the sequence lies on the ranks of cp, its documents and its padding.

    share = current_share()                # in code that runs inside a planned model's forward; None elsewhere
    share.order, share.length, share.documents
    spans(share.order, ranks, rank, share.length)      # the global positions that a rank holds
"""

from .apply.share import ORDERS, Share, current_share, multiple, spans

__all__ = ["ORDERS", "Share", "current_share", "multiple", "spans"]
