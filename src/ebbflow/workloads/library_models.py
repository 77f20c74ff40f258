"""Networks of timm, torchvision and transformers by their names there, without pretrained weights and downloads.

    ebbflow train timm:resnet18 --data FOLDER            images; so too torchvision:resnet18
    ebbflow train "timm:vit_tiny_patch16_224(size=64)"   further arguments go to the library
    ebbflow train "hf:gpt2(n_layer=4)" --data train.bin  token files and saved data sets; or images, by the model

The recipes are starting points: they were tuned for none of these networks.
"""

from __future__ import annotations

import ast
import contextlib
import difflib
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from ebbflow.core.extras import require
from ebbflow.core.spec import nearest
from ebbflow.errors import ConfigError, MissingExtra
from ebbflow.workloads.imagenet import GOYAL, image_task, plain_batch_norms
from ebbflow.workloads.prefetch import DatasetSource
from ebbflow.workloads.saved_datasets import SavedBlocks, is_saved, read_saved
from ebbflow.workloads.token_files import read_token_files, token_gpt_recipe
from ebbflow.workloads.torchvision_import import import_timm, import_torchvision
from ebbflow.workloads.workload import Recipe, Task, missing_data, register_workload

__all__ = ["hf_model", "timm_model", "torchvision_model"]


@register_workload("timm", recipe=GOYAL, cite="Goyal et al. 2017 (recipe, not tuned for the network)")
def timm_model(data: Path | None, recipe: Recipe, model: str = "", size: int = 224, **options: str) -> Task:
    """A classification network of timm, as in timm:resnet18, on images in folders, tar shards or a saved data set.

    `size`: pixels of a side. All other arguments are those of the network, such as timm:resnet18(drop_rate=0.1).
    """
    timm = import_timm(needed_for="timm:NAME")
    _check_name("timm", model, timm.list_models(), example="timm:resnet18")

    def network(classes: int) -> nn.Module:
        settings = _values(options)
        if timm.models.get_pretrained_cfg(model, allow_unregistered=True).fixed_input_size:
            settings.setdefault("img_size", size)
        made: nn.Module = _made(f"timm:{model}", timm.create_model, model, num_classes=classes, **settings)
        plain_batch_norms(made)
        return made

    return image_task(f"timm:{model}", network, data, recipe, size)


@register_workload("torchvision", recipe=GOYAL, cite="Goyal et al. 2017 (recipe, not tuned for the network)")
def torchvision_model(data: Path | None, recipe: Recipe, model: str = "", size: int = 224, **options: str) -> Task:
    """A classification network of torchvision, as in torchvision:resnet18, on images in folders or as timm's.

    `size`: pixels of a side. All other arguments are those of the network. Networks with auxiliary classifiers are
    refused: imagenet-inceptionv3 has the loss for one.
    """
    models = import_torchvision("models", needed_for="torchvision:NAME")
    _check_name("torchvision", model, models.list_models(module=models), example="torchvision:resnet18")
    if model in ("inception_v3", "googlenet"):
        raise ConfigError(
            f"torchvision:{model} has auxiliary classifiers; use imagenet-inceptionv3, or another network"
        )

    def network(classes: int) -> nn.Module:
        settings = _values(options)
        if model.startswith("vit_"):
            settings.setdefault("image_size", size)
        made: nn.Module = _made(f"torchvision:{model}", models.get_model, model, num_classes=classes, **settings)
        return made

    return image_task(f"torchvision:{model}", network, data, recipe, size)


@register_workload("hf", recipe=token_gpt_recipe, cite="the shape of nanoGPT (recipe, not tuned for the network)")
def hf_model(
    data: Path | None,
    recipe: Recipe,
    model: str = "",
    context: int = 1024,
    dtype: str = "uint16",
    valid: int = 256,
    size: int = 224,
    **options: str,
) -> Task:
    """A network of transformers by its type, as in hf:gpt2, on token files, saved data sets or images in folders.

    `model` is a type that transformers knows, or a folder with a `config.json`; nothing is downloaded, and the weights
    are new. All other arguments are those of the configuration, such as hf:gpt2(n_layer=4, n_embd=256). A causal
    language model is trained on token files as in token-gpt (`context`, `dtype` and `valid` as there) or on the column
    `input_ids` of a saved data set; a network that transformers has for images only, on images of `size` pixels, with
    the rate and optimizer that are given: the recipe is that of a language model.
    """
    with contextlib.suppress(MissingExtra):
        import_torchvision(needed_for="hf:NAME")  # transformers imports it if it is there, as we have to
    transformers = require("transformers", extra="transformers", needed_for="hf:NAME")
    config = _configuration(transformers, model, options)
    name = f"hf:{model}"
    if type(config) not in transformers.AutoModelForCausalLM._model_mapping:
        if type(config) not in transformers.AutoModelForImageClassification._model_mapping:
            raise ConfigError(f"{name}: transformers has neither a causal language model nor an image classifier of it")
        images = replace(recipe, metric="accuracy", higher_is_better=True)

        def network(classes: int) -> nn.Module:
            config.num_labels, config.image_size = classes, size
            return _Logits(_made(name, transformers.AutoModelForImageClassification.from_config, config))

        return image_task(name, network, data, images, size)
    if data is None:
        raise missing_data(name, "a token file, a folder of them, or a DatasetDict with input_ids that was saved")
    config.use_cache = False
    text = config.get_text_config()
    vocabulary = int(text.vocab_size)
    train: Any
    held_out: Any
    if is_saved(data):
        splits = read_saved(data)
        blocks = [SavedBlocks(split, vocabulary=vocabulary) for split in splits]
        context = blocks[0].length - 1
        train, held_out = (DatasetSource(part) for part in blocks)
    else:
        train, held_out = read_token_files(data, context=context, dtype=dtype, vocabulary=vocabulary, valid=valid)
    longest = getattr(text, "max_position_embeddings", None)
    if longest is not None and context > longest:
        raise ConfigError(
            f"{name}: blocks of {context} tokens, but the network has {longest} positions; give context={longest}, or "
            f"more positions"
        )
    network = _Logits(_made(name, transformers.AutoModelForCausalLM.from_config, config))
    return Task(model=network, train=train, valid=held_out, recipe=recipe)


class _Logits(nn.Module):
    """A network of transformers whose output is the logits alone."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.network(x).logits
        return logits


def _configuration(transformers: Any, model: str, options: Mapping[str, str]) -> Any:
    if (Path(model) / "config.json").exists() and model:
        _check_options(model, transformers.AutoConfig.from_pretrained(model, local_files_only=True), options)
        return transformers.AutoConfig.from_pretrained(model, local_files_only=True, **_values(options))
    known = sorted(transformers.models.auto.configuration_auto.CONFIG_MAPPING_NAMES)
    if "/" in model:
        raise ConfigError(
            f"hf:{model}: nothing is downloaded; give a folder with a config.json, or a type of network such as hf:gpt2"
        )
    _check_name("hf", model, known, example="hf:gpt2")
    _check_options(model, transformers.AutoConfig.for_model(model), options)
    return _made(f"hf:{model}", transformers.AutoConfig.for_model, model, **_values(options))


def _check_options(model: str, config: Any, options: Mapping[str, str]) -> None:
    """Refuse arguments that the configuration does not have: transformers takes any name, and ignores it."""
    for name in options:
        if not hasattr(config, name):
            raise ConfigError(f"hf:{model} has no argument {name!r}; {nearest(name, sorted(config.to_dict()))}")


def _check_name(library: str, name: str, known: Sequence[str], *, example: str) -> None:
    if name in known:
        return
    if not name:
        raise ConfigError(f"{library}: which network? Write for example {example}")
    close = difflib.get_close_matches(name, known, n=5, cutoff=0.5)
    hint = f"similar names: {', '.join(close)}" if close else f"write for example {example}"
    raise ConfigError(f"{library}:{name} is not one of the {len(known)} networks of {library}; {hint}")


def _values(options: Mapping[str, str]) -> dict[str, Any]:
    """Arguments of a library as Python values: 0.1, true and none are not texts.

    >>> _values({"drop_rate": "0.1", "bias": "false", "hidden_act": "gelu"})
    {'drop_rate': 0.1, 'bias': False, 'hidden_act': 'gelu'}
    """
    words = {"true": True, "false": False, "none": None}
    found: dict[str, Any] = {}
    for name, text in options.items():
        try:
            found[name] = words[text.lower()] if text.lower() in words else ast.literal_eval(text)
        except (ValueError, SyntaxError):
            found[name] = text
    return found


def _made(name: str, make: Any, *args: Any, **settings: Any) -> Any:
    """Call a library; what it says against an argument is an error of the user's text."""
    try:
        return make(*args, **settings)
    except (TypeError, ValueError, AttributeError, AssertionError, RuntimeError) as error:
        raise ConfigError(f"{name} cannot be made with these arguments: {error}") from error
