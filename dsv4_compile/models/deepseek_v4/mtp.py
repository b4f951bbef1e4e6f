"""The block of DeepSeek V4 that predicts one token further (MTP), which drafts tokens for the model to verify.

At position p it takes the residual streams that the model has made of token p, before they become one, and the id of
token p + 1, which is known by then; what it predicts is token p + 2:

    x = e_proj(enorm(embed(id of token p + 1))) + h_proj(hnorm(streams of token p))     the first for every stream
    streams = block(x)                                                                  sliding-window attention, MoE
    logits = lm_head(norm(head(streams)))

Embedding and language-model head are the model's own; block, head (streams to one vector), norms and projections are
the MTP block's. To draft a second token it takes its own streams and its first draft in the place of the model's, one
position further. What it then writes to its window cache is a guess too, and is overwritten once the model's streams
of that position are there.

The block is given whole, since what lies beside the attention (hyper-connections, experts) is not built here.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor, nn

from .step import StepState


class MTPBlock(nn.Module):
    """Drafts one token: `forward(input_ids, positions, step, streams) -> (logits, streams)`.

    Args:
        embedding: the model's; ids [T] to [T, hidden].
        lm_head: the model's; [T, hidden] to logits [T, vocab].
        enorm, hnorm: norms over the last dim, of the embedding and of the streams.
        e_proj, h_proj: [..., hidden] to [..., hidden].
        block: `block(streams, input_ids, positions, step) -> streams`, [T, n, hidden] both; its attention layer has
            the index after the model's last one, and is of the sliding-window kind.
        head: streams [T, n, hidden] to [T, hidden].
        norm: the norm before `lm_head`.
    """

    def __init__(
        self,
        *,
        embedding: Callable[[Tensor], Tensor],
        lm_head: Callable[[Tensor], Tensor],
        enorm: nn.Module,
        hnorm: nn.Module,
        e_proj: nn.Module,
        h_proj: nn.Module,
        block: nn.Module,
        head: nn.Module,
        norm: nn.Module,
    ) -> None:
        super().__init__()
        self.embedding = embedding
        self.lm_head = lm_head
        self.enorm = enorm
        self.hnorm = hnorm
        self.e_proj = e_proj
        self.h_proj = h_proj
        self.block = block
        self.head = head
        self.norm = norm

    def forward(self, input_ids: Tensor, positions: Tensor, step: StepState, streams: Tensor) -> tuple[Tensor, Tensor]:
        """Predict the token after the next one.

        Args:
            input_ids: [T] int64, the token after the one at the row's position.
            positions: [T] int64, of the tokens that the streams are of; 0 for padded rows.
            step: step state; of it the sliding-window cache of the block is read.
            streams: [T, n, hidden], of the model or, from the second draft on, of this block.

        Returns:
            logits [T, vocab] of the token two after the row's position, and the block's streams [T, n, hidden].
        """
        embedded: Tensor = self.e_proj(self.enorm(self.embedding(input_ids)))
        mixed = embedded.unsqueeze(1) + self.h_proj(self.hnorm(streams))
        streams = self.block(mixed, input_ids, positions, step)
        logits: Tensor = self.lm_head(self.norm(self.head(streams)))
        return logits, streams
