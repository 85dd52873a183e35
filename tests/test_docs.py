"""What README and docs say is so: snippets run, commands and flags exist, links resolve, messages are quoted."""

import csv
import doctest
import importlib
import json
import re
import runpy
import shlex
import tomllib
from dataclasses import fields
from pathlib import Path

import pytest
import torch
import yaml
from support.features import PRESENT, needs
from support.paths import ROOT
from transformers import AutoModelForCausalLM
from trl import ModelConfig, ScriptArguments

import trl_packfix
from trl_packfix import SFTConfig, cli

PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
DEV = [*sorted((ROOT / "dev").glob("*.md")), ROOT / "CONTRIBUTING.md", ROOT / "SECURITY.md", ROOT / "tools/README.md"]
MESSAGES = [text for _, text in runpy.run_path(str(ROOT / "tools/messages.py"))["messages"]()]
TROUBLESHOOTING = (ROOT / "docs/troubleshooting.md").read_text()
QUOTES = re.findall(
    r"^\| `([^`]+)` \|", TROUBLESHOOTING.partition("## By message")[2].partition("## All messages")[0], re.MULTILINE
)


def needed_by(module: str) -> set[str]:
    """Return the feature that has a module of the package, if one has it."""
    return set(re.findall(r"^features/(\w+)", module))


@pytest.mark.parametrize("quote", QUOTES)
def test_a_quoted_message_exists(quote):
    assert any(quote in text for text in MESSAGES), f"no message says {quote!r}: correct docs/troubleshooting.md"


def test_every_message_is_in_the_table_of_the_page():
    with (ROOT / "docs/messages.csv").open(newline="") as file:
        listed = [row["message"] for row in csv.DictReader(file) if needed_by(row["module"]) <= PRESENT]
    assert listed == MESSAGES, "run `python tools/messages.py`"
    assert 'data-table="../messages.csv"' in TROUBLESHOOTING


# Snippets

SNIPPETS = [
    pytest.param(
        page.name,
        code,
        id=f"{page.name}-{code.split()[1]}",
        marks=needs("pack_forward") if "pack_forward" in code else (),
    )
    for page in PAGES
    for code in re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL)
]


@pytest.mark.parametrize("page, code", SNIPPETS)
def test_snippets_run(page, code, capsys):
    exec(compile(code, page, "exec"), {})
    printed = capsys.readouterr().out
    expected = re.findall(r"^print\(.*\) +# (.*)$", code, re.MULTILINE)
    assert not expected or printed.splitlines() == expected


def test_every_benchmark_in_the_results_has_its_csv():
    recorded = [
        next(csv.DictReader(file.open()))["command"] for file in (ROOT / "benchmarks" / "results").glob("*.csv")
    ]
    scripts = re.findall(
        r"`python (benchmarks/\w+\.py)[^`]*` \|$", (ROOT / "docs/results.md").read_text(), re.MULTILINE
    )
    assert len(set(scripts)) >= 15
    assert [script for script in scripts if not any(f"python {script}" in command for command in recorded)] == []


def quick(code: str) -> str:
    assert code.count("packing=True") == 1
    return code.replace("packing=True", "packing=True, use_cpu=True, bf16=False, max_steps=1, max_length=64")


def test_the_first_lines_of_the_readme_are_those_of_an_example():
    """`tests/test_examples.py` runs it."""
    diff = re.search(r"```diff\n-(.*)\n\+(.*)\n\n((?: .*\n)+)```", (ROOT / "README.md").read_text())
    stock, ours, unchanged_lines = diff.groups()  # one line is swapped
    unchanged_lines = re.sub("^ ", "", unchanged_lines, flags=re.MULTILINE)
    assert f"\n{ours}  # was: {stock}\n\n{unchanged_lines}" in (ROOT / "examples/minimal.py").read_text()


def line_shapes(text: str) -> dict[str, str]:
    """Return the text of each line of a report by its label, with N for every number."""
    shapes = {}
    label = ""
    for line in text.partition("Packing report\n")[2].splitlines():
        if not line.startswith("  "):
            break
        begins = re.match(r"  (\S+(?: \S+)*)  +(\S.*)", line)
        label = begins[1] if begins else label
        shapes[label] = begins[2] if begins else f"{shapes[label]} {line.strip()}"
    return {label: re.sub(r"\d[\d,.]*(?:e[+-]\d+)?", "N", shape) for label, shape in shapes.items()}


def refuse_old_reports(printed: str) -> None:
    """Compare the reports that the documentation shows with one that was printed just now."""
    tour = json.loads((ROOT / "examples" / "tour.ipynb").read_text())
    texts = ["".join(output.get("text", ())) for cell in tour["cells"] for output in cell.get("outputs", ())]
    (of_tour,) = (text for text in texts if text.startswith("Packing report"))
    now = line_shapes(printed)
    in_tour = line_shapes(of_tour)
    in_readme = line_shapes((ROOT / "README.md").read_text())  # in bf16
    for label in ("documents", "micro-batch", "attention"):
        assert in_readme.get(label) == now[label], f"README shows another line `{label}` than is printed"
    for label in ("documents", "micro-batch", "attention", "isolation", "first step"):
        assert in_tour.get(label) == now[label], "the outputs are old: run `python tools/notebook.py`"
    assert "data" in in_tour  # its text depends on the columns of the table
    in_page = re.search(r"^first step +(.*)$", (ROOT / "docs/isolation.md").read_text(), re.MULTILINE)[1]
    assert re.sub(r"\d[\d.]*(?:e[+-]\d+)?", "N", in_page) == now["first step"]


def test_the_quickstart_trains(workplace, monkeypatch, capsys):
    (code,) = re.findall(r"```py\n(.*?)```", (ROOT / "docs/quickstart.md").read_text(), re.DOTALL)
    assert len([line for line in code.splitlines() if line]) <= 10
    monkeypatch.chdir(workplace)
    variables = {}
    exec(code.replace("HuggingFaceTB/SmolLM2-135M-Instruct", "Qwen/Qwen3-0.6B").replace("100", "8"), variables)
    assert variables["trainer"].state.global_step == 5
    assert variables["trainer"].packing_report.isolation.isolated
    refuse_old_reports(capsys.readouterr().out)


def test_what_to_do_after_training_works(workplace, monkeypatch, capsys):
    blocks = re.findall(r"```py\n(.*?)```", (ROOT / "docs/after_training.md").read_text(), re.DOTALL)
    monkeypatch.chdir(workplace)
    variables = {}
    for i, code in enumerate(blocks):
        exec(quick(code) if i == 0 else code, variables)
    assert len(blocks) == 4
    assert "'eval_loss/a'" in capsys.readouterr().out
    merged = AutoModelForCausalLM.from_pretrained("merged")
    ids = torch.arange(5, 10)[None]
    with torch.no_grad():
        assert torch.equal(merged(ids).logits, variables["merged"](ids).logits)
    assert "on `Capybara` (local dataset)" in Path("output/README.md").read_text()


PACKAGES = sorted(path.parent for path in (ROOT / "trl_packfix").glob("*/__init__.py"))
WINGS = [folder for folder in PACKAGES if folder.name != "features"]
FEATURES = sorted(path.parent for path in (ROOT / "trl_packfix").glob("features/*/__init__.py"))


@pytest.mark.parametrize("wing", WINGS + FEATURES, ids=lambda wing: wing.name)
def test_the_readme_of_a_wing_or_a_feature_names_its_modules_and_no_others(wing):
    text = (wing / "README.md").read_text()
    named = set(re.findall(r"`(?:cli/)?(\w+\.py)`", text))
    there = {path.name for path in wing.glob("*.py")}
    other_modules = {"layout.py", "compat.py", "feature.py"} | ({"__init__.py"} if wing.name == "cli" else set())
    assert there - {"__init__.py"} <= named <= there | other_modules
    assert "**Extend.**" in text
    assert len(WINGS) == 8


# The API reference

PUBLIC = {
    name: getattr(trl_packfix, name)
    for name, module in trl_packfix._MODULE_OF.items()
    if needed_by(module.replace(".", "/")) <= PRESENT
}


def test_the_api_page_has_every_public_name():
    listed = re.findall(r"^::: trl_packfix\.(\S+)$", (ROOT / "docs" / "api.md").read_text(), re.MULTILINE)
    listed = [f"trl_packfix.{name}" for name in listed if needed_by(name.replace(".", "/")) <= PRESENT]
    assert sorted(listed) == sorted(f"{value.__module__}.{name}" for name, value in PUBLIC.items())


MARKS = {"pack_forward": needs("prefixes")}  # its example shares beginnings
EXAMPLES = [
    pytest.param(file, id=f"{file.parent.name}.{file.stem}", marks=MARKS.get(file.parent.name, ()))
    for file in sorted((ROOT / "trl_packfix").rglob("*.py"))
    if ">>> " in file.read_text()
]


@pytest.mark.parametrize("file", EXAMPLES)
def test_docstring_examples(file, workplace, monkeypatch):
    module = importlib.import_module(".".join(file.relative_to(ROOT).with_suffix("").parts))
    monkeypatch.chdir(workplace)
    examples = [test for test in doctest.DocTestFinder(exclude_empty=True).find(module) if test.examples]
    runner = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS)
    for test in examples:
        for example in test.examples:
            if "packing=True)" in example.source:
                example.source = quick(example.source)
        assert runner.run(test).failed == 0
    assert examples


# Links and navigation


@pytest.mark.parametrize("page", PAGES + DEV, ids=lambda page: page.name)
def test_links_resolve(page):
    text = re.sub(r"```.*?```|`[^`\n]*`", "", page.read_text(), flags=re.DOTALL)
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if target.startswith(("http://", "https://")):
            continue
        path, _, anchor = target.partition("#")
        file = (page.parent / path).resolve() if path else page
        assert file.exists(), f"{page.name} links to {target}, which is not there"
        if page.parent == ROOT / "docs":
            assert file.is_relative_to(ROOT / "docs"), f"{page.name} links out of docs ({target}): the site has no page"
        if anchor:
            headings = re.findall(r"^#+ (.*)$", file.read_text(), re.MULTILINE)
            assert anchor in [re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings]


def test_every_picture_is_on_a_page():
    shown = {name for page in PAGES for name in re.findall(r"images/(\w+\.png)", page.read_text())}
    assert shown == {file.name for file in (ROOT / "docs" / "images").iterdir()}


def test_every_page_is_in_the_navigation():
    site = yaml.safe_load((ROOT / "mkdocs.yml").read_text())
    index, *groups = site["nav"]
    pages = [page for group in groups for entries in group.values() for entry in entries for page in entry.values()]
    assert sorted([index, *pages]) == sorted(page.name for page in PAGES[1:])


# Commands

BLOCKS = [block for page in PAGES for block in re.findall(r"```bash\n(.*?)```", page.read_text(), re.DOTALL)]
COMMANDS = {line.split("  #")[0].strip() for block in BLOCKS for line in block.splitlines()} - {""}
for page in (ROOT / "README.md", ROOT / "docs" / "results.md"):  # the last column of their tables
    COMMANDS |= set(re.findall(r"`((?:(?:python|pytest|make) |tools/)[^`]+)` \|$", page.read_text(), re.MULTILINE))
OF_LAUNCHERS = {"--num_gpus", "--module", "--nproc_per_node", "--config_file"}
OF_TRAINING = {field.name for kind in (ScriptArguments, SFTConfig, ModelConfig) for field in fields(kind)} | {"config"}


@pytest.mark.parametrize("line", sorted(COMMANDS))
def test_commands_exist(line, capsys):
    """Commands name files that are there and flags that the program knows."""
    program, *words = shlex.split(line)
    files = [word for word in (program, *words) if re.match(r"\w+/\w+[/.]", word) and not word.startswith("Qwen/")]
    assert all((ROOT / file).is_file() for file in files)
    flags = {word.split("=")[0] for word in words if word.startswith("--")}
    if program == "make":
        assert re.search(rf"^{words[0]}:", (ROOT / "Makefile").read_text(), re.MULTILINE)
    elif program == "pip":
        *options, named = words[1:]
        assert set(options) <= {"--no-build-isolation"}
        extra = (re.fullmatch(r"\.(?:\[([\w-]+)\])?", named) or {1: None})[1]
        extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
        assert words[0] == "install"
        assert named.startswith(".") or named in {"bitsandbytes", "tensorboard"}
        assert extra in {None, *extras}
    elif program == "trl-packfix":
        with pytest.raises(SystemExit) as done:
            cli.main([words[0], "--help"])
        text = capsys.readouterr().out
        assert done.value.code == 0
        assert all(flag in text for flag in flags)
    elif "trl_packfix" in words or files == ["examples/train.py", *files[1:]]:
        assert flags - OF_LAUNCHERS <= {f"--{name}" for name in OF_TRAINING}
        assert "trl_packfix" not in words or words[words.index("trl_packfix") + 1] in cli.COMMANDS
    else:
        source = (ROOT / files[0]).read_text()
        parsed_flags = {"--data"} & flags if "make_parser(__doc__, " in source else set()  # benchmarks/common.py
        assert all(f'"{flag}"' in source for flag in flags - parsed_flags)
        if "-k" in words:
            assert re.search(rf"^def test_\w*{words[words.index('-k') + 1]}", source, re.MULTILINE)
