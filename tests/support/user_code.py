"""Losses and steps as users write them, for TRL's `SFTTrainer` and ours alike."""

from torch import no_grad
from torch.nn.functional import cross_entropy, kl_div


def token_losses(logits, labels):
    """Return the loss of each token, and whether it is trained, both (B, T - 1)."""
    labels = labels[:, 1:]
    losses = cross_entropy(logits[:, :-1].transpose(1, 2).float(), labels.clamp(min=0), reduction="none")
    return losses, (labels != -100).float()


def sum_func(outputs, labels, num_items_in_batch=None):
    losses, is_trained = token_losses(outputs.logits, labels)
    return (losses * is_trained).sum() / num_items_in_batch


def mean_func(outputs, labels, num_items_in_batch=None):
    losses, is_trained = token_losses(outputs.logits, labels)
    return (losses * is_trained).sum() / is_trained.sum()


def share_func(outputs, labels, num_items_in_batch=None):
    """Return the mean of a micro-batch times its share of the step, which is 0 / 0 if nothing is trained."""
    losses, is_trained = token_losses(outputs.logits, labels)
    num_trained = is_trained.sum()
    return (losses * is_trained).sum() / num_trained * (num_trained / num_items_in_batch)


def with_sum(base):
    class SumLoss(base):
        def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
            outputs = model(**{name: value for name, value in inputs.items() if name != "labels"})
            loss = sum_func(outputs, inputs["labels"], num_items_in_batch)
            return (loss, outputs) if return_outputs else loss

    return SumLoss


def with_mean(base):
    class MeanLoss(base):
        def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
            outputs = model(**inputs)
            return (outputs.loss, outputs) if return_outputs else outputs.loss

    return MeanLoss


def with_scaled_mean(base):
    class ScaledMeanLoss(with_mean(base)):
        loss_is_scaled_for_ga = False  # the Trainer divides it by the micro-batches of the step

    return ScaledMeanLoss


def with_penalty(base):
    class Penalised(base):
        def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
            loss = super().compute_loss(model, inputs, num_items_in_batch=num_items_in_batch)
            return loss + 1e-3 * sum((p**2).sum() for p in model.parameters())

    return Penalised


def with_teacher(base):
    class Distilling(base):
        """Learns the distribution of `self.teacher` on all trained tokens."""

        def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
            labels = inputs["labels"]
            inputs = {name: value for name, value in inputs.items() if name != "labels"}
            with no_grad():
                taught = self.teacher(**inputs).logits[:, :-1].log_softmax(-1)
            learned = model(**inputs).logits[:, :-1].log_softmax(-1)
            gaps = kl_div(learned, taught, log_target=True, reduction="none").sum(-1)
            loss = (gaps * (labels[:, 1:] != -100)).sum() / num_items_in_batch
            return (loss, None) if return_outputs else loss

    return Distilling


def with_step(base):
    class OwnStep(base):
        """Adds a penalty with a backward pass of its own, once per micro-batch."""

        def training_step(self, model, inputs, num_items_in_batch=None):
            loss = super().training_step(model, inputs, num_items_in_batch)
            penalty = 1e-3 * sum((p**2).sum() for p in model.parameters())
            self.accelerator.backward(penalty)
            return loss + penalty.detach()

    return OwnStep


def plain(base):
    return base


# By name: what makes the class, `compute_loss_func`, and whether it is a mean of micro-batches: of what these hold
USER_CODE = {
    "": (plain, None, False),
    "sum_func": (plain, sum_func, False),
    "share_func": (plain, share_func, False),
    "mean_func": (plain, mean_func, True),
    "sum": (with_sum, None, False),
    "mean": (with_mean, None, True),
    "scaled_mean": (with_scaled_mean, None, True),
    "penalty": (with_penalty, None, False),
    "step": (with_step, None, False),
}
