"""Make what stands in the tables of this folder; see the package."""

import sys

from analysis.predictions.clusters import fit, holdout, league, memory_holdout, writing


def main(argv: list[str]) -> int:
    commands = {
        "fit": fit.write,
        "holdout": holdout.write,
        "memory": memory_holdout.write,
        "predict": writing.write,
        "league": league.write,
        "outcomes": writing.write_outcomes,
    }
    if len(argv) != 1 or argv[0] not in commands:
        print(f"one of: {', '.join(commands)}", file=sys.stderr)
        return 2
    print(f"{argv[0]}: {commands[argv[0]]()} rows", file=sys.stderr)
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
