"""The proof of shared prefixes: it passes where documents are what they are alone, and every fault is seen."""

from dataclasses import replace

import pytest
import torch
from datasets import Dataset
from support.attention import take_path_of_cuda
from support.models import build_tiny_model
from support.runs import build_trainer, packed_model, proved
from support.shared_rows import detach_keys
from sweep import zoo
from sweep.judge import PrefixJudge, with_prefixes
from transformers.utils import logging

from trl_packfix.attention import choice as attention
from trl_packfix.attention.varlen import ATTENTION_NAME
from trl_packfix.features.prefixes import probe as prefix_probe
from trl_packfix.features.prefixes.collator import PrefixCollator
from trl_packfix.features.prefixes.sharing import PrefixSharing
from trl_packfix.isolation.check_isolation import check_packs
from trl_packfix.isolation.isolation_report import PackingLeakError
from trl_packfix.layout import LAYOUT_KEY


def proved_whole(model, **settings):
    """Return a model whose documents may share prefixes, when it is proved for documents packed whole."""
    return proved(model, feature=PrefixSharing("pack"), **settings)[0]


def foreign_key(batch):
    """Put a sibling's key in the place of one key of a shared stretch."""
    prefixes = batch[LAYOUT_KEY]
    index = prefixes.kv_index.clone()
    place = int(batch["cu_seq_lens_k"][1]) + 2
    assert index[place] != batch["input_ids"].shape[1] - 1
    index[place] = batch["cu_seq_lens_q"][1] - 2  # a row of the first run, behind the branch
    return batch | {LAYOUT_KEY: replace(prefixes, kv_index=index)}


def lost_prefix(batch):
    """Let runs attend to themselves only."""
    rows = torch.arange(batch["input_ids"].shape[1])
    own_boundaries = {"cu_seq_lens_k": batch["cu_seq_lens_q"], "max_length_k": batch["max_length_q"]}
    return batch | own_boundaries | {LAYOUT_KEY: replace(batch[LAYOUT_KEY], kv_index=rows)}


def positions_restart(batch):
    lengths = batch["cu_seq_lens_q"].diff().tolist()
    return batch | {"position_ids": torch.cat([torch.arange(n) for n in lengths])[None]}


def one_run_late(batch):
    positions = batch["position_ids"].clone()
    positions[0, batch["cu_seq_lens_q"][1] : batch["cu_seq_lens_q"][2]] += 1
    return batch | {"position_ids": positions}


FAULTS = [foreign_key, lost_prefix, positions_restart, one_run_late]


@pytest.mark.parametrize("fault", FAULTS)
def test_the_probe_sees_a_fault(fault, monkeypatch):
    class Faulty(PrefixCollator):
        def __call__(self, documents):
            batch = super().__call__(documents)
            return fault(batch) if LAYOUT_KEY in batch else batch

    model = build_tiny_model("llama")
    packed = proved_whole(model)
    monkeypatch.setattr(prefix_probe, "PrefixCollator", Faulty)
    report = check_packs(model, 64, feature=PrefixSharing("pack"))
    assert not report.passed
    assert report.max_difference > 100 * report.tolerance
    packed.feature_is_proved = True  # as where only parts are wrong
    with pytest.raises(PackingLeakError, match=r"share prefixes were packed, 1 ranks shared.*off.*tokens_per_rank"):
        packed.prove_degree(model, 1)
    assert packed.prove_feature(model).startswith("where documents share prefixes, ")


def test_the_command_check_sees_a_fault(tmp_path, printed, monkeypatch):
    """Documents get the positions of another place in the pack, but only in packs with shared prefixes."""

    class MovedCollator(PrefixCollator):
        def __call__(self, documents):
            batch = super().__call__(documents)
            return batch | {"position_ids": torch.arange(batch["input_ids"].shape[1])[None]}

    build_tiny_model("llama").save_pretrained(tmp_path)
    monkeypatch.setattr(prefix_probe, "PrefixCollator", MovedCollator)
    verdict = printed("check", tmp_path, "--share-prefixes", "pack", "--on-leak", "raise", code=1)
    assert verdict["verdict"] == "isolated"
    assert not verdict["right"]
    assert "training refuses: `share_prefixes='pack'` was given" in verdict["settings"]["share_prefixes"]


def test_the_probe_sees_keys_without_a_gradient():
    """States are right, but no gradient reaches the shared tokens: only the comparison of gradients shows it."""
    model = build_tiny_model("llama")
    proved_whole(model)

    detach_keys(model.model.layers, lambda pack: slice(min(12, int(pack.cu_seq_lens_q[1]))))
    report = check_packs(model, 64, feature=PrefixSharing("pack"))
    assert (report.equal, report.isolated) == (True, False)
    assert report.max_gradient > 1e-2


@pytest.mark.filterwarnings("ignore:enforce_flash_attention=False")
@pytest.mark.parametrize(
    ("model_type", "config", "settings", "reason"),
    [
        ("llama", {}, {"enforce_flash_attention": False}, "'sdpa'"),
        ("gemma2", {}, {}, "Gemma2Attention with softcap=50.0"),
        ("llama", {"attention_dropout": 0.1}, {}, "`attention_dropout=0.1`"),
    ],
)
def test_documents_under_other_attention_softcap_and_dropout_are_packed_whole(model_type, config, settings, reason):
    """Read the rate of dropout from the config, because the probe runs without dropout."""
    model = zoo.build_model(model_type, **config)
    packed = proved_whole(model, **settings)
    assert packed.is_proved
    assert not packed.repaired
    assert reason in packed.prove_feature(model)


def test_the_judge_sees_a_lost_prefix():
    judge = PrefixJudge(zoo.build_model("llama"))
    model = zoo.build_model("llama")
    proved_whole(model)
    right = judge.judge(model)
    assert right.right
    assert right.error > 0
    assert judge.judge(model, lambda documents: lost_prefix(with_prefixes(documents))).error > 1e-2


BEGINNING = "the same words at the beginning, "
ALIKE = Dataset.from_dict({"text": [BEGINNING + end for end in ("one", "two", "three four", "five", "six", "seven")]})


def rows_trained(folder, **settings):
    """Return a trainer after two steps, and the numbers of rows of its last two batches."""
    trainer = build_trainer(folder, ALIKE, packing_strategy="minibatch", max_steps=2, optim="sgd", **settings)
    rows = []
    trainer.model.get_input_embeddings().register_forward_hook(lambda module, args, out: rows.append(out.shape[1]))
    trainer.train()
    return trainer, rows[-2:]


def test_a_trainer_shares_prefixes_only_where_that_is_proved(tmp_path, caplog):
    logging.set_verbosity_warning()
    _, rows_unshared = rows_trained(tmp_path / "off")
    trainer, shared = rows_trained(tmp_path / "pack", share_prefixes="pack")
    assert trainer.data.shares_rows
    assert trainer.packed_model.feature_is_proved
    assert all(a < b for a, b in zip(shared, rows_unshared, strict=True))
    bloom = zoo.build_model("bloom")
    bloom.resize_token_embeddings(300)
    with caplog.at_level("WARNING"):
        logging.get_logger("trl_packfix").propagate = True
        trainer, unshared = rows_trained(tmp_path / "bloom", model=bloom, share_prefixes="pack")
    assert not trainer.data.shares_rows
    assert unshared == rows_unshared
    assert 'Documents are packed whole: `share_prefixes="pack"`' in caplog.text
    assert "repaired" in caplog.text
    assert dict(trainer.packing_report.lines())["common prefixes"].startswith("not shared: these modules are repaired")


@pytest.mark.filterwarnings("ignore:enforce_flash_attention=False")
@pytest.mark.parametrize(
    "model, settings, reason",
    [
        ("bloom", {"share_prefixes": "family"}, "repaired.*planned packs do not fit"),
        ("llama", {"share_prefixes": "pack", "on_leak": "raise", "enforce_flash_attention": False}, "'sdpa'"),
    ],
)
def test_a_trainer_refuses_where_documents_cannot_be_packed_whole(model, settings, reason, tmp_path):
    model = zoo.build_model(model)
    model.resize_token_embeddings(300)
    with pytest.raises(PackingLeakError, match=f"`share_prefixes='{settings['share_prefixes']}'` was given.*{reason}"):
        build_trainer(tmp_path, ALIKE, model=model, max_steps=1, **settings).train()


def test_evaluation_before_training_proves_first(tmp_path):
    trainer = build_trainer(tmp_path, ALIKE, share_prefixes="pack", eval_dataset=ALIKE)
    shared = trainer.evaluate()["eval_loss"]
    assert trainer.packed_model.feature_is_proved
    unshared = build_trainer(tmp_path, ALIKE, eval_dataset=ALIKE).evaluate()["eval_loss"]
    assert shared == pytest.approx(unshared, rel=1e-6)
    assert shared > 1


@pytest.mark.parametrize("users", ["sdpa", "flash_attention_2"])
def test_attention_that_looks_up_keys_is_chosen_on_cuda(users, monkeypatch):
    model = build_tiny_model("llama")
    model.config._attn_implementation_internal = users
    monkeypatch.setattr(attention, "is_flash_attn_2_available", lambda: True)
    take_path_of_cuda(monkeypatch)
    packed = packed_model(model, torch.bfloat16, "cuda", feature=PrefixSharing("pack"))
    assert packed.attention.name == ATTENTION_NAME
    assert packed.attention.is_flash
    assert ("does not look up" in packed.attention.reason) is ("flash" in users)
