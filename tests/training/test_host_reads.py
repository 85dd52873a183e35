"""What the host reads from tensors in each micro-batch, through the whole trainer; on a GPU it waits for each."""

import pytest
import trl
from support.attention import take_path_of_cuda
from support.features import marked
from support.host_reads import ReadsOfSteps
from support.runs import run_training, texts
from support.strict_varlen import StrictVarlen
from support.versions import trl_trains

from trl_packfix import SFTTrainer

# transformers compares positions to find documents, although no mask is made for packs
OF_TRANSFORMERS = "transformers/masking_utils.py:find_packed_sequence_indices"
OURS = {
    "minibatch": {"packing_strategy": "minibatch"},
    "stream": {},
    "checkpointing": {"gradient_checkpointing": True},
    "prefixes": {"share_prefixes": "family"},
    "router": {"model": "mixtral", "router_aux_loss_coef": 0.1, "pad_to_multiple_of": 8},
    "documents": {"document_weighting": "document"},
    "noise": {"neftune_noise_alpha": 5.0},
    "constant shapes": {"pad_documents_to_multiple_of": 32},
}


def reads(folder, trainer_class, **settings):
    """Return (reads by place, all of them) per micro-batch, and the trainer."""
    watch = ReadsOfSteps()
    settings |= {"gradient_accumulation_steps": 2, "max_steps": 7, "logging_steps": 100, "bf16": True}
    trainer = run_training(folder, texts(120), trainer_class=trainer_class, callbacks=[watch], **settings)
    assert watch.micro_batches == 8
    return watch.per_micro_batch, sum(watch.per_micro_batch.values()), trainer


@pytest.fixture(scope="module")
def stock(tmp_path_factory):
    """Return the reads of TRL on padded batches."""
    settings = {"config_class": trl.SFTConfig, "packing": False, "max_length": 64}
    return reads(tmp_path_factory.mktemp("stock"), trl.SFTTrainer, **settings)[:2]


@trl_trains
@pytest.mark.parametrize("name", marked(OURS))
def test_a_packed_micro_batch_reads_what_transformers_reads(name, stock, tmp_path, monkeypatch):
    """On the path of CUDA, with a stand-in for the kernels; TRL's loss runs without its Triton kernels here."""
    take_path_of_cuda(monkeypatch)
    with StrictVarlen() as kernels:
        places, total, trainer = reads(tmp_path, SFTTrainer, **OURS[name])
    assert len(kernels.backwards) >= 7 * 2
    assert not trainer.packed_model.is_unpacked
    assert not trainer.packed_model.repaired
    assert set(places) <= {OF_TRANSFORMERS}, places
    of_stock, total_of_stock = stock
    assert total == 1 < total_of_stock
    assert any("compute_loss" in place for place in of_stock), of_stock  # so the counter sees what is there
