"""`python -m benchmarks.peers`: the cases through each library in turns; `README.md` in this folder has the rules."""

import argparse
from pathlib import Path

from benchmarks.peers.cases import CASES, write_weights
from benchmarks.peers.report import PAGE, cell, keep, kept, table, write
from benchmarks.peers.run import PEERS, check_out, measure
from benchmarks.shapes import SHAPES


def main() -> None:
    """Measures, prints, and writes the page where all is measured."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.peers", description=__doc__)
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES), help="rows of the table")
    parser.add_argument("--peers", nargs="+", choices=PEERS, default=list(PEERS), help="its columns")
    parser.add_argument("--earlier", metavar="COMMIT", help="measures this commit too, in the column `here, earlier`")
    parser.add_argument("--rounds", type=int, default=7, help="turns that count")
    parser.add_argument("--warm", type=int, default=2, help="turns before, which compile")
    parser.add_argument(
        "--work",
        type=Path,
        default=Path("runs/peers"),
        help="folder of weights, cases, logs, and of the figures of earlier calls, which stand in the table too",
    )
    parser.add_argument("--write", action="store_true", help=f"put the table into docs/{PAGE.name}")
    arguments = parser.parse_args()
    work = arguments.work.resolve()
    if arguments.earlier:
        check_out(arguments.earlier)
    figures = kept(work / "figures.json")
    for name in arguments.cases:
        case = CASES[name]
        weights = write_weights(SHAPES[case.shape], work / case.shape)
        path = case.write(work / name, weights)
        figures[name] = measure(name, path, arguments.peers, arguments.rounds, arguments.warm)
        print(f"{case.title}: " + "; ".join(f"{PEERS[k].title} {cell(one)}" for k, one in figures[name].items()))
        keep(figures, work / "figures.json")
    figures = {name: figures[name] for name in CASES if name in figures}
    print(table(figures))
    if arguments.write:
        write(figures, arguments.rounds)


if __name__ == "__main__":
    main()
