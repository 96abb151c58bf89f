"""A stack of blocks whose activations can be recomputed in backward."""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint


class Blocks(nn.Sequential):
    """Blocks one after the other; with ``recompute``, backward computes each again instead of keeping it."""

    def __init__(self, blocks: Iterable[nn.Module], *, recompute: bool) -> None:
        super().__init__(*blocks)
        self.recompute = recompute

    def forward(self, hidden: Tensor) -> Tensor:
        """Return what the last block makes of ``hidden``."""
        for block in self:
            if self.recompute and self.training:
                hidden = checkpoint(block, hidden, use_reentrant=False)
            else:
                hidden = block(hidden)
        return hidden
