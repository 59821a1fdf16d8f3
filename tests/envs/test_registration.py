from __future__ import annotations

import pytest

from configs.schema import EnvConfig
from envs.registration import heldout_manifest, make_env
from envs.rooms import RoomsEnv
from tests.envs.fake_envs import CountingEnv


def test_environments_are_made_by_name_or_by_class() -> None:
    assert isinstance(make_env(EnvConfig(options={"num_rooms": 1})), RoomsEnv)
    assert isinstance(make_env(EnvConfig(id="tests.envs.fake_envs:CountingEnv")), CountingEnv)


@pytest.mark.parametrize(
    ("env_id", "options", "message"),
    [
        ("romms", {}, "unknown env.id 'romms': did you mean 'rooms'"),
        ("xyz", {}, "known: habitat, miniworld, mujoco_rooms, rooms; or give a gymnasium id"),
        ("no.such.module:Env", {}, "cannot import 'no.such.module'"),
        ("tests.envs.fake_envs:Missing", {}, "has no 'Missing'"),
        ("tests.envs.fake_envs:NotAnEnv", {}, "derive it from that"),
        ("rooms", {"num_room": 2}, "did you mean num_rooms"),
        ("tests.envs.fake_envs:CountingEnv", {"size": 3}, "unexpected keyword argument 'size'"),
    ],
)
def test_what_cannot_be_made_is_named(env_id: str, options: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make_env(EnvConfig(id=env_id, options=options))


def test_manifest_is_fixed_unique_and_held_out() -> None:
    config = EnvConfig()
    manifest = heldout_manifest(config, 200, seed=7)
    assert manifest == heldout_manifest(config, 200, seed=7)
    assert manifest[:50] == heldout_manifest(config, 50, seed=7)
    assert manifest != heldout_manifest(config, 200, seed=8)
    assert len({episode.id for episode in manifest}) == len({episode.seed for episode in manifest}) == 200
    assert {episode.split for episode in manifest} == {"heldout"}


def test_a_listed_manifest_is_drawn_without_repeats_and_keyed_by_scene_and_id() -> None:
    listed = [(scene, str(number)) for scene in ("attic", "barn") for number in range(4)]
    manifest = heldout_manifest(EnvConfig(id="habitat"), 5, 3, listed)
    assert len({(episode.scene, episode.id) for episode in manifest}) == 5
    assert all(listed[episode.seed] == (episode.scene, episode.id) for episode in manifest)
    assert manifest == heldout_manifest(EnvConfig(id="habitat"), 5, 3, listed)
    assert len(heldout_manifest(EnvConfig(id="habitat"), 50, 3, listed)) == 8
