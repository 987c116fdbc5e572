"""What programs do with `optimizer.state`, and a loop that does it, with Pagoda or without."""

import collections
import copy
import io
from collections.abc import Callable, Mapping
from typing import Any

import torch
from gradient_uses import WIDTH, Net, Training
from torch.nn.utils import parameters_to_vector, vector_to_parameters

import pagoda
from pagoda.optim.flat import update as update_blocks
from pagoda.optim.rule import ElementwiseRule

RULES: dict[str, Callable[[], Any]] = {
    "torch-adamw": lambda: pagoda.Optim(torch.optim.AdamW, lr=2**-6, weight_decay=0.1),
    "torch-sgd": lambda: pagoda.Optim(torch.optim.SGD, lr=2**-4, momentum=0.75, dampening=0.5),
    "torch-nadam": lambda: pagoda.Optim(torch.optim.NAdam, lr=2**-6),
    "torch-asgd": lambda: pagoda.Optim(torch.optim.ASGD, lr=2**-4),
    "adamw": lambda: pagoda.AdamW(lr=2**-6, weight_decay=0.1),
    "sgd": lambda: pagoda.SGD(lr=2**-4, momentum=0.75, dampening=0.5),
    "sgd-alone": lambda: pagoda.SGD(lr=2**-4),
    "lion": lambda: pagoda.Lion(lr=2**-8),
    "adafactor": lambda: pagoda.Adafactor(lr=2**-6),
    "adafactor-first": lambda: pagoda.Adafactor(lr=2**-6, beta1=0.5),
    "muon": lambda: pagoda.Muon(lr=2**-6),
    "adamw-bf16": lambda: pagoda.AdamW(lr=2**-6, moments="bf16"),
    "adamw-8bit": lambda: pagoda.AdamW(lr=2**-6, moments="8bit"),
}


class InRam(torch.optim.Optimizer):
    """A rule of Pagoda as plain PyTorch would have it: a dictionary of tensors for each parameter."""

    def __init__(self, model: torch.nn.Module, rule: Any) -> None:
        self.rule, self.names = rule, {param: name for name, param in model.named_parameters()}
        super().__init__(model.parameters(), rule.defaults())

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            rule = self.rule.with_group(group)
            for param in group["params"]:
                if param.grad is not None:
                    self._update(rule, param)

    def _update(self, rule: Any, param: Any) -> None:
        entry: dict[str, Any] = self.state[param] if rule.own_states() or rule.counts_steps else {}
        held = {key: value for key, value in entry.items() if value is not None}
        step, name = rule.steps_in(held) + 1, self.names[param]
        kept = rule.kept_states(held, name, tuple(param.shape))
        if isinstance(rule, ElementwiseRule):
            states = {"weight": param.data, **kept}
            update_blocks(rule, states, param.grad, rule.scalars(step), rule.noise(name, step))
        else:
            rule.update(step, param.data, param.grad.clone(), kept)
        for key, value in rule.torch_state(step, kept).items():
            if isinstance(entry.get(key), torch.Tensor):
                entry[key].copy_(value)
            else:
                entry[key] = value.clone()


def in_ram(model: torch.nn.Module, rule: Any) -> torch.optim.Optimizer:
    """The same optimizer in plain PyTorch."""
    if isinstance(rule, pagoda.Optim):
        return rule.kind(model.parameters(), **rule.settings)
    return InRam(model, rule)


Use = Callable[[Training], Any]


def tensors(of: Training, *params: int) -> list[Any]:
    """The states of some parameters, or of all, that are tensors with more than one element."""
    chosen = [of.params[at] for at in params] or of.params
    return [v for p in chosen for v in of.optimizer.state[p].values() if torch.is_tensor(v) and v.numel() > 1]


def snapshot(state: Mapping[Any, Any], params: list[Any]) -> dict[int, Any]:
    """Copies of all states, by the number of their parameter, in their order."""
    numbers = {id(param): number for number, param in enumerate(params)}
    return {
        numbers[id(param)]: {k: v.clone() if torch.is_tensor(v) else v for k, v in entry.items()}
        for param, entry in state.items()
    }


def each(change: Callable[[Any], object], *params: int) -> Use:
    def change_all(of: Training) -> None:
        for tensor in tensors(of, *params):
            change(tensor)

    return change_all


def zero_everything(of: Training) -> None:
    """Also counts."""
    for entry in of.optimizer.state.values():
        for key, value in entry.items():
            if torch.is_tensor(value):
                value.zero_()
            elif isinstance(value, int | float):
                entry[key] = type(value)(0)


def delete(of: Training) -> None:
    for param in of.params[:3]:
        if param in of.optimizer.state:
            del of.optimizer.state[param]


def prune(of: Training) -> None:
    """ReLoRA's reset: all but the largest moments become zero."""
    for tensor in tensors(of):
        magnitude = torch.abs(tensor)
        threshold = torch.quantile(magnitude.flatten().to(dtype=torch.float32), 0.75).to(dtype=tensor.dtype)
        tensor.mul_((magnitude > threshold).to(dtype=tensor.dtype))


def new_tensors(of: Training) -> None:
    for param in of.params[:2]:
        entry = of.optimizer.state[param]
        for key, value in entry.items():
            if torch.is_tensor(value):
                entry[key] = torch.zeros_like(value)


def new_entries(of: Training) -> None:
    for param in of.params[:2]:
        if entry := of.optimizer.state.get(param):
            of.optimizer.state[param] = {k: v * 0.5 if torch.is_tensor(v) and v.dim() else v for k, v in entry.items()}


def one_by_one(of: Training) -> None:
    """Build an entry key by key."""
    old = {k: v.clone() if torch.is_tensor(v) else v for k, v in of.optimizer.state[of.params[0]].items()}
    of.optimizer.state[of.params[0]] = {}
    for key, value in old.items():
        of.optimizer.state[of.params[0]][key] = value


def swap(of: Training) -> None:
    state, (one, _, other, *_) = of.optimizer.state, of.params
    if one in state:
        state[one], state[other] = state[other], state[one]


def put_back(of: Training) -> None:
    entry = of.optimizer.state.pop(of.params[0], None)
    if entry is not None:
        of.optimizer.state[of.params[0]] = entry


def from_copies(of: Training) -> None:
    of.optimizer.state = collections.defaultdict(
        dict, {p: {k: copy.deepcopy(v) for k, v in entry.items()} for p, entry in of.optimizer.state.items()}
    )


def to_cpu(of: Training) -> None:
    """As trainers move states between devices."""
    for param, entry in of.optimizer.state.items():
        of.optimizer.state[param] = {k: v.to("cpu") if torch.is_tensor(v) else v for k, v in entry.items()}


def keys_to_cpu(of: Training) -> None:
    for entry in of.optimizer.state.values():
        for key, value in entry.items():
            if torch.is_tensor(value):
                entry[key] = value.to(value.device, non_blocking=True)


def count(of: Training) -> None:
    """Another count, in place and as a new tensor."""
    for param in of.params[:4]:
        entry = of.optimizer.state[param]
        if torch.is_tensor(entry.get("step")):
            entry["step"].fill_(7)
            entry["step"] += 2
    entry = of.optimizer.state[of.params[1]]
    if torch.is_tensor(entry.get("step")):
        entry["step"] = torch.tensor(1.0)


def held_count(of: Training) -> Any:
    """A count that was taken before goes on, also after a write."""
    if getattr(of, "kept", None) is None:
        of.kept = [v for v in of.optimizer.state[of.params[0]].values() if v.dim() == 0]  # type: ignore[attr-defined]
    for step in of.kept:
        step.add_(3)
    return [step.clone() for step in of.kept]


def count_from_zero(of: Training) -> None:
    entry = of.optimizer.state[of.params[0]]
    if torch.is_tensor(entry.get("step")):
        entry["step"].zero_()


def resampled(of: Training) -> None:
    """New neurons: their weights and the rows of their moments."""
    dead = torch.tensor([1, 5, 8])
    with torch.no_grad():
        of.params[0][dead] = 0.125
    for tensor in tensors(of, 0):
        if tensor.shape == of.params[0].shape:
            tensor[dead] = 0
            tensor[:, 3].fill_(2**-9)
            tensor.data[2:4, :2].mul_(0.5)


def saved(of: Training) -> Any:
    file = io.BytesIO()
    torch.save([dict(entry) for entry in of.optimizer.state.values()], file)
    torch.save(tensors(of), file_of_tensors := io.BytesIO())
    return [torch.load(each) for each in (file, file_of_tensors) if each.seek(0) == 0]


def held(of: Training) -> Any:
    """What was taken from `state` before shows the newest values."""
    if getattr(of, "kept", None) is None:
        of.kept = of.optimizer.state, of.optimizer.state[of.params[0]], tensors(of)  # type: ignore[attr-defined]
    state, entry, parts = of.kept  # type: ignore[attr-defined]
    copies = {k: v.clone() if torch.is_tensor(v) else v for k, v in entry.items()}
    return snapshot(state, of.params), copies, [part.clone() for part in parts]


def between(of: Training) -> Any:
    """Between backward and `step()`."""
    of.loss(20).backward()
    found = [tensor.norm() for tensor in tensors(of, 1)]
    each(lambda tensor: tensor.mul_(0.5), 0)(of)
    of.optimizer.state.pop(of.params[2], None)
    of.optimizer.step()
    of.optimizer.zero_grad()
    return found


def after_gradients(of: Training) -> None:
    """A state of gradients and weights."""
    of.loss(21).backward()
    for param in of.params[:2]:
        for tensor in tensors_of(of, param):
            tensor.add_(param.grad, alpha=0.25).add_(param.detach(), alpha=2**-8).abs_()
    of.optimizer.zero_grad()


def tensors_of(of: Training, param: Any) -> list[Any]:
    return [v for v in of.optimizer.state[param].values() if torch.is_tensor(v) and v.shape == param.shape]


def frozen(of: Training) -> None:
    """LISA: only some layers train, and others lose their states."""
    layer = len(of.found) % 4
    for number, each_layer in enumerate(of.model.layers):
        each_layer.requires_grad_(number == layer)
        for param in each_layer.parameters() if number != layer else ():
            of.optimizer.state.pop(param, None)


def looked_at(of: Training) -> Any:
    state = of.optimizer.state
    entries = [*state.values()]
    return (
        (len(state), [param in state for param in of.params], bool(state), state.get(None, 5), isinstance(state, dict)),
        [(list(entry), len(entry), "exp_avg" in entry, isinstance(entry, dict)) for entry in entries],
        [(v.shape, v.dtype, v.device, v.requires_grad, v.is_leaf) for v in tensors(of)],
        sum(v.numel() for entry in entries for v in entry.values() if torch.is_tensor(v)),
    )


USES: dict[str, Use] = {
    "looked at": looked_at,
    "read": lambda of: snapshot(of.optimizer.state, of.params),
    "norms": lambda of: [(v.norm(), v.abs().max(), v.float().mean(), v.sum(0), (v == 0).sum()) for v in tensors(of)],
    "deep copies": lambda of: [*copy.deepcopy(of.optimizer.state).values()],
    "files": saved,
    "texts": lambda of: [f"{v}" for v in tensors(of, 1)],
    "numpy": lambda of: [v.numpy().sum().item() for v in tensors(of)],
    "held": held,
    "zeroed": each(lambda v: v.zero_()),
    "all zeroed": zero_everything,
    "filled": each(lambda v: v.fill_(2**-7), 0, 3),
    "copied": each(lambda v: v.copy_(v.abs() * 0.5)),
    "scaled": each(lambda v: v.mul_(0.75)),
    "noise": each(lambda v: v.add_(torch.full_like(v, 2**-10))),
    "operators": each(lambda v: v.__imul__(0.5)),
    "data": each(lambda v: v.data.zero_(), 0, 1, 2),
    "new data": each(lambda v: setattr(v, "data", v.data.abs() + 2**-10), 0),
    "foreach": lambda of: tensors(of) and torch._foreach_mul_(tensors(of), 0.5) and None,
    "resampled": resampled,
    "pruned": prune,
    "popped": lambda of: [of.optimizer.state.pop(param, None) for param in of.params[1:3]] and None,
    "deleted": delete,
    "emptied": lambda of: of.optimizer.state[of.params[0]].clear(),
    "empty entry": lambda of: of.optimizer.state.__setitem__(of.params[4], {}),
    "cleared": lambda of: of.optimizer.state.clear(),
    "replaced": lambda of: setattr(of.optimizer, "state", collections.defaultdict(dict)),
    "set as by pickle": lambda of: of.optimizer.__setstate__({"state": collections.defaultdict(dict)}),
    "as vectors": lambda of: (
        vector_to_parameters(parameters_to_vector(tensors(of)) * 0.5, tensors(of)) if tensors(of) else None
    ),
    "updated": lambda of: of.optimizer.state.update({param: {} for param in of.params[2:4]}),
    "from copies": from_copies,
    "new tensors": new_tensors,
    "new entries": new_entries,
    "key by key": one_by_one,
    "swapped": swap,
    "put back": put_back,
    "to the CPU": to_cpu,
    "keys to the CPU": keys_to_cpu,
    "count": count,
    "held count": held_count,
    "count from zero": count_from_zero,
    "between": between,
    "gradients": after_gradients,
    "frozen": frozen,
}


def train(of: Training, use: str, steps: int = 6, losses: bool = True) -> list[Any]:
    """Take steps, with a use of the state after some. Returns what it has found, `losses`, states and weights."""
    for number in range(steps):
        loss = of.loss(number)
        loss.backward()
        of.optimizer.step()
        of.optimizer.zero_grad()
        if losses:
            of.found.append(loss.detach())
        if number in (1, 2, 4):
            of.found.append(USES[use](of))
    of.found.append(snapshot(of.optimizer.state, of.params))
    return [*of.found, *(param.detach().clone() for param in of.params)]


def plainly(use: str, rule: str, ranks: tuple[int, ...] = (0,)) -> list[Any]:
    """What plain PyTorch finds."""
    model = Net()
    return train(Training(model, in_ram(model, RULES[rule]()), ranks), use, losses=len(ranks) == 1)


assert WIDTH > 8, "rows 1, 5 and 8 are resampled"
