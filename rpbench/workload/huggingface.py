"""Hugging Face: an architecture from a `config.json`, and the assumptions made for fields that are not modelled.

`families.yaml` says what model types have besides their sizes. A field that changes nothing is ignored, one that is not
modelled is named with the assumption made instead, and an unknown type is counted by its sizes. Only a missing or
invalid size is refused.
"""

import json
import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from rpbench.untrusted import is_finite
from rpbench.workload.architecture import LARGEST, MOST_LAYERS, Architecture
from rpbench.workload.counts import FROM_THE_OTHERS, Experts, Latent
from rpbench.workload.families import EVERY, Family, known

# Keys with the cost of linear attention's query: its products inside a block and with the state, 2 x 128 values a head.
LINEAR_KEYS = 256
_DROPOUTS = ("attn_pdrop", "resid_pdrop", "attention_dropout", "hidden_dropout_prob", "attention_probs_dropout_prob")
_BOOLEANS = ("tie_word_embeddings", "use_sliding_window", "multi_query", "new_decoder_architecture", "parallel_attn")
DELTA = ("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text")  # a gated delta rule in most layers
PLAIN_FIRST = ("qwen2", "qwen2_vl_text", "qwen2_5_omni_text", "qwen3")  # the first layers see everything
_LINEAR, _SLIDING, _CHUNKED, _FULL = (f"{kind}_attention" for kind in ("linear", "sliding", "chunked", "full"))
_OTHER_HEADS = re.compile(r"For\w+Classification|ForQuestionAnswering|RewardModel")
_KINDS = {"attention": _FULL, "global": _FULL, "local": _SLIDING}  # the same in other words


def from_config(source: Mapping[str, Any] | str | Path) -> Architecture:
    """The architecture of a `config.json`; ValueError naming a size that is missing, or no whole number in range."""
    given = source if isinstance(source, Mapping) else json.loads(Path(source).read_text())
    values, family = _normal(given), _family(given)
    _check_booleans(values, family)
    heads, hidden, latent = _size(values, "num_attention_heads"), _size(values, "hidden_size"), _latent(values)
    experts, windows = _experts(values), _windows(values, family)
    found = Architecture(
        str(given.get("_name_or_path") or values.get("_name_or_path") or values["model_type"] or "model"),
        _num_layers(values),
        hidden,
        heads,
        _vocab(values),
        heads if latent else _known(values, "num_key_value_heads") or heads,
        FROM_THE_OTHERS if latent else _known(values, "head_dim") or FROM_THE_OTHERS,
        _known(values, "intermediate_size") or (_known(values, "expansion_ratio") or 4) * hidden,
        gated=family.gated,
        tied=bool(values.get("tie_word_embeddings")) or _patches(values) > 0,
        experts=experts,
        num_dense_layers=len(_dense_layers(values)) if experts else 0,
        latent=latent,
        windows=windows,
        learned_positions=_positions(values, family),
        dropout=max(_share(values, name) for name in _DROPOUTS),
        biases=_biased(values, family) >= set(EVERY),
        qk_norm=_query_key_norms(values, family) is not None,
        attention_sinks=family.sinks,
        family=family.modules,
        **_constants(values),
    )
    return _with_the_rest(found, values, family)


def assumed(given: Mapping[str, Any]) -> tuple[str, ...]:
    """Assumptions made for a `config.json`: a sentence for each field that is not modelled, and for an unknown type."""
    values, family = _normal(given), _family(given)
    kind = _kind(given)
    said = []
    if not isinstance(kind, str) or kind not in known().families:
        said.append(f"model_type={_short(kind)} is not known: counted by its sizes as a Llama, whose MLP has a gate")
        if not _known(values, "intermediate_size") and not (_experts(values) and not _dense_layers(values)):
            said.append("config.json has no intermediate_size: counted as 4 times hidden_size")
        if {**given, **_text_part(given)}.get("tie_word_embeddings") is None:
            said.append("config.json has no tie_word_embeddings: counted as true, as transformers writes a false one")
    if family.encoder:
        said.append("attention to all tokens is counted as attention to those before")
    if _LINEAR in (kinds := _kinds(values) or ()):
        said.append(f"linear attention is timed as attention to {LINEAR_KEYS} keys")
    if _CHUNKED in kinds:
        said.append("attention inside chunks is counted as attention to a sliding window of their size")
    if other := sorted({*kinds} - {_LINEAR, _SLIDING, _FULL, _CHUNKED}):
        said.append(f"layer_types has {', '.join(map(_short, other))}, not modelled: counted as {_FULL}")
    if _experts(values) and (dense := _dense_layers(values)) != [*range(len(dense))]:
        said.append("layers without experts are counted as the first ones, wherever they stand")
    if _known(values, "word_embed_proj_dim") not in (0, _size(values, "hidden_size")):
        said.append("word_embed_proj_dim: the embedding is counted as wide as hidden_size")
    if (task := _OTHER_HEADS.search(str(given.get("architectures")))) and not _patches(values):
        said.append(f"architectures has {task.group()}: counted with an output matrix over the vocabulary instead")
    outside = given.keys() - _text_part(given).keys() if _text_part(given) else set()
    for name, value in values.items():
        if name in known().assumed and value:
            said.append(f"{name}: {known().assumed[name]}")
        elif name.startswith("mamba_") and {*kinds} == {_FULL}:
            continue  # of kinds of layers that it has none of
        elif name in outside:  # of the other parts, such as what hears
            if isinstance(value, Mapping) and not known().read.fullmatch(name):
                said.append(f"{name}: the text model alone is counted")
        elif value and not (known().read.fullmatch(name) or known().silent.fullmatch(name)):
            said.append(f"{name}={_short(value)} of a {kind} is not modelled: counted as if it were not there")
    return tuple(said)


def context_of(given: Mapping[str, Any]) -> int | None:
    """Tokens that a `config.json` has positions for; None if it does not say."""
    values = _normal(given)
    return _patches(values) + 1 if _patches(values) else _known(values, "max_position_embeddings") or None


# --- fields as they are read ---------------------------------------------------------------------------------


def _kind(given: Mapping[str, Any]) -> Any:
    """The type of the text model; a wrapper of several parts has it inside."""
    parts = (_text_part(given), given)
    kind = next((kind for each in parts if (kind := each.get("model_type") or _kind_of_class(each))), None)
    return known().same_as.get(kind, kind) if isinstance(kind, str) else kind


def _kind_of_class(given: Mapping[str, Any]) -> str | None:
    """The type that the name of a class tells, such as Qwen3MoeForCausalLM; None if it is none that is known."""
    names = given.get("architectures")
    word = str(names[0]) if isinstance(names, list) and names else ""
    stem = re.split("For[A-Z]|LMHead|Model", word)[0].replace("_", "").lower()
    kinds = (*known().families, *known().same_as)
    return next((kind for kind in kinds if re.sub("[-_]", "", kind).lower() == stem), None)


def _text_part(given: Mapping[str, Any]) -> Mapping[str, Any]:
    """The text model's fields inside a wrapper of several parts, under any of their names; empty without one."""
    for name in ("text_config", "llm_config", "language_config", "thinker_config"):
        inner = given.get(name)
        if isinstance(inner, Mapping):
            inner = _text_part(inner) or inner
            widths = {"hidden_size", *(own for own, read in known().spellings.items() if read == "hidden_size")}
            if inner.keys() & widths or "hidden_size" in _of_type(inner.get("model_type")).left_out:
                return inner
    return {}


def _family(given: Mapping[str, Any]) -> Family:
    return _of_type(_kind(given))


def _of_type(kind: Any) -> Family:
    return known().families.get(kind, known().unknown) if isinstance(kind, str) else known().unknown


def _normal(given: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of the text model under one name each, with what its type leaves unsaid."""
    values = {**given, **_text_part(given), "model_type": _kind(given)}
    if isinstance(given.get("text_config"), Mapping) and given.get("tie_word_embeddings") is not None:
        values["tie_word_embeddings"] = given["tie_word_embeddings"]  # the wrapper has the output matrix
    for part in ("attn_config", "ffn_config"):  # of MPT and DBRX
        if isinstance(nested := values.get(part), Mapping):
            values |= {name: value for name, value in nested.items() if name in known().spellings}
    for own, name in known().spellings.items():
        if own in values:
            given_there = values.pop(own)
            values[name] = given_there if values.get(name) is None else values[name]
    for name, value in _family(given).usual.items():
        if values.get(name) is None:
            values[name] = value
    for name, left_out in _family(given).left_out.items():
        values.setdefault(name, left_out)  # a null is no field that is left out
    if isinstance(shared := values.get("multi_query"), bool) and not values.get("new_decoder_architecture"):
        values["num_key_value_heads"] = 1 if shared else values.get("num_attention_heads")
    if values["model_type"] == "qwen":  # the first one: its field is the width of gate and up together
        values["intermediate_size"] = _size(values, "intermediate_size") // 2
    if values["model_type"] == "llama4_text":
        values |= _of_llama4(values)
    if values["model_type"] in DELTA:
        period = _known(values, "full_attention_interval") or 4
        values.setdefault(
            "layer_types", [(_LINEAR, _FULL)[each % period == period - 1] for each in range(_num_layers(values))]
        )
    if values["model_type"] == "modernbert":
        period = _known(values, "global_attn_every_n_layers") or 3
        values.setdefault("layer_types", [(_SLIDING, _FULL)[each % period == 0] for each in range(_num_layers(values))])
    kinds = values.get("layer_types")
    if isinstance(kinds, list) and all(type(each) is int for each in kinds):  # of MiniMax: 0 is linear
        values["layer_types"] = [_FULL if each else _LINEAR for each in kinds] or None
    return values


def _constants(values: Mapping[str, Any]) -> dict[str, Any]:
    """Numbers that change the results of modules, but no bytes and times: rotary base, epsilon of norms."""
    nested = values.get("rope_parameters")
    inside = nested.get(_FULL, nested) if isinstance(nested, Mapping) else {}  # may differ by kind of layer
    inside = inside if isinstance(inside, Mapping) else {}
    norms = ("rms_norm_eps", "layer_norm_eps", "layer_norm_epsilon", "norm_epsilon", "norm_eps")
    found = {
        "rope_theta": _number(values, 1, "rope_theta", "rotary_emb_base") or _number(inside, 1, "rope_theta"),
        "norm_eps": _number(values, 0, *norms),
    }
    return {name: value for name, value in found.items() if value is not None}


def _number(values: Mapping[str, Any], above: float, *names: str) -> float | None:
    """The first of the fields that is a number larger than `above` and not absurdly large."""
    given = (values.get(name) for name in names)
    numbers = (each for each in given if isinstance(each, int | float) and not isinstance(each, bool))
    return next((float(each) for each in numbers if above < each < LARGEST**3), None)


def _of_llama4(values: Mapping[str, Any]) -> dict[str, Any]:
    """The fields that Llama 4 spells in its own way.

    `intermediate_size` is that of an expert, routed or shared, and attention sees a chunk where positions are rotated.
    """
    inner, num_layers, listed = _size(values, "intermediate_size"), _num_layers(values), values.get("moe_layers")
    rotated, period = values.get("no_rope_layers"), _known(values, "no_rope_layer_interval") or 4
    if not isinstance(rotated, list) or not rotated:
        rotated = [(each + 1) % period for each in range(num_layers)]
    found: dict[str, Any] = {
        "num_experts": _known(values, "num_experts") or 16,
        "moe_intermediate_size": inner,
        "shared_expert_intermediate_size": inner,
        "intermediate_size": _size(values, "intermediate_size_mlp"),
        "sliding_window": _known(values, "attention_chunk_size", least=0),
        "layer_types": values.get("layer_types") or [_CHUNKED if each else _FULL for each in rotated],
    }
    if isinstance(listed, list):
        return found | {"mlp_only_layers": [each for each in range(num_layers) if each not in listed]}
    return found | {"decoder_sparse_step": _known(values, "interleave_moe_layer_step") or 1}


def _size(values: Mapping[str, Any], *names: str) -> int:
    found = _known(values, *names)
    if not found:
        kind = values.get("model_type")
        unknown = _of_type(kind) is known().unknown
        cause = f"model_type={_short(kind)} is no transformer, or spells it otherwise; " if unknown else ""
        raise ValueError(f"config.json has no {names[0]}: {cause}add it in this spelling")
    return found


def _num_layers(values: Mapping[str, Any]) -> int:
    found = _size(values, "num_hidden_layers")
    if found > MOST_LAYERS:
        raise ValueError(f"num_hidden_layers={found}: at most {MOST_LAYERS:,}; the deepest that was trained")
    return found


def _known(values: Mapping[str, Any], *names: str, least: int = 1) -> int:
    """The first of the fields that is there and not null; 0 if none is. ValueError for a value that is no whole number
    in range; a corrected one would describe another model.
    """
    for name in names:
        value = _plain(values.get(name))
        if value is None:
            continue
        if type(value) is not int or not least <= value <= LARGEST:
            raise ValueError(f"{name}={_short(value)}: a whole number from {least} to {LARGEST:,}")
        return value
    return 0


def _plain(value: Any) -> Any:
    """A size that is written as 4096.0, or once for each layer, as one whole number."""
    if isinstance(value, list) and value and all(each == value[0] for each in value):
        value = value[0]
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _share(values: Mapping[str, Any], name: str) -> float:
    value = values.get(name)
    if value is None:
        return 0.0
    if not is_finite(value) or not 0 <= value < 1:
        raise ValueError(f"{name}={_short(value)}: a number of at least 0 and below 1, e.g. 0.1")
    return float(value)


def _check_booleans(values: Mapping[str, Any], family: Family) -> None:
    """Refuse what is neither true nor false: Python takes every word for true."""
    switches = [key for _, key in family.biases]
    switches += [family.head_bias] if isinstance(family.head_bias, str) else []
    switches += [key for _, key in [family.query_key_norms or ("", None)]]
    for name in (*_BOOLEANS, *filter(None, switches)):
        value = values.get(name)
        if value is not None and value not in (0, 1):
            raise ValueError(f"{name}={_short(value)}: true or false, without quotes")


def _short(value: object) -> str:
    words = repr(value)
    return words if len(words) <= 40 else f"{words[:37]}..."


# --- sizes ---------------------------------------------------------------------------------------------------


def _vocab(values: Mapping[str, Any]) -> int:
    if not _patches(values):
        return _size(values, "vocab_size")
    labels = values.get("id2label")
    return _known(values, "num_labels") or (len(labels) if isinstance(labels, Mapping) and labels else 2)


def _patches(values: Mapping[str, Any]) -> int:
    """Patches of an image, where a model sees images and no words; 0 otherwise."""
    if not _known(values, "image_size", "patch_size") or "vocab_size" in values:
        return 0
    return (_size(values, "image_size") // _size(values, "patch_size")) ** 2


def _positions(values: Mapping[str, Any], family: Family) -> int:
    """Rows of the tables of positions; DeBERTa has one of distances, and may have none of places."""
    if patches := _patches(values):
        return patches + 1
    rows = 0
    if values.get("relative_attention"):
        rows = 2 * (max(0, _known(values, "position_buckets", least=-1)) or _size(values, "max_position_embeddings"))
    if family.positions is None or values.get("position_biased_input") is False:
        return rows
    return rows + _size(values, "max_position_embeddings") + family.positions


def _experts(values: Mapping[str, Any]) -> Experts | None:
    total = _known(values, "num_experts", least=0)
    if not total:
        return None
    inner = _size(values, "moe_intermediate_size", "intermediate_size")
    shared = _known(values, "shared_expert_intermediate_size", "shared_intermediate_size", least=0)
    shared = shared or inner * _known(values, "n_shared_experts", least=0)
    return Experts(total, _size(values, "num_experts_per_tok"), inner, shared)


def _dense_layers(values: Mapping[str, Any]) -> list[int]:
    """Layers without experts: listed ones, the first or last ones, and all but every n-th."""
    layers = range(_num_layers(values))
    frequency, kinds, named = (values.get(name) for name in ("moe_layer_freq", "mlp_layer_types", "mlp_only_layers"))
    for listed, dense in ((kinds, "dense"), (frequency, 0)):
        if isinstance(listed, list):  # a word or a number for each layer
            return [each for each in layers if listed[each : each + 1] == [dense]]
    first, end = _known(values, "first_k_dense_replace", least=0), values.get("moe_layer_end_index")
    last = len(layers) if end in (None, -1) else _known(values, "moe_layer_end_index", least=0)
    routed = {each for each in layers[first : last + 1] if each not in (named if isinstance(named, list) else ())}
    offset = _known(values, "expert_layer_offset", least=0)
    for field, start in (("decoder_sparse_step", -1), ("moe_layer_freq", 0), ("expert_layer_period", offset)):
        every = _known(values, field, least=0) or 1
        routed &= {each for each in layers if (each - start) % every == 0}
    return [each for each in layers if each not in routed]


def _latent(values: Mapping[str, Any]) -> Latent | None:
    if not _known(values, "kv_lora_rank"):
        return None
    names = ("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
    return Latent(_known(values, "q_lora_rank"), *(_size(values, name) for name in names))


def _kinds(values: Mapping[str, Any]) -> list[str] | None:
    """The kind of attention of every layer, where the configuration or its type gives it."""
    kinds, num_layers = values.get("layer_types"), _num_layers(values)
    if kinds is None:
        return None
    if not isinstance(kinds, list):
        raise ValueError(f"layer_types={_short(kinds)}: a list, with a kind for each layer")
    if len(kinds) != num_layers:
        raise ValueError(
            f"layer_types has {len(kinds)} kinds; one for each of the {num_layers} layers, or leave it out"
        )
    return [_KINDS.get(str(kind), str(kind)) for kind in kinds]


def _windows(values: Mapping[str, Any], family: Family) -> tuple[int | None, ...]:
    """Keys a query sees, in turn over the layers, as each model type's own code has it."""
    window, kinds = _known(values, "sliding_window", least=0) or None, _kinds(values)
    num_layers, use = _num_layers(values), values.get("use_sliding_window")
    if kinds is not None:
        if use is False:
            window = None
        width = {_SLIDING: window, _CHUNKED: window, _LINEAR: LINEAR_KEYS}
        found = tuple(width.get(kind) for kind in kinds)
        return found if any(found) else ()
    if not window or use is False:
        return ()
    if values["model_type"] in PLAIN_FIRST and use:
        plain = min(num_layers, _known(values, "max_window_layers", least=0))
        return (None,) * plain + (window,) * (num_layers - plain)
    period = _known(values, "sliding_window_pattern", "_sliding_window_pattern") or family.window_period
    if period > 1:
        return (*(window,) * (period - 1), None)
    return (window,) if period or use else ()


# --- what stands beside matrices -----------------------------------------------------------------------------


def _biased(values: Mapping[str, Any], family: Family) -> set[str]:
    return {name for names, key in family.biases if key is None or values.get(key) for name in names}


def _query_key_norms(values: Mapping[str, Any], family: Family) -> str | None:
    kind, key = family.query_key_norms or (None, None)
    return kind if key is None or values.get(key) else None


def _norms(values: Mapping[str, Any], family: Family) -> int:
    """Norms of a layer; Falcon has one where its blocks stand side by side and nothing else is said."""
    if "parallel_attn" not in family.usual:
        return family.norms
    beside = _known(values, "num_ln_in_parallel_attn") or 1 + bool(values.get("new_decoder_architecture"))
    return beside if values["parallel_attn"] else 2


def _with_the_rest(found: Architecture, values: Mapping[str, Any], family: Family) -> Architecture:
    """The architecture with the parameters that its matrices and flags do not imply."""
    gate, linear_vectors = _gate(found, values)
    found = replace(found, attention_gate=gate)
    norm = family.norm_values * found.hidden
    vectors = _norms(values, family) * norm + linear_vectors
    kind = _query_key_norms(values, family)
    if kind is not None:
        width = 2 * found.head_dim if kind == "head" else (found.heads + found.key_value_heads) * found.head_dim
        vectors += width * max(1, family.norm_values)
    if not found.biases:
        biased = _biased(values, family)
        routed = True in found.kinds
        vectors += sum(each.outputs * each.matrices for each in found.linear_maps(routed) if each.name in biased)
    if found.latent is not None:
        vectors += found.latent.query_rank + found.latent.key_value_rank
    if family.sinks:
        vectors += found.heads
    if family.shared_gate and found.experts and found.experts.shared_inner:
        vectors += found.hidden
    ends = family.end_norms * norm + _ends(found, values, family)
    usual = found.dense_parameters(found.layers[-1]) - replace(found, layer_vectors=0).dense_parameters(
        found.layers[-1]
    )
    return replace(
        found,
        fused=family.fused,
        layer_vectors=FROM_THE_OTHERS if vectors == usual else vectors,
        end_vectors=FROM_THE_OTHERS if ends == found.hidden else ends,
    )


def _ends(found: Architecture, values: Mapping[str, Any], family: Family) -> int:
    """Parameters of both ends besides embedding, output matrix and norms."""
    ends, h = 0, found.hidden
    if family.head_bias is True or (isinstance(family.head_bias, str) and values.get(family.head_bias)):
        ends += found.vocab
    if _patches(values):
        ends += _known(values, "num_channels") * _known(values, "patch_size") ** 2 * h + 2 * h  # patches, class token
    elif family.encoder:  # types of tokens, and before the output matrix a map with its norm
        ends += _known(values, "type_vocab_size", least=0) * h + h * h + (found.biases + family.norm_values) * h
        ends += family.norm_values * h * bool(values.get("relative_attention"))
    return ends


def _gate(found: Architecture, values: Mapping[str, Any]) -> tuple[int, int]:
    """(outputs of attention's further maps from hidden, values besides its maps), as means over the layers.

    Qwen3-Next's gated delta rule: queries, keys, values, a gate of the values' width, two numbers a head, a short
    convolution; its other layers gate their output. MiniMax's lightning attention: as many keys as queries, and a gate.
    """
    kind = values["model_type"]
    queries, keys = found.heads * found.head_dim, found.key_value_heads * found.head_dim
    own = 2 * queries + 2 * keys
    kinds = values.get("layer_types") or []
    share = kinds.count(_LINEAR) / max(1, len(kinds))
    if kind == "minimax":
        return max(0, round(share * (5 * queries - own))), round(share * queries)
    if kind not in DELTA:
        return 0, 0
    value_heads, value_dim = (_size(values, f"linear_{what}") for what in ("num_value_heads", "value_head_dim"))
    key_values = _size(values, "linear_num_key_heads") * _size(values, "linear_key_head_dim")
    width = value_heads * value_dim
    linear = 2 * key_values + 3 * width + 2 * value_heads
    convolution = (2 * key_values + width) * (_known(values, "linear_conv_kernel_dim") or 4)
    besides = convolution + 2 * value_heads + value_dim
    head_norms = -2 * found.head_dim  # of queries and keys, which linear attention has none of
    return max(0, round(share * (linear - own) + (1 - share) * queries)), round(share * (besides + head_norms))
