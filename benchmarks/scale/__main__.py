"""`python -m benchmarks.scale`: what more devices, more processes and sampling beside learning give, and cost.

Without a part, all of them: `runs` (six runs of a tiny SFT and of a tiny GRPO, some minutes), `exchanges` (a minute),
`handover` (needs Linux, and ten times `--gigabytes` of memory), `overlap` (some minutes, mostly asleep) and
`simulation` (a minute).
"""

import argparse
import importlib
import os

from rich.console import Console

PARTS = ("runs", "exchanges", "handover", "overlap", "simulation")


def main() -> None:
    """Runs the parts that are named."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.scale", description=__doc__)
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"of {', '.join(PARTS)}; all without any")
    parser.add_argument("--gigabytes", type=float, default=0.25, help="float32 weights that `handover` moves")
    parser.add_argument("--steps", type=int, default=120, help="steps of `overlap` and `simulation`")
    parser.add_argument(
        "--topology", help="devices of `exchanges`, as in `tunix plan`: v5e:2x2, h100:4; the CPU's without"
    )
    arguments = parser.parse_args()
    if unknown := set(arguments.parts) - set(PARTS):
        parser.error(f"{', '.join(sorted(unknown))}: parts are {', '.join(PARTS)}")
    console = Console(width=150)
    settings = {"handover": {"gigabytes": arguments.gigabytes}, "runs": {}, "exchanges": {"name": arguments.topology}}
    for name in arguments.parts or PARTS:
        part = importlib.import_module(f"benchmarks.scale.{name}")
        part.show(console, **settings.get(name, {"steps": arguments.steps}))
    load = ", ".join(f"{one:.1f}" for one in os.getloadavg())
    console.print(f"{os.cpu_count()} cores, load averages {load}")


if __name__ == "__main__":
    main()
