"""`chunked_loss`: lets a model compute its loss without all logits in memory."""

from typing import TypeVar

from torch import nn

from pagoda.errors import ConfigError
from pagoda.models.deferred_logits import defer_logits

Model = TypeVar("Model", bound=nn.Module)


def chunked_loss(model: Model) -> Model:
    """Let a Hugging Face language model compute its loss without holding all logits at once. Returns the model.

    Call it before or after `wrap`:

        model = pagoda.chunked_loss(model)

    The model's output layer then returns logits that are computed when they are read. Cross-entropy reads them in
    blocks, and once more in backward, so the memory of the loss no longer grows with tokens times vocabulary. The cost
    is one more matrix product with the output layer. It applies to the model's own loss and to
    `torch.nn.functional.cross_entropy(logits, targets)`, with the shift of causal models, `ignore_index`,
    `label_smoothing`, sums over several batches, soft caps and scales. Any other operation that reads logits computes
    all of them.

    The loss is that of fp32 logits, as in transformers, summed in another order: it is no less accurate, but not the
    same to the last bit. With `torch.compile` of the whole model, logits are computed as usual.

    Raises ConfigError for a model without an output layer, or with one that is not a plain `nn.Linear`.
    """
    find = getattr(model, "get_output_embeddings", None)
    head = find() if callable(find) else None
    if not (isinstance(head, nn.Module) and defer_logits(head)):
        found = "no output layer" if head is None else f"a {type(head).__name__} as output layer"
        raise ConfigError(
            f"chunked_loss needs a model whose get_output_embeddings() gives an nn.Linear; {type(model).__name__} has "
            f"{found}."
        )
    return model
