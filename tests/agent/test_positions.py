from __future__ import annotations

from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from agent.positions import mrope_positions

IMAGE, VIDEO, TEXT = 7, 8, 1
Block = tuple[int, tuple[int, int, int], float]
"""Placeholder token, grid before the merge, seconds per grid step."""


def positions(
    token_ids: list[int], blocks: list[Block], merge: int = 2, tokens_per_second: float = 2.0
) -> list[list[int]]:
    grids, seconds = [grid for _, grid, _ in blocks], [seconds for _, _, seconds in blocks]
    return mrope_positions(token_ids, IMAGE, VIDEO, grids, seconds, merge, tokens_per_second).tolist()


def num_tokens(grid: tuple[int, int, int], merge: int = 2) -> int:
    return grid[0] * grid[1] * grid[2] // merge**2


def lay_out(texts: list[int], blocks: list[Block]) -> list[int]:
    """Text, block, text, block, ..., text."""
    ids = [TEXT] * texts[0]
    for (token, grid, _), num_text in zip(blocks, texts[1:], strict=True):
        ids += [token] * num_tokens(grid) + [TEXT] * num_text
    return ids


def test_text_alone_counts_up_on_all_axes() -> None:
    assert positions([1, 2, 3], []) == [[0, 1, 2]] * 3


def test_time_of_a_video_advances_by_seconds_times_tokens_per_second() -> None:
    # Two steps of 1 s at 2 tokens a second, 1 x 2 merged patches; then text at max() + 1 = 1 + 2 + 1.
    ids = [TEXT, VIDEO, VIDEO, VIDEO, VIDEO, TEXT, TEXT]
    assert positions(ids, [(VIDEO, (2, 2, 4), 1.0)]) == [
        [0, 1, 1, 3, 3, 4, 5],
        [0, 1, 1, 1, 1, 4, 5],
        [0, 1, 2, 1, 2, 4, 5],
    ]


def test_text_resumes_after_the_longest_axis_of_a_video_be_it_time_or_width() -> None:
    long = positions([VIDEO] * 3 + [TEXT], [(VIDEO, (3, 2, 2), 2.0)])
    wide = positions([VIDEO] * 3 + [TEXT], [(VIDEO, (1, 2, 6), 2.0)])
    assert [axis[-1] for axis in long] == [9, 9, 9]  # times 0, 4, 8
    assert [axis[-1] for axis in wide] == [3, 3, 3]  # columns 0, 1, 2


def test_time_between_two_positions_is_rounded_down() -> None:
    # 0.4 s at 2 tokens a second: 0, 0.8, 1.6, 2.4.
    assert positions([VIDEO] * 4, [(VIDEO, (4, 2, 2), 0.4)])[0] == [0, 0, 1, 2]


def test_adjacent_blocks_and_an_image_between_videos() -> None:
    blocks: list[Block] = [(VIDEO, (1, 2, 4), 1.0), (IMAGE, (1, 4, 2), 1.0), (VIDEO, (2, 2, 2), 1.0)]
    assert positions(lay_out([0, 0, 1, 0], blocks), blocks) == [
        [0, 0, 2, 2, 4, 5, 7],
        [0, 0, 2, 3, 4, 5, 5],
        [0, 1, 2, 2, 4, 5, 5],
    ]


@pytest.mark.parametrize("token_ids", [[TEXT], [VIDEO, TEXT], [VIDEO, TEXT, VIDEO], [VIDEO, VIDEO, VIDEO]])
def test_placeholders_that_do_not_match_the_grid_are_refused(token_ids: list[int]) -> None:
    with pytest.raises(ValueError, match="grid"):
        positions(token_ids, [(VIDEO, (1, 2, 4), 1.0)])


sizes = st.integers(1, 4)
seconds = st.sampled_from([1 / 3, 0.4, 1.0, 1.4, 2.0]).map(lambda value: float(np.float32(value)))
videos = st.tuples(st.just(VIDEO), st.tuples(sizes, sizes.map(lambda h: 2 * h), sizes.map(lambda w: 2 * w)), seconds)
images = st.tuples(st.just(IMAGE), st.tuples(st.just(1), st.just(4), sizes.map(lambda w: 2 * w)), st.just(1.0))
block_lists = st.lists(videos | images, max_size=3)


def walked_positions(texts: list[int], blocks: list[Block]) -> list[list[int]]:
    """One token after another, by the definition."""
    tokens = [(step, step, step) for step in range(texts[0])]
    start = texts[0]
    for (_, (time, height, width), step_s), num_text in zip(blocks, texts[1:], strict=True):
        block = [
            (start + int(t * (step_s * 2.0)), start + h, start + w)
            for t in range(time)
            for h in range(height // 2)
            for w in range(width // 2)
        ]
        start = max(max(token) for token in block) + 1
        tokens += block + [(start + step,) * 3 for step in range(num_text)]
        start += num_text
    return [[token[axis] for token in tokens] for axis in range(3)]


@given(blocks=block_lists, data=st.data())
def test_positions_equal_a_walk_over_the_tokens(blocks: list[Block], data: st.DataObject) -> None:
    texts = data.draw(st.lists(st.integers(0, 3), min_size=len(blocks) + 1, max_size=len(blocks) + 1))
    assert positions(lay_out(texts, blocks), blocks) == walked_positions(texts, blocks)


@pytest.mark.slow
@given(blocks=block_lists, data=st.data())
def test_positions_equal_vllms(blocks: list[Block], data: st.DataObject) -> None:
    model = pytest.importorskip("vllm.model_executor.models.qwen2_5_vl").Qwen2_5_VLForConditionalGeneration
    texts = data.draw(st.lists(st.integers(1, 3), min_size=len(blocks) + 1, max_size=len(blocks) + 1))
    vision = SimpleNamespace(spatial_merge_size=2, tokens_per_second=2)
    stand_in = SimpleNamespace(config=SimpleNamespace(vision_config=vision))
    stand_in.iter_mm_grid_thw = partial(model.iter_mm_grid_thw, stand_in)
    features, offset = [], texts[0]
    for (token, grid, step_s), num_text in zip(blocks, texts[1:], strict=True):
        kind = "image" if token == IMAGE else "video"
        entries = {
            f"{kind}_grid_thw": SimpleNamespace(data=torch.tensor(grid)),
            "second_per_grid_ts": SimpleNamespace(data=torch.tensor(step_s, dtype=torch.float32)),
        }
        features.append(SimpleNamespace(modality=kind, mm_position=SimpleNamespace(offset=offset), data=entries))
        offset += num_tokens(grid) + num_text
    token_ids = lay_out(texts, blocks)
    theirs, delta = model.get_mrope_input_positions(stand_in, token_ids, features)
    assert positions(token_ids, blocks) == theirs.tolist()
    assert max(max(axis) for axis in theirs.tolist()) + 1 - len(token_ids) == delta
