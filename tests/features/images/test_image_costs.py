"""What images cost: the vision tower against torch's counter, the balance of ranks, the report and the log."""

import logging
from dataclasses import replace
from importlib.util import find_spec

import numpy as np
import pytest
import torch
from features.images.processed import measured, processor_of
from support.bounds import imbalance_bound
from support.planners import make_epochs
from support.runs import config
from support.vision import build_model, build_processor, rows
from torch.utils.flop_counter import FlopCounterMode
from transformers.integrations.deepspeed import HfDeepSpeedConfig, is_deepspeed_zero3_enabled

from trl_packfix import SFTTrainer
from trl_packfix.data.documents import DocumentCounts, Documents, Ledger, make_documents
from trl_packfix.data.model_costs import make_cost_model, vision_tower, with_tower
from trl_packfix.features.images.examples import ImageExamples
from trl_packfix.features.images.processor import sequence_sizes
from trl_packfix.features.images.report import ImageNumbers
from trl_packfix.planning.costs import CostModel, HeadCounts, TowerCosts
from trl_packfix.planning.degrees import modelled_time
from trl_packfix.planning.parallel import Speeds
from trl_packfix.planning.schedule import imbalance
from trl_packfix.reporting.build import make_report
from trl_packfix.training import trainer as trainer_module
from trl_packfix.training.first_step import FirstStep
from trl_packfix.training.objective import Objective
from trl_packfix.training.step_comparison import StepComparison

ROWS = rows(12)


def costs_of(model):
    return with_tower(make_cost_model(model.config), model.config)


@pytest.mark.skipif(not find_spec("deepspeed"), reason="deepspeed is not installed")
@pytest.mark.parametrize("family", ["llava", "qwen3_vl"])
def test_one_rank_counts_the_tower_under_zero3(family):
    """transformers divides what a model builds from a config, and rank 0 waited for the others."""
    model = build_model(family)
    expected = costs_of(model)
    kept_alive = HfDeepSpeedConfig({"zero_optimization": {"stage": 3}})
    assert is_deepspeed_zero3_enabled()
    assert costs_of(model) == expected
    assert expected.tower.per_value > 0
    del kept_alive


@pytest.mark.parametrize("family", ["qwen2_vl", "qwen2_5_vl", "qwen3_vl", "llava", "llava_next", "idefics3"])
def test_the_tower_costs_what_torch_counts(family):
    """Images of several sizes, and two in one document: each image or tile is a sequence of its own."""
    model = build_model(family).eval()
    model.set_attn_implementation("eager")  # the counter does not see fused kernels
    tower = vision_tower(model)
    examples = ImageExamples(processor_of(family))
    name = next(name for name, module in model.named_modules() if module is tower)
    costs = costs_of(model).tower
    ratios = []
    counts = set()
    for sizes in ([(24, 24)], [(40, 56)], [(100, 100)], [(24, 24), (100, 100)]):
        document = examples.document([examples.image(*size) for size in sizes])
        with FlopCounterMode(display=False, depth=99) as counter, torch.no_grad():
            model(**examples.unpacked_batch(document))
        paths = counter.get_flop_counts()
        wanted = sum(paths[next(path for path in paths if path.endswith(f".{name}"))].values())
        sequences = sequence_sizes(document).numpy()
        ratios.append(costs(sequences.sum(), (sequences**2).sum()) / wanted)
        counts.add(wanted)
    assert len(counts) > 1, "all images cost the same"
    # Class tokens, norms and windows at the edge of an image are not counted exactly
    assert 0.95 <= min(ratios) <= max(ratios) <= 1.06, ratios


def test_what_cannot_be_counted_is_said_and_not_balanced(caplog):
    model = build_model("llava")
    model.config.vision_config.patch_size = None
    with caplog.at_level(logging.WARNING):
        costs = costs_of(model)
    assert costs.tower == TowerCosts(0.0, 0.0)
    assert "balanced by the language model alone" in caplog.text
    table = measured("llava", ROWS)
    planner = make_epochs(make_documents(table, 200), "stream", 1, 200, world_size=2, cost_model=costs)
    report = make_report(planner, table)
    assert not planner.image_costs.any()
    assert report.images.tower_share is None
    assert any("vision tower: cost not known, so not balanced" in text for _, text in report.lines())


def documents_with_images(num: int = 2000) -> Documents:
    """Return documents of which every second has an image of 16 to 1,000 tokens.

    Each token of an image is four patches of 12 numbers.
    """
    rng = np.random.default_rng(0)
    image = np.minimum(rng.lognormal(5, 1, num).astype(np.int64) + 16, 1000) * (np.arange(num) % 2)
    lengths = np.minimum(rng.lognormal(5, 1, num).astype(np.int64) + 8, 1000) + image
    values = 48 * image
    images = {"image_values": values, "image_squares": values**2}
    ledger = Ledger(kept=DocumentCounts(num, int(lengths.sum()), int(lengths.sum())))
    return Documents(np.arange(num), 0 * lengths, lengths, lengths, ledger, **images)


@pytest.mark.parametrize("synchronisation", ["micro", "step"])
def test_ranks_are_balanced_by_text_and_images(synchronisation):
    documents = documents_with_images()
    costs = CostModel(per_token=1e3, per_pair=1e-2, tower=TowerCosts(per_value=30.0, per_pair=2e-4))
    settings = {"accumulation": 2, "world_size": 4, "cost_model": costs, "synchronisation": synchronisation}
    ours = make_epochs(documents, "stream", 1, 2048, **settings)
    by_tokens = make_epochs(replace(documents, image_values=None, image_squares=None), "stream", 1, 2048, **settings)
    images = ours.image_costs
    lengths = documents.lengths
    assert images.sum() == pytest.approx(costs.tower(documents.image_values.sum(), documents.image_squares.sum()))
    assert 0.3 < images.sum() / (images.sum() + costs(lengths).sum()) < 0.7, "one of the parts hardly counts"

    def waiting(planner):
        return imbalance(planner.schedule(0), ours.units().costs(), synchronisation) - 1

    assert waiting(ours) < 0.6 * waiting(by_tokens)
    bound = imbalance_bound(ours.schedule(0), ours.units(), 2048, synchronisation=synchronisation)
    assert 1 <= bound <= 1 + waiting(ours)
    tokens = [sum(lengths[batch[batch >= 0]]) for rank in range(4) for batch in ours.schedule(0).micro_batches(rank)]
    assert max(tokens) <= 2048
    assert sorted(ours.schedule(0).order) == list(range(len(documents)))


def test_degrees_are_chosen_by_text_and_images():
    """Many ranks must share a document whose images are large, whatever its tokens."""
    documents = documents_with_images()
    heads = HeadCounts(layers=8, heads=8, kv_heads=2, key_dim=16, value_dim=16)
    costs = CostModel(1e6, 1e1, attention=(heads,), tower=TowerCosts(per_value=3e4, per_pair=1.0))
    links = Speeds(flops=1e12, latency_within=1e-6)
    settings = {"accumulation": 2, "world_size": 4, "tokens_per_rank": 2048, "cost_model": costs, "speeds": links}
    ours = make_epochs(documents, "stream", 1, 2048, **settings)
    text = replace(documents, image_values=None, image_squares=None)
    by_tokens = make_epochs(text, "stream", 1, 2048, **settings)
    times = {}
    degrees = {}
    for name, plan in (("both", ours), ("tokens", by_tokens)):
        schedule = plan.schedule(0)
        assert sorted(schedule.order) == list(range(len(documents)))
        times[name] = modelled_time(schedule, ours.units(), ours.packing.parallel)[0].sum()
        degrees[name] = schedule.degrees.mean()
    assert times["both"] < 0.85 * times["tokens"]
    assert degrees["both"] > degrees["tokens"]


def test_the_report_has_the_numbers_of_images():
    """`test_image_report.py` has these numbers by hand."""
    table = measured("qwen2_5_vl", ROWS)
    costs = costs_of(build_model("qwen2_5_vl"))
    planner = make_epochs(make_documents(table, 200), "stream", 1, 200, world_size=2, cost_model=costs)
    report = make_report(planner, table)
    images = report.images
    assert images == ImageNumbers.of_table(planner)
    assert planner.image_costs.tolist() == pytest.approx(costs.tower(table.image_values, table.image_squares))
    lines = dict(report.lines())
    assert lines["images"] == images.line()
    assert lines["imbalance"].endswith(images.imbalances_text)


@pytest.mark.parametrize("is_frozen", [False, True], ids=["trained", "frozen"])
def test_the_log_counts_the_tower(tmp_path, monkeypatch, is_frozen):
    model = build_model("llava_next")
    vision_tower(model).requires_grad_(not is_frozen)
    settings = {"packing_strategy": "minibatch", "max_steps": 1, "peak_tflops": 1.0, "max_length": 512}
    noted = []

    class Noting(Objective):
        def flops(self, inputs, sizes):
            noted.append(super().flops(inputs, sizes))
            return noted[-1]

    monkeypatch.setattr(trainer_module, "Objective", Noting)
    monkeypatch.setattr(FirstStep, "compare", lambda self: StepComparison("not compared"))
    trainer = SFTTrainer(
        model, config(tmp_path, **settings), train_dataset=ROWS, processing_class=build_processor("llava_next")
    )
    trainer.train()
    assert trainer.training_objective.trained_share == 1.0, "the frozen tower counts as a part of the language model"
    documents = trainer.data.source.documents
    first = trainer.data.source.planner.schedule(0).step_documents(0)
    text = trainer.data.cost_model(documents.lengths[first]).sum()
    tower = costs_of(model).tower(documents.image_values[first], documents.image_squares[first]).sum()
    assert tower > 0.1 * text
    # Tiles are joined with padding, and a frozen tower has no backward pass.
    assert sum(noted).item() == pytest.approx(3 * text + (1 if is_frozen else 3) * tower)
