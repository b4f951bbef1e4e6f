"""RMS norm for the residual stream.

Note "float constants": with `dynamic=True` Dynamo turns every float attribute into a tensor input and an `.item()`,
made anew on each call. Strings and ints stay constants and fold, so a module keeps a float as its `repr` and a scale
as the ints it comes from.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn


class RMSNorm(nn.Module):
    """x over its root mean square, times a weight, over the last dim; fp32 inside."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = repr(eps)  # see the note "float constants"

    def forward(self, x: Tensor) -> Tensor:
        """[..., width] to [..., width]."""
        return nn.functional.rms_norm(x, self.weight.shape, self.weight, float(self.eps))
