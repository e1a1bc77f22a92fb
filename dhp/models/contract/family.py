"""A family without code of its own, put together from its contract."""

from __future__ import annotations

from typing import Any

from dhp.core.errors import ModelError
from dhp.models.contract.decoder import ContractDecoder
from dhp.models.contract.find import find_contract
from dhp.models.contract.processor import ContractProcessor
from dhp.models.contract.rows import is_declared
from dhp.models.contract.tower import WholeTower
from dhp.models.family import Family

NOTE = (
    "note: {family} runs by transformers' contract, and no test here holds it to the plain model; "
    "`python -m dhp doctor model {source}` does"
)


def generic(config: Any, model_name: str = "") -> Family:
    """The family of that configuration. model_name: the directory in which its processor is found, when samples are
    read. Raises ModelError with what is missing."""
    contract = find_contract(config)
    source, own = model_name or "PATH", type(config).__module__
    source += "" if own.startswith("transformers.") else f" --plugin {own}"
    note = "" if is_declared(config) else NOTE.format(family=config.model_type, source=source)
    try:
        decoder = ContractDecoder(config, contract)
    except AttributeError as error:
        raise ModelError(
            f"model_type {config.model_type!r}: its decoder's configuration lacks what all others have ({error})"
        ) from error
    processor, tower = ContractProcessor(config, contract, model_name), WholeTower(config, contract)
    return Family(config, processor, tower, decoder, idle=contract.structure.audio, note=note)
