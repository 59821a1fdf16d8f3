"""Trains on recorded groups, each rank on its share, and writes the weights: run by `test_ranks` under launchers."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[2]))  # launchers put this file's own folder there

from configs.environment import set_defaults

set_defaults()

import torch  # noqa: E402

from agent.models import resolve_model  # noqa: E402
from configs.schema import RLConfig, RolloutConfig, RunConfig, RuntimeConfig, TrainConfig  # noqa: E402
from data.types import Sampling, TurnKey  # noqa: E402
from rl.losses import Scale, policy_loss  # noqa: E402
from runtime.rollplex import Rollplex  # noqa: E402
from tests.runtime.support import load_tiny, random_group, random_prompt, vocabulary_of  # noqa: E402

REWARDS = [1.0, 0.0, 0.5]
LENGTHS = [[3, 1], [6, 2, 4], [1]]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--local_rank")
    parser.add_argument("--cache", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--groups", type=int, required=True)
    parser.add_argument("--stage", type=int, default=2)
    parser.add_argument("--save", type=Path, help="a checkpoint's folder")
    parser.add_argument("--decode", action="store_true", help="start vLLM everywhere, and decode on rank 0 alone")
    options = parser.parse_args()
    config = RunConfig(
        rollout=RolloutConfig(max_tokens=8),
        rl=RLConfig(group_size=3, groups_per_step=options.groups, kl_coef=0.1),
        train=TrainConfig(vision_tower="trained"),
        runtime=RuntimeConfig(zero_stage=options.stage, microbatch_tokens=64),
    )
    folder = resolve_model(config.model.path, options.cache)
    model = load_tiny(options.cache, torch.float32)
    with Rollplex(config, folder, vocabulary_of(model)) as runtime:
        for step in range(2):
            generator = torch.Generator().manual_seed(step)
            groups = [random_group(model, generator, index, LENGTHS, REWARDS) for index in range(options.groups)]
            for group in groups[runtime.rank :: runtime.world_size]:
                runtime.train_on(group, policy_loss(config.rl, group, Scale(24)))
            # Where a gradient is as small as Adam's epsilon, rounding shows in the step: 1e-6 is 1 % of this rate.
            runtime.update(1e-4)
        if options.save:
            runtime.save(options.save)
        if options.decode:
            runtime.start()
            if runtime.rank == 0:
                prompt = random_prompt(model, torch.Generator().manual_seed(0), num_text=5)
                runtime.submit(TurnKey(0, 0, 0), prompt, Sampling(max_tokens=4, temperature=1.0), train=False)
                while runtime.has_unfinished():
                    runtime.poll()
        if runtime.rank == 0:
            weights = {name: tensor.detach().clone() for name, tensor in runtime.actor.model.named_parameters()}
            torch.save({"weights": weights, "stats": runtime.stats()}, options.out)


if __name__ == "__main__":
    main()
