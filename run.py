"""The command line: reads a config, sets up logging, hands over, and turns errors into messages and exit codes.

Knows nothing about what a command does. Exit codes: 0 done, 1 our error, 2 the user's, 128 + signal when interrupted.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import shlex
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from configs.environment import set_defaults
from configs.errors import RunInterrupted, UserError
from configs.load import load_config
from configs.schema import RunConfig

logger = logging.getLogger(__name__)


def train(config: RunConfig, args: argparse.Namespace) -> None:
    from rl.trainer import train as train_command

    train_command(config)


def evaluate(config: RunConfig, args: argparse.Namespace) -> None:
    if args.compare:
        from rl.scores import compare

        print(json.dumps(compare(*map(Path, args.compare)), indent=2))
        return
    from rl.evaluate import evaluate_command

    print(json.dumps(evaluate_command(config, args.checkpoint, args.policy, args.videos), indent=2))


def plan(config: RunConfig, args: argparse.Namespace) -> None:
    from agent.models import resolve_model
    from runtime import memory

    with tempfile.TemporaryDirectory() as cache:
        model_dir = resolve_model(config.model.path, Path(cache))
        train_tower = config.train.vision_tower == "trained"
        shape = memory.model_shape(model_dir, config.model.dtype, train_tower=train_tower)
    table = memory.plan(config, shape, world_size=int(os.environ.get("WORLD_SIZE", "1")))
    print(table.to_json() if args.json else table.table())
    if config.runtime.hbm_bytes:
        table.check(config.runtime.hbm_bytes)


def doctor(config: RunConfig, args: argparse.Namespace) -> None:
    from rl.doctor import doctor_command, require_parity

    found = doctor_command(config)
    print(json.dumps(found.to_dict()) if args.json else found.table())
    require_parity(found)


def bench_env(config: RunConfig, args: argparse.Namespace) -> None:
    from bench.env_rate import measure, measure_bare, measure_pool

    report: dict[str, Any] = {"env": config.env.id, "options": config.env.options}
    if config.env.python or config.env.address:
        logger.info("env.python or env.address is set: only the pool is measured, not the simulator by itself")
    else:
        report = measure(config.env.id, args.seconds, **config.env.options)
        report["bare"] = measure_bare(config.env, args.seconds)
    report["pool"] = measure_pool(config.env, args.seconds)
    print(json.dumps(report, indent=None if args.json else 2))


def data_check(config: RunConfig, args: argparse.Namespace) -> None:
    from transformers import AutoTokenizer

    from agent.models import resolve_model
    from data.check import check_sets, require_allowed

    with tempfile.TemporaryDirectory() as cache:
        tokenizer = AutoTokenizer.from_pretrained(resolve_model(config.model.path, Path(cache)))
    report = check_sets(config, lambda texts: [len(ids) for ids in tokenizer(list(texts))["input_ids"]])
    print(json.dumps(report.to_dict(config.data), indent=2) if args.json else report.text())
    require_allowed(report, config.data)


def bench_schedules(config: RunConfig, args: argparse.Namespace) -> None:
    from bench.schedules import compare, table

    clip = tuple(int(size) for size in args.clip.split("x"))
    result = compare(config, args.repeats, args.arms.split(","), clip)
    print(json.dumps(result) if args.json else table(result))


def bench_device(config: RunConfig, args: argparse.Namespace) -> None:
    from bench.device import Options, compare, shaped, table
    from bench.measure import Arm

    options = Options(
        arms=[Arm.parse(name) for name in args.arms.split(",")],
        clip=[int(size) for size in args.clip.split("x")],
        repeats=args.repeats,
        warmup=args.warmup,
        unshared_groups=args.unshared_groups,
        long_tail=args.long_tail,
        trace=args.trace,
        command=shlex.join(["run.py", *_without_paths(sys.argv[1:])]),
        folder=args.out,
    )
    config = shaped(
        config, groups=args.groups, group_size=args.group_size, response=args.response, long_tail=args.long_tail
    )
    result = compare(config, options, lambda line: print(line, flush=True))
    print(json.dumps(result) if args.json else table(result))


def _without_paths(words: Sequence[str]) -> list[str]:
    """A command line without where its output goes, which means nothing on another machine."""
    kept, skip = [], False
    for word in words:
        option, joined, _ = word.partition("=")
        is_path = option in ("--out", "--trace")
        if not skip and not is_path:
            kept.append(word)
        skip = is_path and not joined
    return kept


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return the process's exit code."""
    args = parse_arguments(sys.argv[1:] if argv is None else argv)
    set_up_logging()
    try:
        config = load_config(args.config, args.overrides) if args.config else RunConfig()
        set_defaults(config.model.path)  # before the command imports torch, vLLM and the rest
        args.command(config, args)
    except UserError as error:
        if args.traceback:
            raise
        print(f"error: {error}", file=sys.stderr)
        return 2
    except RunInterrupted as interruption:
        print(f"interrupted: {interruption}", file=sys.stderr)
        return 128 + interruption.signum
    except KeyboardInterrupt:
        print("interrupted: before a run had begun, so no checkpoint was written", file=sys.stderr)
        return 130
    return 0


def parse_arguments(argv: Sequence[str]) -> argparse.Namespace:
    """Options and overrides may come in any order; a usage error exits with 2."""
    parser = argparse.ArgumentParser(prog="run.py", description="Train and evaluate vision-language agents.")
    parser.add_argument("--local_rank", help=argparse.SUPPRESS)  # DeepSpeed's launcher gives it; LOCAL_RANK counts
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    _add_command(commands, train, "train", "warm start, reinforcement learning, evaluation before and after")
    purpose = "success, SPL and videos on held-out episodes"
    eval_parser = _add_command(commands, evaluate, "eval", purpose, needs_config=False)
    eval_parser.add_argument(
        "--checkpoint", metavar="DIR", help="a checkpoint, run or Hugging Face folder to evaluate (default: model.path)"
    )
    eval_parser.add_argument("--policy", choices=["model", "expert", "random"], default="model", help="who acts")
    eval_parser.add_argument(
        "--videos", type=int, metavar="N", help="write the first N episodes (default: eval.videos)"
    )
    eval_parser.add_argument(
        "--compare",
        nargs=2,
        metavar=("A", "B"),
        help="compare two results.json, or folders of one, and do nothing else",
    )
    plan_parser = _add_command(commands, plan, "plan", "what every phase needs of the device's memory; needs no device")
    plan_parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    purpose = "whether vLLM and the trainer see and compute the same, on a few prompts of the run"
    doctor_parser = _add_command(commands, doctor, "doctor", purpose)
    doctor_parser.add_argument("--json", action="store_true", help="print one JSON object instead of a table")
    bench_parser = commands.add_parser("bench", help="the speed of one part by itself")
    parts = bench_parser.add_subparsers(title="parts", metavar="PART", required=True)
    env_parser = _add_command(parts, bench_env, "env", "steps a second of one environment on one core")
    env_parser.add_argument("--seconds", type=float, default=5.0, help="how long to step (default: %(default)s)")
    env_parser.add_argument("--json", action="store_true", help="print one line instead of several")
    data_parser = commands.add_parser("data", help="the sets of questions about videos")
    subjects = data_parser.add_subparsers(title="actions", metavar="ACTION", required=True)
    check_parser = _add_command(subjects, data_check, "check", "every row that cannot be used, and why; loads no model")
    check_parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    schedules_parser = _add_command(parts, bench_schedules, "schedules", "the four schedules on identical work")
    schedules_parser.add_argument("--repeats", type=int, default=3, help="steps after a warm-up (default: %(default)s)")
    arms = "unshared,serial,overlapped,streamed"
    schedules_parser.add_argument("--arms", default=arms, help="schedules, the first to compare with (%(default)s)")
    schedules_parser.add_argument("--clip", default="8x112x112", help="frames x height x width (default: %(default)s)")
    schedules_parser.add_argument("--json", action="store_true", help="print one JSON object as the last line")
    _add_device_options(_add_command(parts, bench_device, "device", "ways of doing a step on identical work, in full"))
    args, extra = parser.parse_known_args(argv)
    # argparse gives up on positional arguments that come after an option
    if unknown := [word for word in extra if word.startswith("-")]:
        parser.error(f"unknown option {unknown[0]}; overrides have no dashes: section.field=value")
    args.overrides += extra
    if args.config is None and args.overrides:  # and on an optional one at the first option
        args.config = args.overrides.pop(0)
    if args.config is None and not args.compare:
        parser.error("eval needs a CONFIG, or --compare A B")
    return args


def _add_device_options(parser: argparse.ArgumentParser) -> None:
    arms = "unshared,plain,serial,overlapped,streamed,serial+reuse,overlapped+reuse,streamed+reuse"
    parser.add_argument(
        "--arms",
        default=arms,
        help="schedules with +reuse (prefill once) or +smsN (a partition for the window), and plain, which is unshared "
        "with plain kernels; the first to compare with (%(default)s)",
    )
    parser.add_argument("--groups", type=int, metavar="N", help="groups of a step (default: rl.groups_per_step)")
    parser.add_argument("--group-size", type=int, metavar="N", help="responses of a group (default: rl.group_size)")
    parser.add_argument("--clip", default="8x112x112", help="frames x height x width (default: %(default)s)")
    lengths = parser.add_mutually_exclusive_group()
    lengths.add_argument("--response", type=int, metavar="N", help="tokens of each (default: rollout.max_tokens)")
    lengths.add_argument("--long-tail", action="store_true", help="64 to 2048 tokens, 256 on average, seeded")
    parser.add_argument(
        "--unshared-groups",
        type=int,
        metavar="N",
        help="groups that unshared and plain train on, scaled (default: all)",
    )
    parser.add_argument("--repeats", type=int, default=1, help="timed steps of an arm (default: %(default)s)")
    parser.add_argument("--warmup", type=int, default=1, help="untimed steps before them (default: %(default)s)")
    parser.add_argument(
        "--trace", type=Path, metavar="PATH", help="write a timeline of an overlapped step, and a picture"
    )
    results = Path(__file__).parent / "bench" / "results"
    parser.add_argument("--out", type=Path, metavar="DIR", default=results, help="of the result (bench/results)")
    parser.add_argument("--json", action="store_true", help="print one JSON object as the last line")


def _add_command(
    commands: argparse._SubParsersAction[argparse.ArgumentParser],
    command: Callable[[RunConfig, argparse.Namespace], None],
    name: str,
    purpose: str,
    *,
    needs_config: bool = True,
) -> argparse.ArgumentParser:
    parser = commands.add_parser(name, help=purpose, description=purpose)
    parser.set_defaults(command=command)
    parser.add_argument("config", nargs=None if needs_config else "?", metavar="CONFIG", help="a YAML file")
    parser.add_argument("overrides", metavar="section.field=value", nargs="*", help="fields to set, as in rl.kl_coef=0")
    parser.add_argument("--traceback", action="store_true", help="show where a user error was raised")
    return parser


def set_up_logging() -> None:
    """INFO from rank 0, warnings from the others, each line with its rank."""
    rank = os.environ.get("RANK", "0")
    logging.basicConfig(
        level=logging.INFO if rank == "0" else logging.WARNING,
        format=f"%(asctime)s [rank {rank}] %(levelname)s %(name)s: %(message)s",
        datefmt="%H:%M:%S",
    )


if __name__ == "__main__":
    sys.exit(main())
