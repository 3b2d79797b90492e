"""Signatures that can grow: options are keywords, and what is asked for at the top arrives where it is done."""

import ast
import configparser
import inspect
import textwrap
from pathlib import Path

import pytest
import torch
from expecttest import assert_expected_inline

import sparse_attn as sa
from sparse_attn import Model, generate, mesh, workspace
from sparse_attn.framework.registration import OPERATORS
from sparse_attn.framework.torch_private import TorchDispatchMode, operators, schema
from sparse_attn.layout import parse_layout
from sparse_attn.models.params import random_params
from sparse_attn.pipeline import latent, windowed
from sparse_attn.testing.ops import public_functions
from sparse_attn.types import AttentionOutput

INPUTS = {
    ("build_ragged_indices_from_dense", "lengths"), ("top_k_per_row", "row_starts"), ("top_k_per_row", "row_ends"),
    ("workspace_size", "layouts"), ("row_seeds", "device"), ("count_digits", "state"), ("count_digits", "sums"),
    ("pack_candidates", "row_starts"), ("count_digits", "row_starts"), ("count_digits", "row_ends"), ("count_ties", "row_starts"),
    ("count_ties", "row_ends"), ("take_winners", "row_starts"), ("take_winners", "row_ends"),
}  # fmt: skip


ROOT = Path(__file__).parents[2]
LAUNCHERS = sorted((ROOT / "sparse_attn" / "ops").rglob("launch.py"))


def public():
    """Functions, by name: those at the top, of every operator package, and others that were at the top."""
    others = (mesh.mesh_of, mesh.planned_mesh, parse_layout, workspace.release)
    at_the_top = {name: getattr(sa, name) for name in sa.__all__}
    return public_functions() | {function.__name__: function for function in others} | {
        name: value for name, value in at_the_top.items() if inspect.isfunction(value)
    }  # fmt: skip


def functions():
    yield from public().items()
    for module in (sa.pipeline, latent, windowed):
        for name, value in vars(module).items():
            if inspect.isfunction(value) and not name.startswith("_") and value.__module__.startswith("sparse_attn"):
                yield name, value


def test_options_are_keywords():
    """So that another one can stand anywhere among them."""
    found = set()
    for name, function in functions():
        for parameter in inspect.signature(function).parameters.values():
            if parameter.default is not parameter.empty and parameter.kind is not parameter.KEYWORD_ONLY:
                found.add((name, parameter.name))
    assert found == INPUTS


def test_public_functions_are_typed():
    assert len(public()) > 60
    for function in public().values():
        signature = inspect.signature(function)
        untyped = [name for name, one in signature.parameters.items() if one.annotation is one.empty]
        assert not untyped and signature.return_annotation is not signature.empty, f"{function.__name__}: {untyped}"


@pytest.mark.parametrize("path", LAUNCHERS, ids=lambda path: path.parent.name)
def test_launchers_are_typed(path):
    functions = [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.FunctionDef)]
    assert functions
    for function in functions:
        given = function.args
        parameters = (*given.posonlyargs, *given.args, *given.kwonlyargs, given.vararg, given.kwarg)
        untyped = [one.arg for one in parameters if one is not None and one.annotation is None and one.arg != "self"]
        assert not untyped and function.returns is not None, f"{function.name}: {untyped}"


def test_what_an_operator_is_defined_with_takes_its_arguments():
    for op in OPERATORS.values():
        *names, _ = (argument.name for argument in schema(op.overload).arguments)
        takes = list(inspect.signature(op.launch()).parameters)
        assert takes[: len(names)] == names and takes[len(names) :] in ([], ["kernel"]), op
        for function in (op.reference, op.rules, op.fake):
            takes = list(inspect.signature(function).parameters)
            assert takes == [name for name in names if name in takes], function  # in the schema's order
        assert op.reference.__name__ == op.launch().__name__ == op.__name__


def test_types_ship():
    """A checker reads annotations of a package that says it has them."""
    config = configparser.ConfigParser()
    config.read(ROOT / "setup.cfg")
    assert config["options.package_data"]["sparse_attn"] == "py.typed" and (ROOT / "sparse_attn" / "py.typed").exists()


def test_attention_gives_a_pair():
    """Callers unpack it; what more there may be to ask for comes by a keyword, in a type of its own."""
    assert AttentionOutput._fields == ("out", "lse")


PRODUCTS = {
    getattr(torch.ops.aten, name)
    for name in ("mm", "addmm", "bmm", "baddbmm", "matmul", "linear", "dot", "mv", "_grouped_mm", "_scaled_mm")
}


class Asked(TorchDispatchMode):
    """Keeps what every op was given as batch_invariant, by op, and which matrix products torch was asked for."""

    def __init__(self):
        super().__init__()
        self.values, self.products = {}, set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "sparse_attn":
            names = [argument.name for argument in schema(func).arguments]
            if "batch_invariant" in names:
                self.values.setdefault(schema(func).name, set()).add(args[names.index("batch_invariant")])
        elif func.overloadpacket in PRODUCTS:
            self.products.add(func.overloadpacket)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("invariant", [False, True])
@pytest.mark.parametrize("name", ["tiny_v32", "tiny_v4"])
def test_batch_invariance_asked_of_a_model_reaches_every_product(name, invariant):
    spec = sa.preset(name)
    model = Model(spec, random_params(spec, seed=1), sa.cache_layouts(spec, "fp8"), batch_invariant=invariant)
    with Asked() as asked:
        generate(model, [list(range(40)), [7, 5]], max_new_tokens=2)
    ops = [f"sparse_attn::sparse_attn_{step}" for step in ("prefill", "decode")] + invariant * [
        "sparse_attn::grouped_linear"
    ]
    assert asked.values == dict.fromkeys(ops, {invariant}) and bool(asked.products) == (not invariant)


@pytest.mark.gpu
@pytest.mark.parametrize("graph", [False, True], ids=["eager", "graph"])
@pytest.mark.parametrize("name", ["tiny_v32", "tiny_v4"])
def test_batch_invariant_models_generate_within_their_workspace(name, graph):
    spec = sa.preset(name)
    params = random_params(spec, seed=1, device="cuda", dtype=torch.bfloat16)
    model = Model(spec, params, sa.cache_layouts(spec, "fp8"), batch_invariant=True)
    prompts = [[n * 7 % 250 for n in range(length)] for length in (300, 2, 40)]
    generate(model, prompts, max_new_tokens=5, prefill_tokens=128, graph=graph)


def test_schemas():
    """Programs that were exported hold them, so an operator's schema stays as it is; a new operator adds a line."""
    found = [str(schema(getattr(torch.ops.sparse_attn, name).default)) for name in sorted(operators("sparse_attn"))]
    assert_expected_inline(
        "\n\n".join("\n".join(textwrap.wrap(one, 116)) for one in found),
        """\
sparse_attn::apply_rope(Tensor x, Tensor positions, Tensor cos_sin, int start, bool interleaved, bool inverse, str
impl) -> Tensor

sparse_attn::biased_grouped_topk(Tensor logits, Tensor bias, int top_k, int num_groups, int top_groups, bool
renormalise, float routed_scale, str score, str impl) -> (Tensor, Tensor)

sparse_attn::build_ragged_indices_from_dense(Tensor indices, Tensor? lengths, Tensor? row_offsets, SymInt num_rows,
str impl) -> (Tensor, Tensor)

sparse_attn::combine_topk_swa_indices_ragged(Tensor? topk, Tensor limits, Tensor positions, Tensor entry_offsets,
Tensor window_offsets, int window, SymInt max_entries, SymInt num_rows, str impl) -> (Tensor, Tensor)

sparse_attn::compress_and_cache(Tensor kv, Tensor gate, Tensor position_bias, Tensor norm_weight, Tensor positions,
Tensor request_ids, Tensor(a!) state, Tensor state_table, Tensor(b!) cache, Tensor slot_mapping, Tensor cos_sin, int
ratio, bool overlap, float eps, int rope_start, bool hadamard, str layout, str impl) -> ()

sparse_attn::compressed_plan(Tensor request_ids, Tensor positions, Tensor block_table, Tensor kv_indptr, SymInt
decode_rows, int ratio, SymInt block_size, str impl) -> (Tensor limits, Tensor slots, Tensor kv_indptr, Tensor
kv_start, Tensor kv_end)

sparse_attn::compute_global_topk_ragged_indices_and_indptr(Tensor topk, Tensor request_ids, Tensor block_table,
SymInt block_size, str impl) -> (Tensor, Tensor)

sparse_attn::count_digits(Tensor logits, Tensor? row_starts, Tensor? row_ends, Tensor? sums, Tensor? state, int k,
int level, str impl) -> (Tensor, Tensor)

sparse_attn::count_ties(Tensor logits, Tensor? row_starts, Tensor? row_ends, Tensor sums, Tensor state, int
block_size, str impl) -> (Tensor, Tensor, Tensor)

sparse_attn::entry_indices(Tensor limits, Tensor request_ids, Tensor block_table, SymInt block_size, SymInt
max_entries, str impl) -> (Tensor, Tensor)

sparse_attn::gather_indexer_k(Tensor cache, Tensor block_table, Tensor kv_indptr, SymInt capacity, str layout, str
impl) -> (Tensor keys, Tensor scales)

sparse_attn::gather_kv_cache(Tensor cache, Tensor block_table, Tensor kv_indptr, Tensor? starts, SymInt capacity,
str layout, ScalarType dtype, str impl) -> Tensor

sparse_attn::grouped_linear(Tensor rows, Tensor? ends, Tensor codes, Tensor? scales, str layout, bool
batch_invariant, str impl) -> Tensor

sparse_attn::grouped_linear_fp8(Tensor rows, Tensor? ends, Tensor codes, Tensor scales, str layout, bool
batch_invariant, str impl) -> Tensor

sparse_attn::hyper_merge(Tensor out, Tensor streams, Tensor post, Tensor comb, str impl) -> Tensor

sparse_attn::hyper_mix(Tensor streams, Tensor raw, Tensor base, Tensor scale, int iterations, float eps, float
norm_eps, str impl) -> (Tensor collapsed, Tensor post, Tensor comb)

sparse_attn::index_topk_decode(Tensor q, Tensor weights, Tensor cache, Tensor context_lens, Tensor block_table, int
top_k, SymInt max_context_len, str layout, int logits_bytes, str impl) -> Tensor

sparse_attn::index_topk_decode_slots(Tensor q, Tensor weights, Tensor cache, Tensor context_lens, Tensor
block_table, int top_k, SymInt max_context_len, str layout, int logits_bytes, str impl) -> (Tensor, Tensor)

sparse_attn::index_topk_prefill(Tensor q, Tensor weights, Tensor k, Tensor? k_scale, Tensor kv_start, Tensor kv_end,
int top_k, str flavour, int logits_bytes, str impl) -> Tensor

sparse_attn::indexer_k_quant_and_cache(Tensor k, Tensor(a!) cache, Tensor slot_mapping, str layout, str impl) -> ()

sparse_attn::indexer_q_rope_quant(Tensor q, Tensor weights, Tensor positions, Tensor cos_sin, int start, bool
interleaved, bool hadamard, float weight_scale, str layout, str impl) -> (Tensor, Tensor)

sparse_attn::merge_attn_states(Tensor outs, Tensor lses, Tensor? sink, str impl) -> (Tensor out, Tensor lse)

sparse_attn::merge_candidates(Tensor candidates, Tensor columns, int block_size, int rank, str impl) -> Tensor

sparse_attn::mqa_logits(Tensor q, Tensor k, Tensor? k_scale, Tensor weights, Tensor kv_start, Tensor kv_end, str
flavour, str impl) -> Tensor

sparse_attn::no_backward(Tensor output, Tensor[] inputs, str name) -> Tensor

sparse_attn::pack_candidates(Tensor logits, Tensor columns, Tensor? row_starts, int block_size, str impl) -> Tensor

sparse_attn::packed_experts(Tensor x, Tensor weights, Tensor ids, Tensor gate_up, Tensor gate_up_scales, str
gate_up_layout, Tensor down, Tensor down_scales, str down_layout, float? clamp, int num_experts, str activations,
bool batch_invariant, str impl) -> Tensor

sparse_attn::paged_mqa_logits(Tensor q, Tensor cache, Tensor weights, Tensor context_lens, Tensor block_table,
SymInt max_context_len, str layout, str impl) -> Tensor

sparse_attn::refuse_backward(Tensor grad, Tensor like, str name) -> Tensor

sparse_attn::sparse_attn_decode(Tensor q, Tensor cache, Tensor indices, Tensor indptr, float scale, str layout,
Tensor? extra_cache, Tensor? extra_indices, Tensor? extra_indptr, str extra_layout, Tensor? sink, bool
batch_invariant, str impl) -> (Tensor out, Tensor lse)

sparse_attn::sparse_attn_into(Tensor q, Tensor cache, Tensor indices, Tensor indptr, Tensor? lengths, float scale,
str layout, Tensor? extra_cache, Tensor? extra_indices, Tensor? extra_indptr, Tensor? extra_lengths, str
extra_layout, Tensor? sink, bool batch_invariant, Tensor(a!) out, Tensor(b!) lse, Tensor(c!)? max_logits, bool
inf_lse, str impl) -> ()

sparse_attn::sparse_attn_prefill(Tensor q, Tensor kv, Tensor indices, Tensor indptr, float scale, int d_v, Tensor?
sink, bool batch_invariant, str impl) -> (Tensor out, Tensor lse)

sparse_attn::sparse_attn_prefill_backward(Tensor q, Tensor kv, Tensor indices, Tensor indptr, Tensor out, Tensor
lse, Tensor? dout, Tensor? dlse, Tensor? sink, float scale, int d_v, bool wants_q, bool wants_kv, bool wants_sink,
str impl) -> (Tensor dq, Tensor dkv, Tensor dsink)

sparse_attn::step_plan(Tensor query_start_loc, Tensor seq_lens, Tensor slot_mapping, SymInt num_decodes, SymInt
next_n, str impl) -> (Tensor request_ids, Tensor positions, Tensor limits, Tensor slots, Tensor kv_indptr, Tensor
kv_start, Tensor kv_end)

sparse_attn::take_winners(Tensor logits, Tensor? row_starts, Tensor? row_ends, Tensor ties, Tensor above, Tensor
state, int k, int block_size, int rank, str impl) -> Tensor

sparse_attn::top_k_per_row(Tensor logits, Tensor? row_starts, Tensor? row_ends, int k, str impl) -> Tensor

sparse_attn::window_indices(Tensor positions, Tensor request_ids, Tensor block_table, SymInt block_size, int window,
str impl) -> (Tensor, Tensor)

sparse_attn::write_kv_cache(Tensor latent, Tensor rope, Tensor(a!) cache, Tensor slot_mapping, str layout, str impl)
-> ()""",
    )
