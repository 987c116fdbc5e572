"""What loops do with `param.grad` between backward and `step()`, and a loop that does it, with Pagoda or without."""

import copy
import io
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import nn
from torch.nn.utils import parameters_to_vector, vector_to_parameters

WIDTH = 24
LIMIT = 2.0**-7
"""Of norms, where loops clip. Gradients are larger."""


class Net(nn.Module):
    """Four layers, of which a pass may leave one out."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x: torch.Tensor, without: int = -1) -> torch.Tensor:
        for index, layer in enumerate(self.layers):
            if index != without:
                x = x + torch.tanh(layer(x.to(layer.weight.dtype)))
        return x.float().square().mean()


class Training:
    """A model and its optimizer, and what uses find."""

    def __init__(self, model: Any, optimizer: Any, ranks: tuple[int, ...] = (0,)) -> None:
        """`ranks`: those whose batches this process has. Losses are their mean."""
        self.model, self.optimizer, self.ranks = model, optimizer, ranks
        self.params: list[Any] = [*model.parameters()]
        self.random = torch.Generator().manual_seed(3)
        self.found: list[Any] = []

    @property
    def grads(self) -> list[Any]:
        """Those that exist."""
        return [param.grad for param in self.params if param.grad is not None]

    def noise(self, like: torch.Tensor) -> torch.Tensor:
        return torch.randn(like.shape, generator=self.random).to(like.device, like.dtype) * 1e-3

    def loss(self, number: int, without: int = -1) -> torch.Tensor:
        seeds = [torch.Generator().manual_seed(1000 * rank + number) for rank in self.ranks]
        device = self.params[0].device
        losses = [self.model(torch.randn(4, WIDTH, generator=seed).to(device), without) for seed in seeds]
        return torch.stack(losses).mean()


def each(change: Callable[[Any], object]) -> Callable[[Training], object]:
    """Do this to every gradient."""

    def change_all(of: Training) -> None:
        for grad in of.grads:
            change(grad)

    return change_all


def add_noise(of: Training) -> None:
    for grad in of.grads:
        grad.add_(of.noise(grad))


def mask(of: Training) -> None:
    for grad in of.grads:
        grad.mul_((of.noise(grad) > 0).to(grad.dtype))


def project(of: Training) -> None:
    """Leave what is orthogonal to the weights."""
    for param in of.params:
        if param.grad is not None:
            weight = param.detach()
            param.grad.sub_((param.grad * weight).sum() / weight.square().sum() * weight)


def decay(of: Training) -> None:
    for param in of.params:
        if param.grad is not None:
            param.grad.add_(param.detach(), alpha=0.1)


def clip_by_hand(of: Training) -> None:
    """As loops did it before torch had a function for it."""
    total = sum(grad.detach().data.norm(2).item() ** 2 for grad in of.grads) ** 0.5
    for grad in of.grads:
        grad.data.mul_(min(1.0, 0.5 * LIMIT / (total + 1e-6)))


def assign(change: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[Training], None]:
    def assign_all(of: Training) -> None:
        for param in of.params:
            if param.grad is not None:
                param.grad = change(param.grad)

    return assign_all


def assign_data(of: Training) -> None:
    for param in of.params:
        if param.grad is not None:
            param.grad.data = param.grad.data.roll(1, 0)


def swap(of: Training) -> None:
    for one, other in pairwise(of.params[::2]):
        if one.grad is not None and other.grad is not None:
            one.grad, other.grad = other.grad.clone(), one.grad.clone()


def drop_one(of: Training) -> None:
    of.params[2].grad = None


def put_back(of: Training) -> None:
    kept, of.params[0].grad = of.params[0].grad, None
    of.params[0].grad = kept


def foreach_add(of: Training) -> None:
    torch._foreach_add_(of.grads, [of.noise(grad) for grad in of.grads])


def unscale(of: Training) -> None:
    """As torch's GradScaler does."""
    found_inf = torch.zeros(1)
    torch._amp_foreach_non_finite_check_and_unscale_(of.grads, found_inf, torch.tensor(1 / 3))
    of.found.append(found_inf)


def through_a_vector(of: Training) -> None:
    vector = parameters_to_vector(of.grads)
    of.found.append(vector)
    vector_to_parameters(vector * 0.5, copies := [grad.clone() for grad in of.grads])
    for grad, value in zip(of.grads, copies, strict=True):
        grad.copy_(value)


def into_out(of: Training) -> None:
    for grad in of.grads:
        torch.add(grad, of.noise(grad), out=grad)


def pcgrad(of: Training) -> None:
    """Gradient surgery: each task's gradient without what conflicts with the other's."""
    tasks = []
    for number in (11, 12):
        of.optimizer.zero_grad()
        of.loss(number).backward()
        tasks.append([grad.clone() for grad in of.grads])
    of.optimizer.zero_grad()
    for param, one, other in zip(of.params, *tasks, strict=True):
        dot = (one * other).sum()
        param.grad = one + other - (dot / other.square().sum() * other if dot < 0 else 0)


def sharpness_aware(of: Training) -> None:
    norm = torch.stack([grad.norm(p=2) for grad in of.grads]).norm(p=2)
    steps = [grad * (0.05 / (norm + 1e-12)) for grad in of.grads]
    with torch.no_grad():
        for param, step in zip([p for p in of.params if p.grad is not None], steps, strict=True):
            param.add_(step)
    trained = [p for p in of.params if p.grad is not None]
    of.optimizer.zero_grad()
    of.loss(13).backward()
    with torch.no_grad():
        for param, step in zip(trained, steps, strict=True):
            param.sub_(step)


def without_backward(of: Training) -> None:
    """Evolution strategies, federated averaging: gradients that no backward has made."""
    of.optimizer.zero_grad()
    for param in of.params:
        param.grad = of.noise(param)


def set_then_add(of: Training) -> None:
    of.optimizer.zero_grad()
    for param in of.params:
        param.grad = of.noise(param)
    of.loss(14).backward()


def zeroed_then_added(of: Training) -> None:
    of.optimizer.zero_grad(set_to_none=False)
    of.loss(15, without=1).backward()


def add_after_changes(of: Training) -> None:
    """Another backward adds to what was written, and to what was multiplied by a number."""
    for grad in of.grads:
        grad.mul_(0.3)
    of.grads[0].clamp_(-1e-3, 1e-3)
    of.loss(16).backward()
    for grad in of.grads:
        grad.mul_(0.7)
        grad.mul_(0.9)


def by_differentiation(of: Training) -> None:
    for param, grad in zip(of.params, torch.autograd.grad(of.loss(17), of.params), strict=True):
        param.grad = grad if param.grad is None else param.grad + grad


def saved(of: Training) -> Any:
    file = io.BytesIO()
    torch.save(of.grads, file)
    file.seek(0)
    return torch.load(file)


READS: dict[str, Callable[[Training], Any]] = {
    "norms": lambda of: [(g.norm(), g.norm(1), g.norm(float("inf")), g.norm(dim=0)) for g in of.grads],
    "absolute": lambda of: [(g.abs().max(), g.abs().mean(), g.std(), g.sum(0)) for g in of.grads],
    "finite": lambda of: [(g.isnan().any(), torch.isfinite(g).all(), (g == 0).sum()) for g in of.grads],
    "copies": lambda of: [(g.clone(), g.detach().cpu() + 0, g.double(), g.to(torch.bfloat16)) for g in of.grads],
    "stacked": lambda of: torch.stack([g.detach().norm() for g in of.grads]).norm(),
    "joined": lambda of: torch.cat([g.view(-1) for g in of.grads]),
    "similarity": lambda of: nn.functional.cosine_similarity(of.grads[0].flatten(), of.grads[2].flatten(), dim=0),
    "histogram": lambda of: [torch.histc(g.float(), 8) for g in of.grads],
    "largest": lambda of: [(*g.flatten().topk(3), g.argmax(), g.max().item()) for g in of.grads],
    "parts": lambda of: [
        (g[0].clone(), g[-1:].sum(), g.T + 0, g.reshape(-1)[::2].abs(), g.unbind()[1] + 0) for g in of.grads
    ],
    "python": lambda of: [(g.tolist(), len(g), g.numpy().sum().item(), [row.sum() for row in g]) for g in of.grads],
    "deep copies": lambda of: copy.deepcopy(of.grads),
    "files": saved,
    "with weights": lambda of: [(p * p.grad).sum() for p in of.params if p.grad is not None],
    "products": lambda of: [g @ g.T for g in of.grads if g.dim() == 2],
    "foreach": lambda of: [torch._foreach_abs(of.grads), torch._foreach_norm(of.grads, 1)],
    "text": lambda of: [repr(g) for g in of.grads],
    "attributes": lambda of: [(g.shape, g.dtype, g.device, g.requires_grad, g.is_leaf, g.numel()) for g in of.grads],
}
"""They change nothing. Their result is compared."""

WRITES: dict[str, Callable[[Training], object]] = {
    "noise": add_noise,
    "mask": mask,
    "projection": project,
    "decay": decay,
    "clamp": each(lambda grad: grad.clamp_(-1e-3, 1e-3)),
    "clip by value": lambda of: nn.utils.clip_grad_value_(of.params, 1e-3),
    "clip by value, one by one": lambda of: nn.utils.clip_grad_value_(of.params, 1e-3, foreach=False),
    "clip by hand": clip_by_hand,
    "largest norm": lambda of: nn.utils.clip_grad_norm_(of.params, 1e3, norm_type=float("inf")),
    "centred": each(lambda grad: grad.copy_(grad - grad.mean())),
    "sign": assign(torch.sign),
    "normalised": assign(lambda grad: grad / (grad.norm() + 1e-8)),
    "itself": assign(lambda grad: grad),
    "itself detached": assign(lambda grad: grad.detach()),
    "data": each(lambda grad: grad.data.mul_(0.7)),
    "other data": assign_data,
    "a row": each(lambda grad: grad.__setitem__(0, 0.0)),
    "a column": each(lambda grad: grad[..., 0].mul_(2)),
    "every second": each(lambda grad: grad.view(-1)[::2].zero_()),
    "masked": each(lambda grad: grad.masked_fill_(grad.abs() < 1e-4, 0)),
    "sparsified": each(lambda grad: grad.__setitem__(grad.abs() < grad.abs().median(), 0)),
    "number": each(lambda grad: grad.mul_(0.3)),
    "numbers": each(lambda grad: grad.mul_(0.3).mul_(0.7)),
    "division": each(lambda grad: grad.div_(3)),
    "division of several": lambda of: torch._foreach_div_(of.grads, 3),
    "numbers by foreach": lambda of: torch._foreach_mul_(of.grads, [0.1 * i for i in range(len(of.grads))]),
    "foreach": foreach_add,
    "unscaled": unscale,
    "vector": through_a_vector,
    "without nan": each(lambda grad: grad.nan_to_num_()),
    "interpolated": each(lambda grad: grad.lerp_(grad.sign(), 0.25)),
    "product added": each(lambda grad: grad.addcmul_(grad, grad, value=0.5)),
    "out": into_out,
    "swapped": swap,
    "one dropped": drop_one,
    "put back": put_back,
    "one zeroed": lambda of: of.grads[1].zero_(),
    "all zeroed": zeroed_then_added,
    "pcgrad": pcgrad,
    "sam": sharpness_aware,
    "no backward": without_backward,
    "set, then added to": set_then_add,
    "changed, then added to": add_after_changes,
    "differentiated": by_differentiation,
}
"""They change gradients. What training makes of them is compared."""

ONE_NUMBER = {"number", "data", "clip by hand"}
"""Uses that multiply gradients by one number. If they are clipped, too, the update multiplies by both at once."""
ADD_ANOTHER = {"all zeroed", "changed, then added to"}
"""Uses in which another backward adds to gradients."""

USES: dict[str, Callable[[Training], object]] = {
    **{name: lambda of, read=read: of.found.append(read(of)) for name, read in READS.items()},
    **WRITES,
}


def clip_exactly(params: Iterable[Any], limit: float) -> None:
    """As `wrap(max_grad_norm=...)` does: with a norm in float64."""
    grads = [param.grad for param in params if param.grad is not None]
    norm = sum(grad.double().square().sum().item() for grad in grads) ** 0.5
    for grad in grads if norm + 1e-6 > limit else ():
        grad.mul_(limit / (norm + 1e-6))


def train(of: Training, use: str, clip: Callable[[], object] = lambda: None, passes: int = 1) -> list[Any]:
    """The weights after a few steps that make a use of gradients, and what it found."""
    for step in range(3):
        for number in range(passes):
            of.loss(10 * step + number, without=step).backward()
        USES[use](of)
        clip()
        of.optimizer.step()
        of.optimizer.zero_grad()
    return [*of.found, *(param.detach().clone() for param in of.params)]


def assert_alike(mine: Any, other: Any, where: str) -> None:
    """Equal to the bit, and of the same types."""
    if isinstance(other, torch.Tensor):
        assert mine.dtype is other.dtype, where
        torch.testing.assert_close(mine, other, rtol=0, atol=0, equal_nan=True, msg=where)
    elif isinstance(other, Mapping):
        assert [*mine] == [*other], where
        assert_alike([*mine.values()], [*other.values()], f"{where}, {[*other]}")
    elif isinstance(other, list | tuple):
        assert len(mine) == len(other), where
        for index, pair in enumerate(zip(mine, other, strict=True)):
            assert_alike(*pair, f"{where}, {index}")
    else:
        assert mine == other or (mine != mine and other != other), where  # both are NaN


RULE: dict[str, Any] = {"lr": 0.125, "momentum": 0.5, "weight_decay": 0.25}
"""Settings of SGD."""


def plainly(
    use: str, clips: bool = False, passes: int = 1, ranks: tuple[int, ...] = (0,), device: str = "cpu"
) -> list[Any]:
    """As `train` does, without Pagoda."""
    model = Net().to(device)
    of = Training(model, torch.optim.SGD(model.parameters(), **RULE), ranks)
    return train(of, use, partial(clip_exactly, of.params, LIMIT) if clips else lambda: None, passes)
