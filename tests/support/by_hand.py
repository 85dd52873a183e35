"""What the model says of each label, from its full logits."""

from torch import Tensor
from torch.nn.functional import log_softmax


def token_scores(logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return log-probability, entropy and whether it is the likeliest token of each next label (B, T - 1).

    All are 0 where the label is -100.
    """
    logits = logits[:, :-1]
    labels = labels[:, 1:]
    is_trained = labels != -100
    log_probs = log_softmax(logits, -1)
    label_log_probs = log_probs.gather(-1, labels.clamp(min=0)[..., None])[..., 0]
    entropy = -(log_probs.exp() * log_probs).sum(-1)
    return label_log_probs * is_trained, entropy * is_trained, (logits.argmax(-1) == labels) & is_trained
