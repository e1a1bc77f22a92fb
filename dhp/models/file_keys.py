"""Keys of a model's files, and the weights that they are, by transformers' conversions between the two."""

from collections.abc import Iterable, Mapping

from torch import Tensor
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key, revert_weight_conversion
from transformers.modeling_utils import remove_tied_weights_from_state_dict

from dhp.core.transformers_private import unsaved_names


def weights_to_save(model: PreTrainedModel) -> dict[str, Tensor]:
    """The tensors of a model that `save_pretrained` writes, by their names in it."""
    unsaved = unsaved_names(model)
    state = {name: tensor for name, tensor in model.state_dict().items() if name not in unsaved}
    return dict(remove_tied_weights_from_state_dict(state, model))


def in_file_form(model: PreTrainedModel, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Such tensors by the keys of a published file, cut and joined as they are there."""
    return dict(revert_weight_conversion(model, dict(weights)))


def loaded_names(model: PreTrainedModel, keys: Iterable[str]) -> dict[str, str]:
    """By key of a file the name of the weight that the library reads it into, the first where it is cut into several;
    a name that the model lacks for a key that it does not load."""
    conversions = get_model_conversion_mapping(model)
    renamings = [one for one in conversions if isinstance(one, WeightRenaming)]
    converters = [one for one in conversions if isinstance(one, WeightConverter)]
    held, prefix, found = model.state_dict(), model.base_model_prefix, dict[str, str]()
    for key in keys:
        found[key], _ = rename_source_key(key, renamings, converters, prefix, held)
        if found[key] not in held and key in held:  # as in the library's `convert_and_load_state_dict_in_model`
            found[key], _ = rename_source_key(key, [], [], prefix, held)
    return found
