"""vLLM's engine on our operators, beside transformers. `scripts/vllm.sh` makes the environment that these run in."""

import importlib.util
import json
import os
import subprocess
import sys
import time
from functools import cache
from pathlib import Path

import pytest
import torch
from support.parity import stable_topk

from sparse_attn.layout import LatentFp8Layout

ENGINE = Path(__file__).resolve().parents[1] / "support" / "vllm_engine.py"
LENGTHS, TOKENS = (5, 37, 130, 301), 24
pytestmark = [
    pytest.mark.vllm,
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="needs vLLM: scripts/vllm.sh"),
]
DIMS = dict(
    vocab_size=320, hidden_size=96, num_hidden_layers=3, num_attention_heads=6, num_key_value_heads=6,
    max_position_embeddings=2048, intermediate_size=160, moe_intermediate_size=64, n_routed_experts=8,
    num_experts_per_tok=3, n_shared_experts=1, kv_lora_rank=48, q_lora_rank=56, qk_rope_head_dim=16,
    qk_nope_head_dim=24, v_head_dim=20, index_topk=24, index_head_dim=128, index_n_heads=5,
)  # fmt: skip
YARN = dict(
    rope_type="yarn", factor=4.0, original_max_position_embeddings=512, beta_fast=32, beta_slow=1, mscale=1.0,
    mscale_all_dim=1.0, rope_theta=10000.0,
)  # fmt: skip
# What a published config says and transformers does not write.
PUBLISHED = dict(topk_method="noaux_tc", scoring_func="sigmoid")


def config_of(kind):
    import transformers

    if kind == "v32":
        grouped = dict(n_group=4, topk_group=2, first_k_dense_replace=1)
        return transformers.DeepseekV32Config(**DIMS, **grouped, rope_parameters=YARN)
    if kind == "v32_wide":  # dims whose latents vLLM's fp8 records hold
        wide = dict(DIMS, kv_lora_rank=512, qk_rope_head_dim=64, first_k_dense_replace=1)
        return transformers.DeepseekV32Config(**wide, n_group=4, topk_group=2, rope_parameters=YARN)
    shared = dict(indexer_types=["full", "shared", "full"]) if kind == "glm5_shared" else {}
    plain = dict(n_group=1, topk_group=1, first_k_dense_replace=1)
    # Latents are normalised with this number by vLLM, and with 1e-6, whatever it is, by transformers.
    return transformers.GlmMoeDsaConfig(**DIMS, **plain, rms_norm_eps=1e-6, **shared)


@pytest.fixture(scope="module")
def folder_of(tmp_path_factory):
    @cache
    def made(kind):
        import transformers

        torch.manual_seed(77)
        model = transformers.AutoModelForCausalLM.from_config(config_of(kind))
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if parameter.dim() > 1:
                    parameter.normal_(0, 0.1)
                elif "norm" in name:
                    parameter.uniform_(0.7, 1.3)
                else:
                    parameter.normal_(0, 0.3)
            for name, buffer in model.named_buffers():
                if "e_score_correction_bias" in name:
                    buffer.normal_(0, 0.1)
        folder = tmp_path_factory.mktemp(kind)
        model.float().save_pretrained(folder)
        fields = json.loads((folder / "config.json").read_text()) | PUBLISHED
        if kind.startswith("glm5"):
            fields["indexer_rope_interleave"] = True
        if kind == "glm5_shared":
            fields["index_topk_pattern"] = "FSF"  # vLLM's name of indexer_types
        (folder / "config.json").write_text(json.dumps(fields))
        return folder

    return made


def prompts_of(lengths=LENGTHS, seed=5):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(3, 320, (length,), generator=generator).tolist() for length in lengths]


@pytest.fixture
def expected(folder_of, monkeypatch):
    """Greedy tokens of transformers' eager forward, of equal scores the first; index queries and keys as they are
    ``kept``."""

    def tokens(kind, prompts, counts, kept="fp32", records=False):
        import transformers

        monkeypatch.setattr(torch.Tensor, "topk", stable_topk)
        model = transformers.AutoModelForCausalLM.from_pretrained(
            folder_of(kind), dtype=torch.float32, attn_implementation="eager"
        ).eval()
        if kept == "fp8":
            round_indexers(model)
        if records:
            round_latents(model)
        found = []
        with torch.no_grad():
            for prompt, count in zip(prompts, counts):
                ids = torch.tensor([prompt])
                for _ in range(count):
                    ids = torch.cat([ids, model(ids, use_cache=False).logits[:, -1:].argmax(-1)], 1)
                found.append(ids[0, len(prompt) :].tolist())
        return found

    return tokens


def round_indexers(model):
    """Have index queries and keys rounded to e4m3 with a power of two a vector, where heads meet in the product."""
    from sparse_attn.fp8 import fp8_decode, fp8_quantise

    def rounded(x):
        codes, scale = fp8_quantise(x.float(), "e4m3fn", "pow2", 1e-4)
        return fp8_decode(codes, "e4m3fn") * scale.unsqueeze(-1)

    kind = sys.modules[type(model).__module__]
    interleaved = model.config.model_type != "deepseek_v32"
    rotate = kind.apply_rotary_pos_emb_interleave if interleaved else kind.apply_rotary_pos_emb

    def forward(self, hidden, latent, embeddings, mask, *others, past_key_values=None, **more):
        rope = self.qk_rope_head_dim
        q = self.wq_b(latent).unflatten(-1, (self.n_heads, self.head_dim))
        k = self.k_norm(self.wk(hidden)).unsqueeze(2)
        rotated = rotate(q[..., :rope], k[..., :rope], *embeddings, unsqueeze_dim=2)
        q, k = (rounded(torch.cat([head, x[..., rope:]], -1)) for head, x in zip(rotated, (q, k)))
        weights = self.weights_proj(hidden).float() * self.n_heads**-0.5 * self.head_dim**-0.5
        scores = torch.einsum("bsh,bsht->bst", weights, torch.einsum("bshd,btxd->bsht", q, k).relu())
        scores = scores.masked_fill(~mask, -torch.inf) if mask.dtype == torch.bool else scores + mask
        return scores.topk(min(self.index_topk, scores.shape[-1]), dim=-1).indices.int()

    for layer in model.model.layers:
        if layer.self_attn.indexer is not None:
            layer.self_attn.indexer.forward = forward.__get__(layer.self_attn.indexer)


def round_latents(model):
    """Have latents and rotated keys rounded as records of 656 bytes keep them."""
    layout = LatentFp8Layout(model.config.kv_lora_rank, model.config.qk_rope_head_dim, scale_rule="pow2")
    for layer in model.model.layers:

        def rounded(latent, rope, expand=layer.self_attn.expand_kv):
            rows = torch.cat([latent, rope], -1).flatten(0, -2)
            cache, slots = torch.zeros(1, len(rows), layout.row, dtype=torch.uint8), torch.arange(len(rows))
            layout.encode(cache, slots, rows)
            kept = layout.decode(cache, slots).view(*latent.shape[:-1], -1)
            return expand(*kept.split([latent.shape[-1], rope.shape[-1]], -1))

        layer.self_attn.expand_kv = rounded


def left_of(session):
    """Processes of a session that still run after ten seconds."""
    for _ in range(100):
        listed = subprocess.run(["ps", "-s", str(session), "-o", "pid=,stat=,args="], capture_output=True, text=True)
        left = [line for line in listed.stdout.splitlines() if line.split()[1][0] != "Z"]
        if not left:
            break
        time.sleep(0.1)
    return left


def engine(folder, prompts=(), counts=(), index="fp32", variable="1", env=None, **job):
    """(tokens or None, what the process said)."""
    args = dict(max_model_len=1024, max_num_seqs=8, max_num_batched_tokens=1024, dtype="float32", enforce_eager=True)
    job["args"] = args | job.pop("args", {})
    job |= dict(model=str(folder), prompts=list(prompts), counts=list(counts))
    settings = dict(
        VLLM_ENABLE_V1_MULTIPROCESSING="0", VLLM_CPU_KVCACHE_SPACE="1", VLLM_CPU_OMP_THREADS_BIND="nobind",
        HF_HUB_OFFLINE="1", SPARSE_ATTN_VLLM_INDEX_CACHE=index, SPARSE_ATTN_VLLM=variable,
    )  # fmt: skip
    shared = set(os.listdir("/dev/shm"))
    with subprocess.Popen(
        [sys.executable, "-P", str(ENGINE)], env=os.environ | settings | (env or {}), text=True,
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True,
    ) as done:  # fmt: skip
        out, errors = done.communicate(json.dumps(job), timeout=600)
    said = out + errors
    assert not left_of(done.pid), said
    assert set(os.listdir("/dev/shm")) <= shared, said
    if done.returncode:
        return None, said
    return json.loads(out.rpartition("TOKENS ")[2].splitlines()[0]), said


@pytest.mark.parametrize("kind", ["v32", "glm5", "glm5_shared"])
@pytest.mark.parametrize("index", ["fp32", "fp8"])
def test_greedy_tokens_are_those_of_transformers(folder_of, expected, kind, index):
    prompts, counts = prompts_of(), [TOKENS] * 4
    found, said = engine(folder_of(kind), prompts, counts, index)
    assert found == expected(kind, prompts, counts, index), said
    assert said.count("sparse_attn has indexers, selection, cache writes and attention of Multi") == 1


@pytest.mark.parametrize("index", ["fp32", "fp8"])
def test_latents_in_records_of_656_bytes(folder_of, expected, index):
    prompts, counts = prompts_of(), [TOKENS] * 4
    found, said = engine(folder_of("v32_wide"), prompts, counts, index, args=dict(kv_cache_dtype="fp8_ds_mla"))
    assert found == expected("v32_wide", prompts, counts, index, records=True), said


def test_a_model_and_caches_in_bf16(folder_of):
    """No forward rounds alike, so no tokens are compared: of a prompt, alone and in company, they are the same."""
    prompts, counts, args = prompts_of(), [TOKENS] * 4, dict(dtype="bfloat16")
    together, said = engine(folder_of("v32"), prompts, counts, "bf16", args=args)
    alone, said = engine(folder_of("v32"), prompts, counts, "bf16", args=args | dict(max_num_seqs=1))
    assert together and [len(one) for one in together] == counts and together == alone, said


@pytest.mark.parametrize("processes", ["0", "1"])  # the engine in this process, or in one of its own
def test_steps_of_decode_and_prefill_rows(folder_of, expected, processes):
    prompts, counts = prompts_of(), [24, 12, 24, 24]  # the second ends early, and the fourth joins decode rows
    env, args = dict(VLLM_ENABLE_V1_MULTIPROCESSING=processes), dict(max_num_seqs=3)
    found, said = engine(folder_of("v32"), prompts, counts, "fp8", env=env, args=args)
    assert found == expected("v32", prompts, counts, "fp8"), said


def test_a_compiled_model(folder_of, expected):
    prompts, counts = prompts_of(), [TOKENS] * 4
    env, args = dict(VLLM_USE_BREAKABLE_CUDAGRAPH="0"), dict(enforce_eager=False)
    found, said = engine(folder_of("v32"), prompts, counts, env=env, args=args)
    assert found == expected("v32", prompts, counts), said
    assert "DYNAMO_TRACE_ONCE" in said  # it was compiled


def test_two_ranks(folder_of, expected):
    prompts, counts = prompts_of(), [TOKENS] * 4
    args = dict(tensor_parallel_size=2, distributed_executor_backend="mp")
    found, said = engine(folder_of("v32"), prompts, counts, args=args)
    assert found == expected("v32", prompts, counts), said


def test_two_hundred_requests_that_arrive_over_time(folder_of, expected):
    generator = torch.Generator().manual_seed(8)
    lengths = torch.randint(1, 120, (200,), generator=generator).tolist()
    prompts, counts = prompts_of(lengths), torch.randint(1, 12, (200,), generator=generator).tolist()
    found, said = engine(folder_of("v32"), prompts, counts, arriving=True)
    assert found == expected("v32", prompts, counts), said


@pytest.mark.parametrize("mutant", [
    "half_of_top_k", "keys_not_written", "latents_not_written", "plan_of_the_step_before", "ties_turned_round",
])  # fmt: skip
def test_mutants_are_caught(folder_of, expected, mutant):
    prompts, counts = prompts_of(), [TOKENS] * 4
    found, said = engine(folder_of("v32"), prompts, counts, mutant=mutant)
    assert found is not None and found != expected("v32", prompts, counts), said


def test_without_the_variable_vllm_is_as_without_us(folder_of):
    found, said = engine(folder_of("v32"), [[5]], [1], variable="0")
    assert found is None and "NotImplementedError: Sparse Attention is not supported on CPU." in said
    assert "sparse_attn" not in said.replace(str(ENGINE.parents[2]), "")


@pytest.mark.parametrize("args, variable, problem", [
    ({}, "calls", "SPARSE_ATTN_VLLM: got 'calls', allowed: 1, or 0 for vLLM's own"),
    (dict(kv_cache_dtype="fp8"), "1", "kv_cache_dtype: got fp8, allowed: auto, float16, bfloat16, fp8_ds_mla"),
    (dict(kv_cache_dtype="fp8_ds_mla"), "1", "got fp8_ds_mla with latents of 48 + 16, allowed: 512 + 64"),
    (dict(enable_lora=True), "1", "lora_config: is set, allowed: not with these layers yet"),
])  # fmt: skip
def test_what_was_never_run_is_refused_by_name(folder_of, args, variable, problem):
    found, said = engine(folder_of("v32"), [[5]], [1], variable=variable, args=args)
    assert found is None and problem in said, said
    assert "Loading weights took" not in said
