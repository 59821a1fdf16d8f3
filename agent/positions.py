"""M-RoPE positions: where in time, height and width each token of a prompt stands.

Our own, because `transformers` 5.16-5.24 resumes text after a video too early; this follows vLLM and the way
Qwen2.5-VL was trained. Knows nothing about models or processors.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import torch
from jaxtyping import Int
from torch import Tensor


def mrope_positions(
    token_ids: Sequence[int],
    image_token: int,
    video_token: int,
    grids: Iterable[tuple[int, int, int]],
    seconds_per_grid: Iterable[float],
    merge: int,
    tokens_per_second: float,
) -> Int[Tensor, "3 token"]:
    """Positions of a prompt whose media placeholders are expanded.

    Text advances all three axes together. A block of placeholders spans its grid, counted from the position after the
    text before it; time advances by `seconds * tokens_per_second` a step, rounded down. Text after a block resumes at
    one past the block's largest position on any axis:

        token    a  b  v  v  v  v  c      (v: a video of 1 x 2 x 2 merged patches)
        time     0  1  2  2  2  2  4
        height   0  1  2  2  3  3  4
        width    0  1  2  3  2  3  4

    Args:
        grids: patches in time, height and width of each block, before the spatial merge, in the prompt's order.
        seconds_per_grid: video time between two steps of each block's temporal grid (s); an image has one step.
        merge: patches merged into one token along height and along width (count).
        tokens_per_second: positions that a second of video takes.

    Raises:
        ValueError: placeholders and grids do not account for each other.
    """
    ids = np.asarray(token_ids)
    is_media = (ids == image_token) | (ids == video_token)
    positions = np.empty((3, len(ids)), dtype=np.int64)
    next_position = start = 0
    for (time, height, width), seconds in zip(grids, seconds_per_grid, strict=True):
        ahead = np.flatnonzero(is_media[start:])
        block_start = start + int(ahead[0]) if len(ahead) else len(ids)
        block = np.indices((time, height // merge, width // merge)).reshape(3, -1)  # (3, token)
        block_end = block_start + block.shape[1]
        if block_end > len(ids) or not is_media[block_start:block_end].all():
            raise ValueError(
                f"grid {time, height, width} has {block.shape[1]} tokens: more than the prompt has for it."
            )
        num_text = block_start - start
        positions[:, start:block_start] = np.arange(next_position, next_position + num_text)
        next_position += num_text
        block[0] = (block[0] * (seconds * tokens_per_second)).astype(np.int64)
        positions[:, block_start:block_end] = block + next_position
        next_position += int(block.max()) + 1
        start = block_end
    if is_media[start:].any():
        raise ValueError(f"{int(is_media[start:].sum())} media placeholders of the prompt belong to no grid.")
    positions[:, start:] = np.arange(next_position, next_position + len(ids) - start)
    return torch.from_numpy(positions)
