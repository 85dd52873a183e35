"""`trl-packfix show`, and the pictures: what is shown is what the first batches of a training run hold."""

import io
import itertools
import json
import pickle
import re
from dataclasses import replace

import numpy as np
import pytest
from datasets import Dataset
from matplotlib.image import imread
from support.paths import ROOT
from support.planners import make_stream
from support.runs import build_trainer, config

from trl_packfix.cli import show as show_command
from trl_packfix.cli.dry_run import planner_for
from trl_packfix.cli.lengths import LengthRows
from trl_packfix.planning.costs import LLAMA_7B
from trl_packfix.reporting.build import make_report, make_stream_report
from trl_packfix.reporting.packs import first_packs, pack_text
from trl_packfix.reporting.sections import LengthHistogram
from trl_packfix.training.planner import documents_of

SETTINGS = {"max_length": 96, "per_device_train_batch_size": 4, "gradient_accumulation_steps": 2, "seed": 5}
FLAGS = [f"--{name}={value}" for name, value in SETTINGS.items()]


@pytest.fixture
def trainer(workplace):
    """Return the run whose packs are shown; it has made its report, and not trained. A config made later ends it."""
    trainer = build_trainer(workplace / "out", Dataset.from_json(str(workplace / "rows.jsonl")), **SETTINGS)
    trainer.get_train_dataloader()
    return trainer


@pytest.fixture
def show_words(workplace):
    """Return the command that shows packs of the run."""
    return ["show", workplace / "rows.jsonl", "--tokenizer", workplace / "model", *FLAGS]


def test_what_is_shown_is_what_is_trained(show_words, trainer, printed):
    batches = list(trainer.get_train_dataloader())
    packs = printed(*show_words, "--packs", 4)
    assert [pack["place"] for pack in packs] == ["step 0.0", "step 0.1", "step 1.0", "step 1.1"]
    for pack, batch in zip(packs, batches, strict=False):
        documents = pack["documents"]
        assert pack["cu_seq_lens"] == batch["cu_seq_lens_q"].tolist()
        assert len(documents) > 1
        spans = [span for document in documents for span in document["parts"]]
        assert sum((span["input_ids"] for span in spans), []) == batch["input_ids"][0].tolist()
        trained = sum(([span["trained"]] * len(span["input_ids"]) for span in spans), [])
        assert trained == (batch["labels"][0] != -100).tolist()
        assert {*trained} == {True, False}
        positions = [list(range(a, b + 1)) for a, b in (document["position_ids"] for document in documents)]
        assert sum(positions, []) == batch["position_ids"][0].tolist()
        assert all(document["stop"] - document["start"] == document["position_ids"][1] + 1 for document in documents)
        answers = ["".join(span["text"] for span in document["parts"] if span["trained"]) for document in documents]
        assert all(f"answer {document['row']} " in text for document, text in zip(documents, answers, strict=True))


def test_the_text_marks_trained_tokens_and_leaves_out_the_middle(show_words, output_of):
    words = [*show_words, "--packs", 1, "--documents", 2, "--tokens"]
    out = output_of(*words, 1000)
    assert out.startswith("[n] document n")
    assert "step 0.0: " in out
    assert "... and " in out
    rows = re.findall(
        r"\[(\d)\] row (\d+), tokens 0-(\d+)(?: \(cut from \d+\))?, (\d+) trained, position_ids 0\.\.(\d+)\n    (.*)",
        out,
    )
    assert [row[0] for row in rows] == ["0", "1"]
    for _, row, last, trained, position, text in rows:
        assert last == position
        (marked,) = re.findall(r"\[\[(.*)\]\]", text)
        assert marked.startswith("answer") or f"answer {row} " in marked
        assert len(marked.replace("<|im_end|>", "e").replace("\\n", "n")) == int(trained)  # one token per byte
        assert f"question {row}\\n" in text.split("[[")[0]
    hidden = re.findall(r"\[\.\.\. (\d+), (\d+) of them trained \.\.\.\]", output_of(*words, 10))
    hidden = [(int(n), int(t)) for n, t in hidden]
    assert hidden == [(int(row[2]) + 1 - 10, int(row[3]) - 5) for row in rows]  # each ends with trained tokens


def test_what_the_chat_template_leaves_out_is_said_by_show_and_by_check(workplace, printed, output_of):
    rows = [json.loads(line) for line in (workplace / "rows.jsonl").read_text().splitlines()[:3]]
    rows[1]["prompt"][0]["reasoning_content"] = "a thought of mine"
    (workplace / "thoughts.jsonl").write_text("\n".join(map(json.dumps, rows)))
    file = workplace / "thoughts.jsonl"
    warning = f"1 of 3 rows of the {file} dataset has `reasoning_content` in messages of the role `user`"
    out = output_of("show", file, "--model", workplace / "model", *FLAGS)
    assert warning in out
    # A lost text stands in the pack, before the text of its message that is not lost
    lost_text = "{left out `reasoning_content` of user: a thought of mine}"
    before, _, behind = re.search(r"\[\d\] row 1, .*\n    (.*)", out).group(1).partition(lost_text)
    assert before.strip() == r"<|im_start|>user\n"
    assert behind.strip().startswith("the question 1")
    assert out.count("{left out `") == 1
    check_words = ["check", workplace / "model", "--dataset"]
    assert warning in output_of(*check_words, file, code=1)
    (report,) = printed(*check_words, workplace / "rows.jsonl")
    assert report["complete"] is True


def test_tokens_cannot_be_checked(workplace, output_of):
    """`check` says so, and not by exit code 0 that nothing is left out."""
    Dataset.from_dict({"input_ids": [[5, 6, 7]]}).save_to_disk(workplace / "tokens")
    words = ["check", workplace / "model", "--dataset", workplace / "rows.jsonl", workplace / "tokens"]
    assert f"`--dataset {workplace / 'tokens'}` was given, and it is tokenised" in output_of(*words, code=2)


def test_what_is_left_out_stands_in_the_fragment_of_its_place(workplace, printed):
    prompt = [{"role": "user", "content": "short", "reasoning_content": "first"}]
    completion = [
        {"role": "assistant", "content": "a" * 70},
        {"role": "user", "content": "b" * 30, "reasoning_content": "second"},
        {"role": "assistant", "content": "c" * 40},
    ]
    (workplace / "fragments.jsonl").write_text(json.dumps({"messages": prompt + completion}))
    flags = ["--max-length=64", "--overlong=split", "--batch-size=4"]
    (pack,) = printed("show", workplace / "fragments.jsonl", "--model", workplace / "model", *flags, "--packs", 1)
    fragments = sorted(pack["documents"], key=lambda document: document["start"])
    texts = ["".join(part["text"] for part in document["parts"]) for document in fragments]
    places = {"first": "<|im_start|>user\nshort", "second": "<|im_start|>user\nbb"}
    in_text = [[name for name, text in places.items() if text in shown] for shown in texts]
    assert in_text == [["first"], ["second"], []]
    left_out = [[text.split(": ")[1] for _, text in document.get("left_out", [])] for document in fragments]
    assert left_out == in_text


def test_documents_that_were_cut_are_marked(show_words, trainer, output_of, printed):
    words = [*show_words, "--packs", 4]
    documents = [document for pack in printed(*words) for document in pack["documents"]]
    lengths = trainer.data.source.reader.lengths
    cut = [document for document in documents if document["cut_from"] is not None]
    assert 0 < len(cut) < len(documents)
    for document_shown in documents:
        full_length = int(lengths[document_shown["row"]])
        assert document_shown["cut_from"] == (full_length if full_length > SETTINGS["max_length"] else None)
    assert f"tokens 0-95 (cut from {cut[0]['cut_from']:,}), " in output_of(*words)


def test_documents_have_a_colour_each_and_it_is_not_alone(trainer):
    (pack,) = first_packs(trainer.data.source.make_planner(), trainer.data.source.reader, 1)
    text = pack_text(pack, trainer.processing_class)
    colours = [str(span.style) for span in text.spans if "[" in text.plain[span.start : span.start + 1]]
    headings = [style for style in colours if style.startswith("bold")]
    assert all(a != b for a, b in zip(headings[::2], headings[2::2], strict=False))
    assert len(set(headings)) > 2
    assert all(f"[{i}] row" in text.plain for i in range(len(pack.documents)))


# Pictures


@pytest.mark.parametrize("words", [[], ["--world-size=3", "--strategy=bfd_split"], ["--strategy=minibatch"]])
def test_plot(words, show_words, tmp_path, output_of):
    path = tmp_path / "packs.png"
    output = output_of(*show_words, *words, "--plot", tmp_path if words else path)  # in a folder it has this name
    text, _ = output.split(f"Drawn: {path}\n")
    assert output_of(*show_words, *words).startswith(text)
    assert "[[answer" in text
    assert list(tmp_path.parent.glob(f"{tmp_path.name}*")) == [tmp_path]
    assert list(tmp_path.iterdir()) == [path]
    picture = imread(path)
    assert picture.shape[1] > 1000
    assert path.stat().st_size < 300_000
    assert len(np.unique(picture[::4, ::4, :3].reshape(-1, 3), axis=0)) > 20  # something is drawn


def test_without_matplotlib_the_plan_is_drawn_as_text(lengths_file, monkeypatch, output_of):
    monkeypatch.setattr(show_command, "find_spec", lambda name: None)
    lengths = [60, 30, 20, 90, 90, 5]
    words = "--max-length 100 --batch-size 1 --world-size 2 --strategy bfd --documents 1 --plot x.png".split()
    shown = output_of("show", lengths_file(lengths), *words)
    assert "matplotlib is not installed (`pip install matplotlib`)" in shown
    assert shown.isascii()
    strips = re.findall(r"^step \d, rank \d +([\d#.-]+) +(\d+)%$", shown, re.MULTILINE)
    assert len(strips) == 4
    full = {round(len(strip.rstrip(".")) / len(strip), 1): int(percent) for strip, percent in strips}
    assert all(abs(100 * drawn - percent) < 8 for drawn, percent in full.items())
    counts = [int(count) for count in re.findall(r"^ *[\d,]+-[\d,]+ +#* +(\d+)", shown, re.MULTILINE)]
    assert sum(counts) == len(lengths)
    assert re.search(r"^ +\d  #+:* #+:*$", shown, re.MULTILINE), "the waiting of the ranks"
    # The answer for a program has no place for text, and is refused before the data are read
    refusal = output_of("show", "nothing.jsonl", "--plot", "x.png", "--json", code=2)
    assert "omit `--json` for a drawing as text" in refusal


def trained_width(strips):
    """Return the width of all that is drawn tall in the panel of packs, in rows."""
    drawn_areas = [drawn for drawn in strips.collections if len(drawn.get_facecolor())]
    boxes = [path.get_extents() for drawn in drawn_areas for path in drawn.get_paths()]
    return sum(box.width for box in boxes if box.height > 0.5)


def test_a_document_without_a_row_of_its_own_is_not_drawn(trainer):
    """A document that shares all tokens but the last computes no row, and nothing is drawn over the next document."""
    report = trainer.packing_report
    pack, *others = report.sample.packs
    copy = replace(pack.documents[0], shared=pack.documents[0].num_tokens - 1)
    assert copy.num_rows == 0
    assert copy.own_spans == [(True, 0, 1)]
    with_copy = replace(pack, documents=[*pack.documents, copy])
    figure = replace(report, sample=replace(report.sample, packs=[with_copy, *others])).plot()
    assert trained_width(figure.axes[0]) == pytest.approx(trained_width(report.plot().axes[0]))


def test_the_picture_says_what_the_report_says(trainer):
    report = trainer.packing_report
    figure = report.plot()
    figure.canvas.draw()
    strips, mask, lengths, _ = figure.axes
    assert f"{report.num_packs} packs (stream), {report.efficiency:.1%} full" in strips.get_title(loc="left")
    assert f"max_length {report.max_length}" in lengths.texts[0].get_text()
    assert len(strips.get_yticks()) == len(report.sample.packs) == 8
    shown = [document for pack in report.sample.packs for document in pack.documents]
    documents = trainer.data.source.documents
    trained = [documents.trained[documents.row == shown_document.row].item() for shown_document in shown]
    assert trained == [shown_document.num_trained for shown_document in shown]
    assert sum(trained) == pytest.approx(trained_width(strips))
    # triangles cover the share of the causal mask that the title names: none crosses a boundary
    corners = [patch.get_xy()[:3] for patch in mask.patches]
    areas = [(xy[2, 0] - xy[0, 0]) * (xy[1, 1] - xy[0, 1]) for xy in corners]
    named = int(re.search(r"(\d+)% of", mask.get_title(loc="left")).group(1))
    assert named == pytest.approx(100 * sum(areas) / sum(a**0.5 for a in areas) ** 2, abs=2)
    assert len(areas) > 1
    # no title runs out of the picture or into another
    boxes = [axes._left_title.get_window_extent() for axes in figure.axes]
    width, height = figure.canvas.get_width_height()
    assert all(box.x0 >= 0 and box.x1 <= width and box.y0 >= 0 and box.y1 <= height for box in boxes)
    assert not any(a.overlaps(b) for i, a in enumerate(boxes) for b in boxes[:i])


def report_of(tmp_path, lengths, max_length, ranks=1):
    args = config(tmp_path, max_length=max_length)
    reader = LengthRows(np.array(lengths))
    return make_report(planner_for(documents_of(reader, args), args, ranks, cost_model=LLAMA_7B), reader)


def test_the_title_says_how_full_the_strips_are(tmp_path):
    """Three packs are divided between eight ranks, because none of these may wait for the others."""
    report = report_of(tmp_path, [50, 49] * 3, max_length=100, ranks=8)
    full = np.mean([pack.cu_seq_lens[-1] for pack in report.sample.packs] + [0, 0]) / report.capacity
    title = report.plot().axes[0].get_title("left")
    assert len(report.sample.packs) == 6
    assert f"8 micro-batches, {full:.1%} full" in title


def test_a_notebook_shows_the_picture(trainer, tmp_path):
    """Jupyter calls `_repr_png_`; it knows the figures of pyplot only."""
    figure = trainer.packing_report.plot(tmp_path / "packs.png")
    shown = imread(io.BytesIO(figure._repr_png_()))
    saved = imread(tmp_path / "packs.png")
    assert shown.shape == saved.shape  # the layout is computed again
    assert np.abs(shown - saved).mean() < 0.05
    assert pickle.loads(pickle.dumps(figure))._repr_png_()


def lengths_panel(tmp_path, lengths, max_length):
    """Return the panel of lengths in the picture of a plan."""
    figure = report_of(tmp_path, lengths, max_length).plot()
    figure.canvas.draw()
    return figure.axes[2]


@pytest.mark.parametrize("low, high", [(100, 101), (180, 420), (90, 1300), (10, 40000)])
def test_log_axes_have_one_notation(low, high, tmp_path):
    axes = lengths_panel(tmp_path, np.geomspace(low, high, 300).astype(int), max_length=(low + high) // 2)
    for axis in (axes.xaxis, axes.yaxis):
        first, last = axis.get_view_interval()
        shown = [tick for tick in axis.get_major_ticks() if first <= tick.get_loc() <= last]
        labels = [tick.label1.get_text() for tick in shown]
        assert labels == [f"{tick.get_loc():,.0f}" for tick in shown]
        assert 2 <= len(set(labels)) == len(labels) <= 12
        assert not any(tick.label1.get_text() for tick in axis.get_minor_ticks())
        boxes = [tick.label1.get_window_extent() for tick in shown]
        assert not any(a.overlaps(b) for a, b in itertools.pairwise(boxes))


def test_the_bin_that_max_length_cuts_is_drawn_in_two(tmp_path):
    lengths = np.geomspace(10, 4000, 500).astype(int)
    edges = np.array(LengthHistogram.from_lengths(lengths).edges)
    max_length = int(edges[15]) + 20  # inside a bin
    assert max_length + 1 not in edges
    axes = lengths_panel(tmp_path, lengths, max_length)
    bars = [(bar.get_x(), bar.get_x() + bar.get_width(), bar.get_height(), bar.get_hatch()) for bar in axes.patches]
    assert len(bars) == len(edges)
    assert all((first > max_length) == (hatch is not None) for first, _, _, hatch in bars)
    (before,) = [bar for bar in bars if bar[1] == max_length + 1]
    (after,) = [bar for bar in bars if bar[0] == max_length + 1]
    assert (before[0], after[1]) == (edges[15], edges[16])
    assert before[2] == after[2]
    assert after[3]


@pytest.mark.slow
def test_the_picture_in_the_documentation_is_what_is_drawn(data_dir, tmp_path, output_of):
    """`tools/pictures.py` draws them again after a change of what they show."""
    words = ["--tokenizer", data_dir / "smollm2_tokenizer", "--batch-size", 1, "--max-length", 2048]
    words += ["--world-size", 2, "--plot", tmp_path / "packs.png"]
    output_of("show", data_dir / "t0_p3_sample.jsonl", *words)
    stored, drawn = (imread(path) for path in (ROOT / "docs/images/packs.png", tmp_path / "packs.png"))
    assert stored.shape == drawn.shape
    assert np.abs(stored - drawn).mean() < 1e-3


def test_a_stream_has_no_picture():
    stream = make_stream(Dataset.from_dict({"input_ids": [[1, 2]]}).to_iterable_dataset(), batch_size=1, max_length=8)
    with pytest.raises(ValueError, match="The packs of a stream are not known"):
        make_stream_report(stream, 3).plot()


def test_the_ranks_of_a_shared_pack_are_shown(lengths_file, tmp_path, output_of, printed):
    words = ["show", lengths_file([*range(5, 60), 90, 101, 128])]
    words += "--max-length 128 --tokens-per-rank 32 --packs 3 --world-size 4".split()
    shared = [pack for pack in printed(*words) if "ranks" in pack]
    assert shared, "no pack is shared"
    for pack in shared:
        ranks = pack["ranks"]
        bounds = pack["cu_seq_lens"]
        assert pack["place"].endswith(f"ranks {ranks[0]['rank']}-{ranks[-1]['rank']}")
        assert len(ranks) in (2, 4)
        edges = [rank["tokens"][0] for rank in ranks] + [ranks[-1]["tokens"][1]]
        assert (edges[0], edges[-1]) == (0, bounds[-1])
        assert pack["capacity"] == 32 * len(ranks)
        assert [rank["tokens"][1] for rank in ranks] == edges[1:]
        assert max(np.diff(edges)) <= 32
        assert {*np.diff(edges)[:-1].tolist()} == {-(-bounds[-1] // len(ranks))}
        for rank in ranks:
            held = {int(np.searchsorted(bounds, token, side="right")) - 1 for token in range(*rank["tokens"])}
            assert rank["documents"] == sorted(held)
    first = shared[0]["ranks"][1]
    line = f"rank {first['rank']}: tokens {first['tokens'][0]}-{first['tokens'][1] - 1}, ["
    assert line in output_of(*words, "--plot", tmp_path / "packs.svg")
    assert (tmp_path / "packs.svg").stat().st_size > 10_000


def test_lengths_alone_show_boundaries_and_a_picture(lengths_file, tmp_path, output_of, printed):
    words = ["show", lengths_file([10, 20, 30]), "--max-length", 64]
    assert "60 of 64 tokens" in output_of(*words, "--batch-size", 1)
    (pack,) = packs = printed(*words)
    assert {span["input_ids"] for document in pack["documents"] for span in document["parts"]} == {None}
    assert printed(*words, "--plot", tmp_path / "packs") == {"plot": str(tmp_path / "packs.png"), "packs": packs}
    assert (tmp_path / "packs.png").is_file()
    assert not (tmp_path / "packs").exists()
