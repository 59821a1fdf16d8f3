"""Many episodes with random crashes, hangs and slow steps: none is forgotten, nothing grows."""

from __future__ import annotations

import pytest

from bench.soak import soak


def check(report: dict, episodes: int) -> None:
    assert report["episodes"] == report["finished"] + report["lost"] == episodes
    assert report["restarts"] > 0
    assert report["lost"] <= episodes // 200
    assert report["wrong_starts"] == 0
    assert report["open_files"][1] <= report["open_files"][0] + 2
    assert report["rss_mib"][-1] < report["rss_mib"][1] + 16
    assert report["worker_rss_mib"] < 90  # Python, numpy and four small worlds are 58


@pytest.mark.timeout(120)
def test_three_hundred_episodes() -> None:
    check(soak(300, crash=2e-3, hang=2e-4), 300)


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_ten_thousand_episodes() -> None:
    check(soak(10_000), 10_000)
