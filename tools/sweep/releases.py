"""Since when does a model type leak? TRL's own packs on the installed transformers: docs/leaks_by_release.csv and .md.

PYTHONPATH=tools python -m sweep.releases --output docs   # adds the column of this release: 4 CPU minutes

For another release, install it beside the environment of the tests, here into the folder `old`. From 5.18 on it needs
transformers alone; before, the TRL and the others of its day, and before 5.16 tokenizers==0.22.1, too:

pip install --no-deps --target old transformers==5.16.0 trl==1.9.0 accelerate==1.13.0 peft==0.20.0 datasets==4.8.4 \\
    fsspec==2024.5.0 huggingface_hub==1.17.0 httpx httpcore h11 anyio sniffio idna certifi
PYTHONPATH=old:tools python -m sweep.releases --output docs

No probe and no repair takes part: the model is as transformers builds it, and batches are those of the installed TRL.
"""

import argparse
import csv
import signal
from collections import Counter
from collections.abc import Iterable
from itertools import pairwise
from pathlib import Path

import transformers

from . import zoo
from .judge import Judge, packed_by_trl, settle_process

PAGE = "leaks_by_release.md"
TABLE = "leaks_by_release.csv"
VERDICTS = ("isolated", "leaks", "refuses", "not judged")
KEY = ("model_type", "kind")
Table = dict[tuple[str, str], dict[str, str]]  # by type and kind: release -> verdict


def read(file: Path) -> Table:
    """Return the table in a file; empty without one."""
    if not file.exists():
        return {}
    with file.open(newline="") as lines:
        rows = list(csv.DictReader(lines))
    return {(row["model_type"], row["kind"]): {k: v for k, v in row.items() if k not in KEY} for row in rows}


def releases_of(table: Table) -> list[str]:
    """Return the releases in a table, from old to new."""
    found = {release for row in table.values() for release, verdict in row.items() if verdict}
    return sorted(found, key=lambda text: [int(part) for part in text.split(".")])


def write(table: Table, file: Path) -> None:
    """Write a table, releases from old to new. A cell is empty if the release has no such type, or it did not run."""
    releases = releases_of(table)
    with file.open("w", newline="") as lines:
        writer = csv.writer(lines, lineterminator="\n")
        writer.writerow([*KEY, *releases])
        for key in sorted(table, key=lambda key: (key[1], key[0])):
            writer.writerow([*key, *(table[key].get(release, "") for release in releases)])


def changes(table: Table, kind: str) -> dict[tuple[str, str, str, str], list[str]]:
    """Return (release, next release, verdict, next verdict) -> the types whose verdict changed there."""
    found: dict[tuple[str, str, str, str], list[str]] = {}
    for old, new in pairwise(releases_of(table)):
        for (name, its_kind), row in sorted(table.items()):
            pair = row.get(old, ""), row.get(new, "")
            if its_kind == kind and pair[0] != pair[1] and not {"", "not judged"} & set(pair):
                found.setdefault((old, new, *pair), []).append(name)
    return found


def page(table: Table) -> str:
    """Return the page of a table."""
    releases = releases_of(table)
    lines = [
        "# Since when does it leak?",
        "",
        "TRL's packs without trl_packfix, by release of transformers, on a tiny random model of each type, judged as "
        "for [compatibility](compatibility.md) (`python -m sweep.releases`). *refuses*: an error on a pack.",
    ]
    rows = [row for (_, kind), row in table.items() if kind == "causal"]
    lines += ["", f"| causal types | {' | '.join(VERDICTS)} |", f"|{'---|' * (1 + len(VERDICTS))}"]
    for release in releases:
        counts = Counter(row.get(release) for row in rows)
        lines.append(f"| {release} | {' | '.join(str(counts[verdict]) for verdict in VERDICTS)} |")
    lines += ["", "| between | change | types |", "|---|---|---|"]
    for (old, new, before, after), names in changes(table, "causal").items():
        lines.append(f"| {old} and {new} | {before} -> {after} | {', '.join(names)} |")
    lines += ["", "## Every type", "", f"From [{TABLE}]({TABLE}), with image-text types. An empty cell: no such type."]
    columns = ",".join([*KEY, *releases])
    lines += ["", f'<div data-table="../{TABLE}" data-columns="{columns}" data-choices="kind,{releases[-1]}"></div>']
    return "\n".join(lines) + "\n"


def judge_types(types: Iterable[tuple[str, str]], file: Path, time_limit: int) -> None:
    """Judge `types` and write each verdict into the table in `file`. A cell that has a verdict is not judged again."""

    def stop(signum: int, frame: object) -> None:
        raise TimeoutError

    signal.signal(signal.SIGALRM, stop)
    release = transformers.__version__
    for key in types:
        table = read(file)
        if table.get(key, {}).get(release):
            continue
        signal.alarm(time_limit)
        try:
            model = zoo.build_model(*key)
            verdict = Judge(model).judge(model, packed_by_trl).of_stock
        except Exception:  # any error of the model's own code
            verdict = "not judged"
        signal.alarm(0)
        print(release, *key, verdict, flush=True)
        table.setdefault(key, {})[release] = verdict
        write(table, file)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m sweep.releases", description=__doc__)
    parser.add_argument("--only", metavar="TYPES", help="these model types only, separated by commas")
    parser.add_argument("--output", metavar="DIR", required=True, help=f"the folder of {TABLE}")
    parser.add_argument("--time-limit", type=int, default=60, help="seconds per model type")
    args = parser.parse_args()
    settle_process()
    names = args.only.split(",") if args.only else None
    chosen = [key for key in zoo.all_types() if names is None or key[0] in names]
    file = Path(args.output) / TABLE
    judge_types(chosen, file, args.time_limit)
    (file.parent / PAGE).write_text(page(read(file)))


if __name__ == "__main__":
    main()
