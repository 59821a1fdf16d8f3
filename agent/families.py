"""What differs between families of vision-language models: names of types and tokens, and how video time is told.

The only module to touch for a further family. Knows nothing about tensors, tokenizers or observations.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from configs.errors import ConfigError


@dataclass(frozen=True)
class Family:
    """Names and conventions shared by all sizes of one family. This base class is how Qwen2.5-VL does it."""

    model_type: str
    """`model_type` of its config.json."""
    architecture: str
    """Entry of `architectures` in its config.json."""
    image_token: str = "<|image_pad|>"
    video_token: str = "<|video_pad|>"
    end_of_turn: str = "<|im_end|>"

    def video_text(self, grid_thw: tuple[int, int, int], *, merge: int, temporal_patch: int, fps: float) -> str:
        """What one `video_token` of the chat template becomes, given the video's grid before the spatial merge."""
        time, height, width = grid_thw
        return self.video_token * (time * height * width // merge**2)

    def position_grids(self, grid_thw: tuple[int, int, int]) -> tuple[tuple[int, int, int], ...]:
        """Grids of a video's unbroken runs of placeholders, in their order in the prompt."""
        return (grid_thw,)

    def pixel_bounds(self, min_pixels: int, max_pixels: int, num_frames: int) -> dict[str, int]:
        """The video processor's `size`, from bounds on one frame's area (pixels)."""
        return {"shortest_edge": min_pixels, "longest_edge": max_pixels}


@dataclass(frozen=True)
class TimestampFamily(Family):
    """Qwen3-VL: time is written as text before each temporal patch, and pixels are bounded per video."""

    vision_start: str = "<|vision_start|>"
    vision_end: str = "<|vision_end|>"

    def video_text(self, grid_thw: tuple[int, int, int], *, merge: int, temporal_patch: int, fps: float) -> str:
        time, height, width = grid_thw
        patch = self.vision_start + self.video_token * (height * width // merge**2) + self.vision_end
        middles = [
            (index + (temporal_patch - 1) / 2) / fps for index in range(0, time * temporal_patch, temporal_patch)
        ]
        return "".join(f"<{middle_s:.1f} seconds>{patch}" for middle_s in middles)

    def position_grids(self, grid_thw: tuple[int, int, int]) -> tuple[tuple[int, int, int], ...]:
        time, height, width = grid_thw
        return ((1, height, width),) * time

    def pixel_bounds(self, min_pixels: int, max_pixels: int, num_frames: int) -> dict[str, int]:
        return {"shortest_edge": min_pixels * num_frames, "longest_edge": max_pixels * num_frames}


QWEN2_5_VL = Family("qwen2_5_vl", "Qwen2_5_VLForConditionalGeneration")
QWEN3_VL = TimestampFamily("qwen3_vl", "Qwen3VLForConditionalGeneration")

FAMILIES = {family.model_type: family for family in (QWEN2_5_VL, QWEN3_VL)}


def family_of(model_config: Mapping[str, Any]) -> Family:
    """Family of a parsed config.json.

    Raises:
        ConfigError: no family here has this model type and architecture.
    """
    model_type = model_config.get("model_type")
    architectures = model_config.get("architectures") or []
    family = FAMILIES.get(str(model_type))
    if family is None or not isinstance(architectures, list) or family.architecture not in architectures:
        supported = ", ".join(f"{known.architecture} ({known.model_type})" for known in FAMILIES.values())
        raise ConfigError(
            f"architecture {architectures} of model type {model_type!r} is not supported. Use one of: {supported}."
        )
    return family
