"""Private names of torch and transformers that Pagoda uses: each is there, and these are all.

pyproject.toml bounds both packages. Where a name here is gone in a new version, its line says what breaks.
"""

import ast
import re
import tomllib
from collections.abc import Iterable, Iterator
from importlib import import_module
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement
from packaging.version import Version
from transformers import Trainer

import pagoda
from pagoda.integrations.transformers import PagedTrainerMixin

PACKAGE = Path(pagoda.__file__).parent
NAMES = {
    "torch._C._current_graph_task_id": "whether backward runs is not known: recomputed blocks take faults for forward",
    "torch._C._autograd._top_saved_tensors_default_hooks": "saved-tensor hooks of a user cannot be told from Pagoda's",
    "torch._C._autograd._push_saved_tensors_default_hooks": "gradients of gradients hold all weights at once",
    "torch._C._autograd._pop_saved_tensors_default_hooks": "after Ctrl-C, saved-tensor hooks stay behind",
    "torch._C._functorch.peek_interpreter_stack": "forwards under functorch's transforms cannot be refused",
    "torch._C._get_dispatch_mode": "torch.export, make_fx and fake tensors fail inside Pagoda with errors of torch",
    "torch._C._TorchDispatchModeKey": "torch.export, make_fx and fake tensors fail inside Pagoda with errors of torch",
    "torch._C._TorchDispatchModeKey.FAKE": "functions of fake tensors cannot be refused",
    "torch._C._TorchDispatchModeKey.PROXY": "functions that are recorded cannot be refused",
    "torch._C.DisableTorchFunctionSubclass": "hidden parameters and gradient markers cannot be read by Pagoda itself",
    "torch._C._storage_Use_Count": "a lease cannot be told from a free one: nothing is ever evicted",
    "torch._C._construct_storage_from_data_pointer": "a GPU's leases have no storage of their own",
    "torch.Tensor._make_wrapper_subclass": "parameters cannot wait for their values",
    "torch.nn.Module._load_from_state_dict": "checkpoints have buffers that no module of a new model takes",
    "torch._has_compatible_shallow_copy_type": "Module.to unties tied parameters that wait",
    "torch.optim._muon.muon": "Muon has no math: its update is torch's own",
    "torch.optim._muon.DEFAULT_A": "Muon has not the coefficients of torch's",
    "torch.optim._muon.DEFAULT_B": "Muon has not the coefficients of torch's",
    "torch.optim._muon.DEFAULT_C": "Muon has not the coefficients of torch's",
    "torch._assert_async": "labels out of range are not noticed on a GPU",
    "torch.autograd.Variable._execution_engine": "ranks do not say where a backward ends",
    "torch.autograd.Variable._execution_engine.queue_callback": "ranks do not say where a backward ends",
    "torch.autograd.profiler._is_profiler_enabled": "waits and lanes have no names in torch's profiler",
    "torch.nn.utils.parametrize._cache": "blocks recompute without what parametrize.cached() has cached",
    "torch.nn.utils.parametrize._cache_enabled": "blocks recompute without what parametrize.cached() has cached",
    "torch._dynamo.OptimizedModule": "what torch.compile returned is not recognised: checkpoints have its names",
    "torch._subclasses.fake_tensor.FakeTensorMode": "FLOPs are not counted; state dicts are not streamed to files",
    "torch.distributed.distributed_c10d._get_default_store": "silent ranks on other hosts are not named",
    "torch.nn.modules.batchnorm._BatchNorm": "batch norms are not recognised where they cannot be trained",
    "torch.utils._python_dispatch.TorchDispatchMode": "values on the meta device are merged without an error",
    "torch.utils._pytree.TreeSpec": "arguments and outputs of blocks cannot be taken apart",
    "torch.utils._pytree.tree_flatten": "arguments and outputs of blocks cannot be taken apart",
    "torch.utils._pytree.tree_flatten_with_path": "lists of tensors that an optimizer class keeps have no names",
    "torch.utils._pytree.tree_unflatten": "arguments and outputs of blocks cannot be put together",
    "torch.utils._pytree.tree_leaves": "hidden parameters among arguments are not found",
    "torch.utils._pytree.tree_map": "hidden parameters among arguments are not found",
    "torch.utils._pytree.tree_iter": "tensors among the arguments of an operation that is recorded are not found",
    "torch.utils._pytree.tree_map_only": "state dicts are not streamed to files; no embedding is on the CPU for a GPU",
    "lightning.pytorch.core.optimizer._MockOptimizer": "Lightning: no optimizer is taken for one",
    "threading._DummyThread": "autograd's threads wait for the forward that waits for them",
    "sys._getframe": "errors about waiting tensors do not name the code that uses them",
}
"""Name -> what breaks without it. They are in modules that the package names in full, or imports from."""
OF_OBJECTS = {
    "torch.UntypedStorage._cdata": "storages have no address: packed tensors are not recognised",
    "torch.Tensor._version": "writes in place are not noticed",
    "torch.nn.Module._parameters": "parameters cannot be replaced by leases",
    "transformers.Trainer._build_accelerator_args": "Accelerate casts and scales besides Pagoda",
    "transformers.Trainer._wrap_model": "models are not wrapped",
    "transformers.Trainer._move_model_to_device": "a model that does not fit is moved to the GPU",
    "transformers.Trainer._clip_grad_norm": "gradients are clipped by torch besides",
    "transformers.Trainer._get_grad_norm": "norms are asked of torch, one by one",
    "transformers.Trainer._save": "all weights are in RAM when a model is saved",
    "transformers.Trainer._save_optimizer_and_scheduler": "all state is in RAM when a checkpoint is saved",
    "transformers.Trainer._push_from_checkpoint": "checkpoints are not uploaded to the Hub",
    "transformers.Trainer._save_checkpoint": "checkpoints are not written beside training",
    "transformers.Trainer._save_scaler": "the scale of an fp16 loss is sought in Accelerate, which has none",
    "transformers.Trainer._load_scaler": "the scale of an fp16 loss is sought in Accelerate, which has none",
    "transformers.Trainer._finalize_training": "after a signal, the best model is loaded, and checkpoints are deleted",
    "transformers.Trainer._load_from_checkpoint": "a checkpoint without state of Pagoda is not refused",
    "transformers.Trainer._load_optimizer_and_scheduler": "a run resumes without its state",
    "transformers.Trainer._load_best_model": "all weights are in RAM when the best model comes back",
    "transformers.PreTrainedModel._get_dtype_plan": "parameters that should stay in fp32 are cast without a warning",
    "transformers.PreTrainedConfig._decode_special_floats": "models with an infinite setting cannot be exported",
    "transformers.PreTrainedModel._init_weights": "weights that are made in pages are not initialised",
    "transformers.PreTrainedModel._keys_to_ignore_on_save": "exports have keys that transformers leaves out",
    "transformers.PreTrainedModel._adjust_missing_and_unexpected_keys": "`load` warns of keys that may be absent",
}
"""Attributes of objects; what they are called is searched for in the package."""
OF_INSTANCES = {
    "_is_param": "hidden parameters are no parameters to torch",
    "_compiled_call_impl": "Module: no hook leases weights",
    "_call_impl": "Module: no hook leases weights",
    "_buffers": "Module: recomputed blocks see buffers that the first forward has changed",
    "_load_from_state_dict": "Module: checkpoints have buffers that no module of a new model takes",
    "_metadata": "state dict: modules do not know the version of what they load",
    "_modules": "Module: parts of a compiled model are not found",
    "_non_persistent_buffers_set": "Module: checkpoints have buffers that state dicts leave out",
    "_state_dict_hooks": "Module: state dicts lack what hooks add",
    "_forward_pre_hooks": "Module: layers with hooks are cut in tiles",
    "_base": "Tensor: outputs of tiles that are parts of one tensor are copied",
    "_use_count": "Tensor: hooks on autograd's nodes are lost without an error",
    "_n_gpu": "Trainer: without torchrun, `pagoda train` is refused on a machine with several GPUs",
    "_loss_shifts_labels": "Trainer: means over tokens count a first label that the loss does not see",
    "_backward_hooks": "Tensor: hooks are lost where a parameter gets new memory",
    "_post_accumulate_grad_hooks": "Tensor: hooks are lost where a parameter gets new memory",
    "_local_tensor": "DTensor: this rank's part cannot be read",
    "_checkpoint_offset": "storage: optimizer states are not streamed to files",
    "_schema": "operator: what is recorded of waiting tensors has no name",
    "_to_copy": "operator: casts of waiting tensors are not recorded",
    "_unsafe_view": "operator: views of waiting tensors are not recorded",
    "_opt_called": "Optimizer: learning-rate schedulers warn",
    "_orig_mod": "OptimizedModule: compiled modules are not recognised",
    "_can_checkpoint_with_cache": "transformers: the key-value cache is on while blocks recompute",
    "_attn_implementation": "transformers: documents are kept apart by dense masks",
    "_can_set_attn_implementation": "transformers: documents are kept apart by dense masks",
    "_from_config": "transformers: models cannot be built without their weights",
    "_get_lr": "transformers: learning rates that Adafactor chooses itself are not shown",
    "_get_output_dir": "transformers: checkpoints are sought in another directory",
    "_check_merge_allowed": "peft: adapters that cannot be merged are merged",
    "_fix_param_name_to_vllm": "TRL: vLLM gets weights by other names",
    "_is_accelerate_prepared": "Accelerate: a model is prepared twice",
    "_forward_redirection": "Lightning: steps do not pass through the wrapped model",
    "_configure_launcher": "Lightning: one process is trained as several",
    "_actions": "argparse: unknown flags of TRL's scripts are refused without a suggestion",
    "_lightning_module": "Lightning: the strategy has no module",
    "_optimizers": "Lightning: the strategy has no optimizers",
    "_reset_optimizers_and_schedulers": "Lightning: a second fit keeps old optimizers",
    "_iter_named_params": "Accelerate: parameters are not found by name",
}
"""Attributes of objects that the package asks for -> whose they are, and what breaks without them."""
SHARED = {"_engine", "_reference"}
"""Private attributes of the package's own classes that other files of the package use."""
UNDOCUMENTED = {
    "transformers.core_model_loading": "revert_weight_conversion WeightConverter WeightRenaming dot_natural_key "
    "rename_source_key",
    "transformers.conversion_mapping": "get_model_conversion_mapping",
    "transformers.utils.loading_report": "LoadStateDictInfo",
    "transformers.modeling_gguf_pytorch_utils": "load_gguf_checkpoint get_gguf_hf_weights_map read_field "
    "TENSOR_PROCESSORS TensorProcessor",
}
"""Public by name, but no interface of transformers: loading and export of models whose tensors it renames."""


def found(name: str) -> Any:
    """The thing of this dotted name."""
    try:
        return import_module(name)
    except ImportError:
        owner, _, attribute = name.rpartition(".")
        return getattr(found(owner), attribute)


TREES = [ast.parse(path.read_text()) for path in PACKAGE.rglob("*.py")]


def is_private(name: str) -> bool:
    return name[:1] == "_" != name[1:2]


def imports(tree: ast.Module) -> dict[str, str]:
    """Every name that a file imports of other packages -> its full name."""
    names: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module:
            names |= {alias.asname or alias.name: f"{node.module}.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.Import):
            names |= {alias.asname or alias.name.partition(".")[0]: alias.name for alias in node.names if alias.asname}
            names |= {each: each for alias in node.names if not alias.asname for each in [alias.name.partition(".")[0]]}
    return {name: full for name, full in names.items() if not full.startswith("pagoda")}


def used() -> Iterator[str]:
    """Every name of another package with a private part, in full, however the package has imported it."""
    for tree in TREES:
        known = imports(tree)
        names = [*known.values()]
        for node in ast.walk(tree):
            if isinstance(node, ast.Attribute):
                first, dot, rest = ast.unparse(node).partition(".")
                names += [f"{known[first]}{dot}{rest}"] if first in known else []
        for name in names:
            if re.fullmatch(r"[\w.]+", name) and any(map(is_private, name.split(".")[1:])):
                yield name


def own_names(trees: Iterable[ast.Module]) -> set[str]:
    """Private names that files define."""
    own: set[str] = {"_replace"}  # of named tuples, and documented
    for node in (node for tree in trees for node in ast.walk(tree)):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            own.add(node.name)
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            own.add(node.target.id)
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and ast.unparse(node.value) == "self":
            own.add(node.attr)
        elif isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__slots__":
            own |= {str(each.value) for each in ast.walk(node.value) if isinstance(each, ast.Constant)}
    return own


def of_instances() -> Iterator[str]:
    """Every private attribute of an object that its file does not define, and of `self` that no file does."""
    of_self = own_names(TREES)
    for tree in TREES:
        known, of_others = imports(tree), own_names([tree]) | SHARED
        for node in ast.walk(tree):
            if isinstance(node, ast.Attribute):
                name, owner, whole = node.attr, ast.unparse(node.value), ast.unparse(node)
                if whole.partition(".")[0] in known and re.fullmatch(r"[\w.]+", whole):
                    continue  # `used` has its name in full
                own: set[str] = of_self if owner == "self" else set() if owner == "super()" else of_others
                if is_private(name) and name not in own:
                    yield name
            elif isinstance(node, ast.Call) and ast.unparse(node.func) in ("getattr", "hasattr"):
                names = [each.value for each in node.args[1:2] if isinstance(each, ast.Constant)]
                yield from (n for n in names if isinstance(n, str) and is_private(n) and n not in of_others)


@pytest.mark.parametrize("name", [*NAMES, *OF_OBJECTS])
def test_a_private_name_is_there(name: str) -> None:
    owner = found(name.rpartition(".")[0])
    known = hasattr(owner, name.rpartition(".")[2]) or name == "torch.nn.Module._parameters"
    assert known or hasattr(owner(), name.rpartition(".")[2]), {**NAMES, **OF_OBJECTS}[name]


@pytest.mark.parametrize("module", UNDOCUMENTED)
def test_what_maps_tensors_of_files_is_there(module: str) -> None:
    for name in UNDOCUMENTED[module].split():
        assert hasattr(import_module(module), name), "tensors that transformers renames are not loaded, or saved"


def test_no_other_private_names_are_used() -> None:
    others = {name for name in used() if not any(known == name or known.startswith(f"{name}.") for known in NAMES)}
    assert not others, "add them to NAMES, with what breaks without them, or do without"
    listed = {*OF_INSTANCES, *(name.rpartition(".")[2] for name in OF_OBJECTS)}
    assert {*of_instances()} - listed == set(), "add them to OF_INSTANCES, or do without"
    replaced = {name for name in vars(PagedTrainerMixin) if is_private(name) and hasattr(Trainer, name)}
    assert replaced - listed == set(), "add them to OF_OBJECTS, or do without"
    text = "".join(path.read_text() for path in PACKAGE.rglob("*.py"))
    for name in (*(known.rpartition(".")[2] for known in (*NAMES, *OF_OBJECTS)), *OF_INSTANCES, *UNDOCUMENTED):
        assert name in text, f"{name} is used no more: take it off the list"


def test_installed_versions_are_below_the_bounds() -> None:
    project = tomllib.loads((PACKAGE.parent / "pyproject.toml").read_text())["project"]
    requirements = map(Requirement, [*project["dependencies"], *project["optional-dependencies"]["transformers"]])
    bounded = {r.name: r.specifier for r in requirements if r.name in ("torch", "transformers")}
    for name, specifier in bounded.items():
        assert any(bound.operator == "<" for bound in specifier), name
        assert Version(version(name)).base_version in specifier, name
    assert bounded.keys() == {"torch", "transformers"}
